"""What a deployment may do when something it needs was taken away: answer right, or fail cleanly and in time, and come back."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdgate.connectors import connector_of
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import Finding, note
from pdgate.rules.running import running_engine
from pdgate.rules.statistics import percentile
from pdgate.serving.exchange import Settling, unsettled
from pdgate.serving.record import Record

WINDOW_S = 1.0
OUTLIVES = "the outage outlives its cause: somebody must restart something by hand"
WHO_KEEPS_IT = "does the proxy keep the old engine id (smg#2491)? does D keep a dead peer? restart one at a time to see"
RESTARTED_S = 1.0  # start times are known to a clock tick and the doubt of the host's clock


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


@dataclass(frozen=True)
class Expectation:
    """What the deployment is to do, as declared for this experiment. Seconds count from the healing."""

    recovers_within_s: float
    errors_allowed: bool = True  # clean failures while the fault lasts
    hangs_allowed: bool = False
    why: str = ""


@dataclass(frozen=True)
class Measures:
    """What the client saw. All times in the controller's clock; `fault` and `heal` are intervals, so each measure carries their width.

    detected_s: from the fault to the first request that did not end well (None: nobody noticed). first_good_s: from the healing to the
    first good answer. steady_s: from the healing until every request is good again for WINDOW_S (None: never). dip: requests that
    were not good from the fault on.
    """

    fault: tuple[float, float]
    heal: tuple[float, float]
    before: dict[str, int]
    during: dict[str, int]
    after: dict[str, int]
    detected_s: float | None
    first_good_s: float | None
    steady_s: float | None
    dip: float
    late_s: float = 0.0
    slowest_s: tuple[float, float] = (0.0, 0.0)  # good answers, from being sent to the end: before the fault, and from then on
    timeline: list[dict[str, float]] = field(default_factory=list)  # requests that ended in each second from `start` on: good, bad
    start: float = 0.0  # epoch seconds of the first request

    @property
    def uncertainty_s(self) -> float:
        """Width of the moments of fault and healing, or how late the load generator was, whichever is larger."""
        return max(self.fault[1] - self.fault[0], self.heal[1] - self.heal[0], self.late_s)


FAILED = ("error", "empty", "truncated")
BAD = ("wrong", "hang", *FAILED)


def measure(records: list[Record], fault: tuple[float, float], heal: tuple[float, float]) -> Measures:
    """Measures from the records of a load that ran through before, during and after; raises UnknownFact where it did not."""
    records = [record for record in records if record.outcome != "aborted"]
    before = [record for record in records if (record.end or record.scheduled) < fault[0]]
    during = [record for record in records if record not in before and record.scheduled < heal[1]]
    after = [record for record in records if record.scheduled >= heal[1]]
    if not before or not during or not after:
        raise UnknownFact(f"the load did not run through: {len(before)} requests before the fault, {len(during)} during it, {len(after)} after it")
    bad_ends = [record.end for record in records if record.outcome in BAD and record.end is not None and record.end >= fault[0]]
    good_ends = [record.end for record in records if record.outcome == "ok" and record.end is not None and record.end >= heal[0] and record.scheduled >= fault[1]]
    start, end = min(record.scheduled for record in records), max(record.end or record.scheduled for record in records)
    timeline = [
        {"second": second, **{kind: float(sum(start + second <= (record.end or 0) < start + second + 1 and (record.outcome == "ok") == (kind == "good") for record in records)) for kind in ("good", "bad")}}
        for second in range(int(end - start) + 1)
    ]  # fmt: skip
    return Measures(
        fault, heal, _outcomes(before), _outcomes(during), _outcomes(after),
        max(0.0, min(bad_ends) - fault[1]) if bad_ends else None, max(0.0, min(good_ends) - heal[1]) if good_ends else None, _steady(after, heal[1]),
        float(sum(record.outcome != "ok" for record in during + after)), percentile([record.late for record in records], 0.95).value,
        (_slowest(before), _slowest(during + after)), timeline, start,
    )  # fmt: skip


def _slowest(records: list[Record]) -> float:
    return max((record.e2e or 0.0 for record in records if record.outcome == "ok"), default=0.0)


def _outcomes(records: list[Record]) -> dict[str, int]:
    return dict(Counter(record.outcome for record in records))


def in_words(seen: Measures) -> str:
    """The measures as one sentence."""
    total = sum(seen.during.values()) + sum(seen.after.values())
    noticed = "no request failed" if seen.detected_s is None else f"the first failure {seen.detected_s:.2f} s after the fault"
    good = "no good answer after the healing" if seen.first_good_s is None else f"the first good answer {seen.first_good_s:.2f} s after the healing"
    steady = "never steady again" if seen.steady_s is None else f"steady from {seen.steady_s:.2f} s after it"
    during = ", ".join(f"{count} {outcome}" for outcome, count in sorted(seen.during.items()))
    return f"{seen.dip:.0f} of {total} requests were not good (while it lasted: {during}); {noticed}, the slowest answer took {seen.slowest_s[1]:.2f} s ({seen.slowest_s[0]:.2f} s before), {good}, {steady}; all +- {seen.uncertainty_s:.2f} s"


def _steady(after: list[Record], heal: float) -> float | None:
    """Seconds until the last bad request after the healing was scheduled, and good ones for a while behind it."""
    bad = [record.scheduled for record in after if record.outcome in BAD]
    first = max(bad) if bad else heal
    good = [record for record in after if record.scheduled >= first and record.outcome == "ok"]
    if not good or max(record.scheduled for record in good) - first < WINDOW_S:
        return None
    return max(0.0, min(record.scheduled for record in good) - heal) if bad else 0.0


def parted(records: list[Record], hands: list[tuple[float, float, int, int]]) -> list[Record]:
    """Requests that failed between faults because standing connections were ended to put Toxiproxy in or out: as many as were, at most.

    `hands`: of each fault when it began and ended (outer bounds), how many connections ended before it hurt and when it was undone.
    A client that does not look first fails on them; of the fault that says nothing.
    """
    gone = [(-math.inf, 0), *((end, cut) for _, end, _, cut in hands)]
    coming = [*((begin, renewed) for begin, _, renewed, _ in hands), (math.inf, 0)]
    failed = [record for record in records if record.outcome in FAILED]
    found: list[Record] = []
    for (since, cut), (until, renewed) in zip(gone, coming, strict=True):
        found += [record for record in failed if since <= record.sent and (record.end or record.sent) < until][: cut + renewed]
    return found


def behaved(
    target: str, seen: Measures, expected: Expectation, records: list[Record], by_fault: str = "", did: str = "", about_wrong: str = "", not_its_doing: Sequence[Record] = ()
) -> Iterator[Finding]:  # fmt: skip
    """No wrong answer ever; hangs and failures only as declared; back to steady state in time.

    `did`: what was done, in words; `about_wrong`: what is known of the wrong answers; `not_its_doing`: failures of our own hands on the path (`parted`), which are neither in `seen` nor in `records`.
    """
    if seen.uncertainty_s > expected.recovers_within_s / 2:
        raise UnknownFact(f"fault and healing are known to {seen.uncertainty_s:.2f} s only: too uncertain against {expected.recovers_within_s:g} s")
    every = Counter(seen.during) + Counter(seen.after)
    yield note(target, (f"{did}: " if did else "") + in_words(seen) + (f"; {by_fault}" if by_fault else ""))
    wrong = [record for record in records if record.outcome == "wrong"]
    if wrong:
        yield Finding(
            target=wrong[0].engine or target, expected="no wrong answer, whatever fails", seen=f"{len(wrong)} wrong answers, the first: prompt {wrong[0].prompt_id}, "
            f"id {wrong[0].served_id}: {wrong[0].detail}{about_wrong}", why="fluent nonsense with status 200 reaches users",
            remedy="see 'Mooncake transfer failed' in D's log (vllm-ascend#17044), forced frees before late pulls (#15420)",
        )  # fmt: skip
    if every["hang"] and not expected.hangs_allowed:
        hung = next(record for record in records if record.outcome == "hang")
        yield Finding(
            target=target, expected="requests that cannot be served fail within their deadline", seen=f"{every['hang']} requests hang: {hung.detail}",
            why="clients see silence, not an error, and wait for ever", remedy="which side waits? D's log for 'Deferred', the proxy for a dead upstream; vllm#35943, #50719",
        )  # fmt: skip
    if not_its_doing:
        yield note(target, f"{len(not_its_doing)} requests failed on connections that ended when Toxiproxy came or went: of the fault that says nothing ({not_its_doing[0].detail[:120]})")
    failed = sum(every[kind] for kind in FAILED)
    if failed and not expected.errors_allowed:
        bad = next(record for record in records if record.outcome in FAILED)
        yield Finding(
            target=target, expected="no request fails: the deployment can do without what was taken", seen=f"{failed} of {sum(every.values())} fail: {bad.outcome}: {bad.detail[:200]}" + (f" ({by_fault})" if by_fault else ""),
            why=expected.why or "the fault reaches users", remedy="retries and failover of the proxy (vllm-ascend#13165), spare engines",
        )  # fmt: skip
    if seen.steady_s is None or seen.steady_s > expected.recovers_within_s:
        took = "never within the experiment" if seen.steady_s is None else f"after {seen.steady_s:.1f} s (+- {seen.uncertainty_s:.2f} s)"
        rest = ", ".join(f"{count} {outcome}" for outcome, count in sorted(seen.after.items()))
        yield Finding(
            target=target, expected=f"every request is good again within {expected.recovers_within_s:g} s of the healing", seen=f"{took}; after the healing: {rest}",
            why=OUTLIVES, remedy=WHO_KEEPS_IT,
        )  # fmt: skip


def kv_is_back(settling: Settling, gone: set[str]) -> Iterator[Finding]:
    """KV on P and D is back at its baseline; an engine that was killed counts from its new start."""
    if settling.seconds is not None:
        return
    for name, held in unsettled(settling.baseline, settling.last).items():
        if name in gone and "answers no more" in held:
            continue
        yield Finding(
            target=name, expected=f"back at its baseline within {settling.bound_s:g} s", seen=f"still {held}",
            why="KV that a fault strands is lost until a restart", remedy="restart it to get them back; why: D's last lines for those requests, P's 'Delaying free' without its end (vllm-ascend#12383, #13240; vllm#50425)",
        )  # fmt: skip


def good_again(target: str, good_s: float | None, bound_s: float, lost: str) -> Iterator[Finding]:
    """Requests are good again in time, once what was lost has been started again."""
    if good_s is None or good_s > bound_s:
        took = "not within the experiment" if good_s is None else f"after {good_s:.1f} s"
        yield Finding(
            target=target, expected=f"three good answers in a row within {bound_s:g} s of the healing of {lost}", seen=took,
            why=OUTLIVES, remedy=WHO_KEEPS_IT,
        )  # fmt: skip


def said_why(engine: Engine, lines: list[str] | None, unknown: str) -> Iterator[Finding]:
    """An engine that cannot have a port of its group says so in its log; raises UnknownFact without the log."""
    if lines is None:
        raise UnknownFact(f"whether {engine.name} said why it did not start cannot be told: {unknown}")
    if not any(re.search(connector_of(engine.connector).signatures.bind_failed, line) for line in lines):
        yield Finding(
            target=engine.name, expected="a line that names the port that is taken", seen=f"{len(lines)} new lines, none of them",
            why="it hangs or serves without its side channel, and nobody can tell why requests get nothing", remedy="look at its processes; ports.group.owned names the owner",
        )  # fmt: skip


def each_in_time(returns: dict[str, float | None], restart_s: float) -> Iterator[Finding]:
    """Every engine that was restarted in turn serves again in time. `returns`: engine to seconds, None: not at all."""
    for name, seconds in returns.items():
        if seconds is None or seconds > restart_s:
            yield Finding(
                target=name, expected=f"serves within {restart_s:g} s of its restart (pd_load.restart_s)", seen="not at all" if seconds is None else f"after {seconds:.1f} s",
                why="a rolling restart takes the next one down while this one is still away", remedy="its log from the restart on: what took so long?",
            )  # fmt: skip


def left_out_in_time(target: str, records: list[Record], fault: tuple[float, float], heal: tuple[float, float], promised_s: float) -> Iterator[Finding]:
    """From `promised_s` after the fault on no request fails, though the engine is still away; raises UnknownFact where none was sent then."""
    late = [record for record in records if fault[1] + promised_s <= record.scheduled < heal[0] and record.outcome != "aborted"]
    if not late:
        raise UnknownFact(f"no request was sent between {promised_s:g} s after the fault and its healing")
    bad = [record for record in late if record.outcome != "ok"]
    if bad:
        yield Finding(
            target=target, expected=f"an engine that fell silent is left out after {promised_s:g} s (pd_expect.failover_s)",
            seen=f"{len(bad)} of {len(late)} requests sent later fail: {bad[0].outcome}: {bad[0].detail[:160]}",
            why="the proxy goes on sending users to an engine that is gone", remedy="a proxy with health checks (vllm-router), or vllm-ascend#13165",
        )  # fmt: skip


def came_back(missing: set[str], restart_s: float) -> Iterator[Finding]:
    """What was hurt serves again once it is healed."""
    for name in sorted(missing):
        yield Finding(
            target=name, expected=f"it lists its model again within {restart_s:g} s of the healing", seen="it does not",
            why="the fault is over and the engine still gone: the deployment runs on what is left, or on nothing", remedy="its log from the restart on; ports of the group, engines.orphans",
        )  # fmt: skip


def nobody_else_died(deployment: Deployment, before: dict[str, HostFacts], after: dict[str, HostFacts], victims: set[str]) -> Iterator[Finding]:
    """No cascade: every engine that was not meant runs on as the same process."""
    for engine in deployment.engines:
        if engine.name in victims:
            continue
        machine = deployment.host_of(engine).machine
        was, now = running_engine(engine, before[machine]), running_engine(engine, after[machine])
        if was is None:
            continue
        if now is None or now.api.pid != was.api.pid or abs(now.api.started - was.api.started) > RESTARTED_S or len(now.pids) < len(was.pids):
            yield Finding(
                target=engine.name, expected="only what was hurt is gone", seen="it is gone" if now is None else f"it was restarted or lost a process (pid {was.api.pid} before, {now.api.pid} now)",
                why="one fault takes other engines with it", remedy="its log's last lines; vllm-ascend#7514 (P dies when D dies), #13628", severity="critical",
            )  # fmt: skip
