"""Latency and throughput against the declared objectives, with the confidence the number of requests allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pdgate.facts.model import UnknownFact
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.load import must_be_punctual
from pdgate.rules.statistics import Estimate, needed_for, percentile
from pdgate.serving.load import LoadResult

WHAT = {"ttft": "time to first token", "itl": "mean time between tokens of a request", "e2e": "time to the end"}


def latency(target: str, kind: str, load: LoadResult, objectives: dict[str, float]) -> Iterator[Finding]:
    """Every declared percentile of `kind` (ttft, itl, e2e) is met; times count from the scheduled moment."""
    declared = {key: limit for key, limit in objectives.items() if key.startswith(f"{kind}_p")}
    if not declared:
        raise NotRun(f"no {kind} objective in pd_expect.slo")
    must_be_punctual(load)
    good = [record for record in load.records if record.outcome == "ok"]
    values = [value * 1000 for record in good if (value := getattr(record, kind)) is not None]
    if not values:
        raise UnknownFact(f"no good answer{' of a stream' if kind != 'e2e' else ''} to measure the {WHAT[kind]} on")
    doubts = []
    for key, limit in declared.items():
        q = int(key.split("_")[1][1:]) / 100
        seen = percentile(values, q)
        if seen.low > limit:
            yield Finding(
                target=target, expected=f"{key.removesuffix('_ms')} of the {WHAT[kind]} at most {limit:g} ms", seen=_words(seen),
                why="users wait longer than was promised", remedy="compare prefill queue, transfer time and decode batch: vllm:request_queue_time_seconds, D's "
                "'KV cache transfer … took', vllm:num_requests_running",
            )  # fmt: skip
        elif seen.high > limit:
            more = f"; a bound at this percentile needs at least {needed_for(q)} requests" if math.isinf(seen.high) else ""
            doubts.append(f"{key}: {_words(seen)}, objective {limit:g} ms: too few requests to tell{more} (pd_load.rate, pd_load.seconds)")
    if doubts:
        raise UnknownFact("; ".join(doubts))


def _words(seen: Estimate) -> str:
    high = "unknown" if math.isinf(seen.high) else f"{seen.high:.0f}"
    low = "unknown" if math.isinf(seen.low) else f"{seen.low:.0f}"
    return f"{seen.value:.0f} ms (95 %: {low} - {high}, {seen.count} requests)"


def throughput(target: str, load: LoadResult, objectives: dict[str, float]) -> Iterator[Finding]:
    """Good answers and their tokens per second of the load reach what was declared."""
    declared = {key: limit for key, limit in objectives.items() if key in ("requests_per_s", "tokens_per_s")}
    if not declared:
        raise NotRun("no requests_per_s or tokens_per_s in pd_expect.slo")
    must_be_punctual(load)
    good = [record for record in load.records if record.outcome == "ok" and record.end is not None]
    if not good:
        raise UnknownFact("no good answer to measure the throughput on")
    seconds = max(load.plan.seconds, max(record.end or 0 for record in good) - load.start)
    tokens = [record.completion_tokens for record in good]
    for key, limit in declared.items():
        if key == "tokens_per_s" and None in tokens:
            raise UnknownFact("answers bear no usage, so their tokens cannot be counted")
        amount = len(good) if key == "requests_per_s" else sum(count or 0 for count in tokens)
        if amount / seconds < limit:
            yield Finding(
                target=target, expected=f"at least {limit:g} {key.replace('_per_s', '')} a second", seen=f"{amount / seconds:.2f} ({amount} in {seconds:.1f} s)",
                why="the deployment carries less than was promised", remedy="is the load's own rate above the objective? then see the latencies",
            )  # fmt: skip
