"""The load judged by its records: wrong answers, missing answers, streams, and whether the sums agree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Deployment
from pdgate.rules.finding import Finding
from pdgate.rules.statistics import percentile, share
from pdgate.serving.golden import GoldenBook
from pdgate.serving.load import LoadResult
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record

LATE_S = 0.25
SHOWN = 5
Samples = dict[str, Sample]


def must_be_applied(load: LoadResult) -> None:
    """Raises UnknownFact where the load was not what the plan says: then nothing can be concluded from it."""
    if not load.records:
        raise UnknownFact("the load made no request: pd_load.rate x pd_load.seconds is too small")
    if load.unsent:
        raise UnknownFact(f"{load.unsent} scheduled requests were not sent or never came back to the load generator: the load was not applied as planned")


def must_be_punctual(load: LoadResult) -> None:
    """Raises UnknownFact where requests left later than scheduled: then latencies are the load generator's own, not the deployment's."""
    late = percentile([record.late for record in load.records], 0.95).value
    if late > LATE_S:
        raise UnknownFact(
            f"the load generator itself was late: 95 % of its requests within {late * 1000:.0f} ms of their time, {LATE_S * 1000:.0f} ms allowed; "
            "give it more processes (--load-workers) or a lower pd_load.rate"
        )


def no_wrong_answers(target: str, records: list[Record], book: GoldenBook) -> Iterator[Finding]:
    """Every answer is the golden one, as far as the deployment answers the same question the same way at all."""
    wrong = [record for record in records if record.outcome == "wrong"]
    judged = [record for record in records if record.prompt_id in {golden.prompt.id for golden in book.judgeable} and record.text]
    for record in wrong[:SHOWN]:
        yield Finding(
            target=record.engine or target, expected="the golden answer",
            seen=f"prompt {record.prompt_id}, id {record.served_id or 'unknown'}, HTTP {record.status}: {record.detail}",
            why="fluent nonsense with status 200 reaches users: the answer was computed over KV that is not the prompt's",
            remedy="look for 'Mooncake transfer failed' (vllm-ascend#17044) and 'Force freed' (#15420) in the logs of the bundle around it",
        )  # fmt: skip
    if len(wrong) > SHOWN:
        yield Finding(target=target, expected="golden answers", seen=f"{len(wrong)} of {len(records)} answers are wrong", why="see above",
                      remedy="all are in requests.jsonl with outcome wrong")  # fmt: skip
    for limit in book.limits():
        yield Finding(target=target, expected="the same question gets the same answer", seen=limit, why="a greedy model that is not deterministic hides damage",
                      remedy="-", severity="note")  # fmt: skip
    if not judged:
        raise UnknownFact(f"no answer could be held against a golden one (learned from {book.learned_from}): " + "; ".join(book.limits()))


WHY = {
    "empty": "the decoder failed before its first token and the proxy had already answered 200 (vllm-ascend#13140)",
    "truncated": "the decoder failed in mid-answer and nobody told the client",
    "hang": "the request waits for KV that never comes: clients see silence, not an error",
    "error": "clients see a failure",
}


def everything_answered(target: str, records: list[Record]) -> Iterator[Finding]:
    """No request fails: no error, no silence, no empty or cut answer (cut and empty streams are the next rule's)."""
    missing = [record for record in records if record.outcome in WHY and not _is_stream_fault(record)]
    yield from _by_outcome(target, missing, records, "every request is answered whole")


def streams_are_whole(target: str, records: list[Record], max_tokens: dict[str, int]) -> Iterator[Finding]:
    """Streams that began end with finish reason and [DONE], no error inside, tokens in order, as many as were counted."""
    streams = [record for record in records if record.stream]
    if not streams:
        raise UnknownFact("the load made no streamed request (pd_load.stream_share)")
    yield from _by_outcome(target, [record for record in streams if _is_stream_fault(record)], streams, "every stream that begins ends whole")
    short = [
        record for record in streams
        if record.outcome in ("ok", "wrong") and record.finish_reason == "length" and record.completion_tokens is not None
        and not len(record.tokens) <= record.completion_tokens == max_tokens.get(record.prompt_id, record.completion_tokens)
    ]  # fmt: skip
    for record in short[:1]:
        yield Finding(
            target=target, expected="as many tokens as usage counts and as were asked for, with finish reason 'length'",
            seen=f"{len(short)} streams differ, the first: {len(record.tokens)} chunks, usage {record.completion_tokens}, asked {max_tokens.get(record.prompt_id)}",
            why="tokens were lost or doubled on the way", remedy="compare the proxy's answer with the engine's own; see recompute retries of the proxy",
        )  # fmt: skip


def _is_stream_fault(record: Record) -> bool:
    return record.stream and record.status == 200 and record.outcome in ("empty", "truncated", "error")


def _by_outcome(target: str, bad: list[Record], of: list[Record], expected: str) -> Iterator[Finding]:
    groups = Counter((record.outcome, re.sub(r"\d+", "#", record.detail)[:120]) for record in bad)
    for (outcome, _), count in groups.most_common(SHOWN):
        example = next(record for record in bad if record.outcome == outcome and re.sub(r"\d+", "#", record.detail)[:120] == _)
        rate = share(count, len(of))
        yield Finding(
            target=target, expected=expected,
            seen=f"{count} of {len(of)} ({rate.value:.1%}, 95 %: {rate.low:.1%} - {rate.high:.1%}): {outcome}: {example.detail[:200]} (first: prompt "
            f"{example.prompt_id}{f', id {example.served_id}' if example.served_id else ''})",
            why=WHY[outcome], remedy="requests.jsonl has every one of them; read the logs of the proxy and the engine at that moment",
        )  # fmt: skip


def sums_agree(deployment: Deployment, load: LoadResult, before: Samples, after: Samples) -> Iterator[Finding]:
    """Sent equals the sum of outcomes, and prefill and decode engines have each finished what was sent, no less and no more."""
    sent, outcomes = len(load.records), load.counts()
    whole = sum(record.outcome in ("ok", "wrong") and record.finish_reason is not None for record in load.records)
    if sum(outcomes.values()) != sent:
        yield Finding(target="load", expected=f"outcomes of {sent} requests", seen=str(dict(outcomes)), why="requests are lost in the count", remedy="report a bug of pdgate")  # fmt: skip
    done = {role: _finished(deployment, role, before, after) for role in ("prefill", "decode")}
    answered = {role: _finished(deployment, role, before, after, answered_only=True) for role in ("prefill", "decode")}
    more = {role for role, count in done.items() if count > sent}
    if more == {"prefill", "decode"}:
        raise UnknownFact(
            f"the engines finished {done['prefill']:.0f} and {done['decode']:.0f} requests where the load sent {sent}: somebody else's traffic ran at the same "
            "time, or the proxy doubles requests; repeat it without other traffic"
        )
    for role in sorted(more):
        yield Finding(
            target=f"{role} engines", expected=f"at most {sent} requests, as many as were sent",
            seen=f"{done[role]:.0f} by vllm:request_success_total", why="the proxy sends requests twice: work is done that nobody gets",
            remedy="look for retries in the proxy's log ('Attempt 1 failed')",
        )  # fmt: skip
    if answered["decode"] < whole:
        yield Finding(
            target="decode engines", expected=f"at least {whole} answers, as many as clients got whole", seen=f"{answered['decode']:.0f} by vllm:request_success_total",
            why="answers came from an engine that is not in the inventory, or counters were reset: an engine restarted during the load",
            remedy="compare the proxy's decoder list with the inventory; check engines' start times",
        )  # fmt: skip


def _finished(deployment: Deployment, role: str, before: Samples, after: Samples, answered_only: bool = False) -> float:
    """Requests the engines of a role finished between two scrapes; raises UnknownFact where one cannot be told."""
    total = 0.0
    for engine in deployment.engines:
        if engine.role not in (role, "both"):
            continue
        if engine.name not in before or engine.name not in after:
            raise UnknownFact(f"{engine.name}: /metrics was not readable before and after the load")
        reasons = ("stop", "length") if answered_only else (None,)
        for reason in reasons:
            labels = {"finished_reason": reason} if reason else {}
            now, was = (sample.total("vllm:request_success_total", **labels) for sample in (after[engine.name], before[engine.name]))
            if now is None:
                raise UnknownFact(f"{engine.name}: no vllm:request_success_total in /metrics")
            total += now - (was or 0)
    return total
