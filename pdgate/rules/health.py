"""Who said what, each second: health endpoints against tokens, and what the proxy counts against what is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Deployment, Proxy
from pdgate.rules.finding import Finding, NotRun
from pdgate.serving.watch import Moment

LEAST_S = 2.0


def silence_allowed(slowest_golden_s: float) -> float:
    """Seconds an engine with work may bring no token: twice the slowest healthy answer, and two seconds."""
    return 2 * slowest_golden_s + LEAST_S


def health_is_honest(deployment: Deployment, moments: dict[str, list[Moment]], allowed_s: float) -> Iterator[Finding]:
    """An engine that says it is healthy brings tokens while it has work; one that says it is not brings none."""
    looked = 0
    for engine in deployment.engines:
        seen = [moment for moment in moments.get(engine.name, []) if moment.sample is not None and moment.healthy is not None]
        looked += len(seen) >= 2
        if engine.serves_decode:
            yield from _green_but_silent(engine.name, seen, allowed_s)
        yield from _red_but_working(engine.name, seen)
    if looked < len(deployment.engines):
        raise UnknownFact(f"{len(deployment.engines) - looked} engines told neither health nor metrics twice during the load")


def _green_but_silent(name: str, seen: list[Moment], allowed_s: float) -> Iterator[Finding]:
    start: Moment | None = None
    longest: tuple[float, Moment, Moment] | None = None
    for before, after in itertools.pairwise(seen):
        assert before.sample and after.sample
        idle = not (before.sample.running or before.sample.waiting) or not (after.sample.running or after.sample.waiting)
        moved = after.sample.generated_tokens != before.sample.generated_tokens
        if idle or moved or not (before.healthy and after.healthy):
            start = None
            continue
        start = start or before
        length = after.at - start.at
        if length > allowed_s and (longest is None or length > longest[0]):
            longest = (length, start, after)
    if longest is not None:
        length, _, last = longest
        assert last.sample
        yield Finding(
            target=name, expected=f"no healthy engine with work and without a token for more than {allowed_s:.1f} s",
            seen=f"for {length:.1f} s /health said OK, {last.sample.running or 0:g} running and {last.sample.waiting or 0:g} waiting, and no token came",
            why="routers and probes keep sending requests to an engine that answers none", remedy="do not rely on /health: probe with a token (vllm#45526); "
            "the records of that window are in requests.jsonl",
        )  # fmt: skip


def _red_but_working(name: str, seen: list[Moment]) -> Iterator[Finding]:
    lies = 0
    for before, after in itertools.pairwise(seen):
        assert before.sample and after.sample
        generated = (after.sample.generated_tokens or 0) > (before.sample.generated_tokens or 0)
        lies += bool(generated and not after.healthy and not before.healthy)
    if lies:
        yield Finding(
            target=name, expected="an engine that generates says it is healthy", seen=f"in {lies} looks in a row it was not healthy while its tokens flowed: {seen[-1].said}",
            why="routers take a working engine out, and the others carry its load", remedy="check what its /health waits for; probes with a short timeout",
        )  # fmt: skip


def proxy_counters_are_sane(proxy: Proxy, during: list[Moment], after: Moment) -> Iterator[Finding]:
    """The proxy's count of requests in flight is never negative and zero once all have ended."""
    counted = [moment.counters["request_num"] for moment in [*during, after] if isinstance(moment.counters.get("request_num"), int | float)]
    if not counted:
        raise NotRun(f"proxy {proxy.name} ({proxy.kind}) tells no count of requests in flight")
    if min(counted) < 0:
        yield _counter(proxy, f"request_num was {min(counted):g}", "never below zero")
    last = after.counters.get("request_num")
    if not isinstance(last, int | float):
        raise UnknownFact(f"proxy {proxy.name} told no request_num after the load: {after.said}")
    if last > 0:
        yield _counter(proxy, f"request_num is {last:g} with no request in flight", "zero once every request has ended")


def _counter(proxy: Proxy, seen: str, expected: str) -> Finding:
    return Finding(
        target=f"proxy {proxy.name}", expected=f"requests in flight {expected}", seen=seen,
        why="a request that is never released keeps its engine's score: load goes elsewhere for ever, and an instance to be removed never drains",
        remedy="clients that leave during prefill are not released in vllm-ascend's pull proxy (all versions seen): restart it, or use one that handles it",
        reference="vllm-ascend#13214, #16517",
    )  # fmt: skip
