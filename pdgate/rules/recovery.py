"""What a deployment may do when something it needs was taken away: answer right, or fail cleanly and in time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdgate.connectors import connector_of
from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Engine
from pdgate.rules.finding import Finding
from pdgate.serving.record import Record


def with_outcome(record: Record, golden: Record | None) -> Record:
    """The record with `wrong` where a complete answer is not the golden one; raises UnknownFact without a golden answer."""
    if record.outcome != "ok":
        return record
    if golden is None or golden.outcome != "ok":
        raise UnknownFact("the golden answer could not be learned, so a complete answer cannot be told from a wrong one")
    if record.text == golden.text:
        return record
    return record.model_copy(update={"outcome": "wrong", "detail": f"{record.text[:80]!r} instead of {golden.text[:80]!r}"})


def right_or_cleanly_failed(decoder: Engine, record: Record, lines: list[str], deadline_s: float) -> Iterator[Finding]:
    """After P was lost, D answers the golden text or an error: never a wrong text with 200, never silence."""
    if record.outcome == "ok" or (record.outcome == "error" and record.status is not None and record.status >= 500):
        return
    connector = connector_of(decoder.connector)
    failed = next((line.strip() for line in lines if re.search(connector.signatures.transfer_failed, line)), None)
    evidence = f"; D's log: {failed[:240]}" if failed else "; no line of a failed transfer in D's log"
    issue = connector.known_issues.get("wrong" if record.outcome == "wrong" else "hang")
    policy = "reports" if connector.load_failures_reported(decoder) else "does not report"
    yield Finding(
        target=decoder.name,
        expected=f"the golden answer or a 5xx within {deadline_s:g} s",
        seen=f"request {record.prompt_id}: {record.outcome}, HTTP {record.status}: {record.detail}{evidence}",
        why="fluent nonsense with status 200 reaches users"
        if record.outcome == "wrong"
        else "clients wait for ever, and D keeps the blocks of the request",
        remedy=f"{connector.name} {decoder.versions.get(connector.package, '(version unknown)')} {policy} failed pulls to the scheduler"
        + (f"; known issue: {issue}" if issue else "; not a known issue"),
        reference=issue,
    )


def serves_again(target: str, record: Record, restarted: str) -> Iterator[Finding]:
    """A request through the proxy is answered with the golden text once the engine has come back."""
    if record.outcome != "ok":
        yield Finding(
            target=target, expected=f"the golden answer after {restarted} came back",
            seen=f"request {record.prompt_id}: {record.outcome}, HTTP {record.status}: {record.detail}",
            why="the deployment stays broken until the proxy or D is restarted too",
            remedy="a proxy must learn the new engine id (smg-project/smg#2491), and D must drop what it knew of the old peer",
        )  # fmt: skip
