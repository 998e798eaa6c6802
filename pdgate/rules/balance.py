"""Each engine's share of the work, from the deltas of its own counters; in how many windows it worked is told beside it, never instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Deployment
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.load import Samples

FACTOR = 2.0  # an engine with less than half or more than twice its fair share
SIGMAS = 3.0
COUNTED = 0.75  # of the burst: refused requests leave the rest to judge by


def shares_are_fair(deployment: Deployment, role: str, before: Samples, after: Samples, timeline: dict[str, list[float]], burst: int) -> Iterator[Finding]:
    """After a burst of equal requests no engine of a role has less than half or more than twice its share.

    `timeline` holds each engine's request counter once a second during the load: from it comes the coverage.
    """
    engines = [engine.name for engine in deployment.engines if engine.role == role]
    if len(engines) < 2:
        raise NotRun(f"one {role} engine only: nothing to share")
    missing = [name for name in engines if name not in before or name not in after]
    if missing:
        raise UnknownFact(f"{missing[0]}: /metrics was not readable before and after the burst")
    counts: dict[str, float] = {}
    for name in engines:
        now, was = (sample.total("vllm:request_success_total") for sample in (after[name], before[name]))
        if now is None:
            raise UnknownFact(f"{name}: no vllm:request_success_total in /metrics")
        counts[name] = now - (was or 0)
    total = sum(counts.values())
    if total < burst * COUNTED:
        raise UnknownFact(f"the burst sent {burst} requests, {role} engines counted {total:.0f}: their shares cannot be told")
    fair = total / len(engines)
    if fair < 4:
        raise UnknownFact(f"{total:.0f} requests on {len(engines)} engines are too few to tell a share (pd_load.max_concurrency)")
    doubt = SIGMAS * math.sqrt(fair * (1 - 1 / len(engines)))
    words = ", ".join(f"{name} {count:.0f}" for name, count in counts.items())
    for name, count in counts.items():
        if (count * FACTOR < fair or count > fair * FACTOR) and abs(count - fair) > doubt / 2:
            yield Finding(
                target=name, expected=f"about {fair:.1f} of {total:.0f} requests of a burst (half to twice of it)", seen=f"{count:.0f}; all: {words}; {_coverage(timeline, engines)}",
                why="one engine is worn out while others idle; a proxy whose counter went negative prefers one engine for ever (vllm-ascend#13214)",
                remedy="restart the proxy and compare: if the skew is gone, its counters are the cause; else compare the engines' speed",
            )  # fmt: skip


def _coverage(timeline: dict[str, list[float]], engines: list[str]) -> str:
    """Share of one-second windows of the load in which each engine finished something: presence, not load."""
    words = []
    for name in engines:
        steps = [b > a for a, b in itertools.pairwise(timeline.get(name, []))]
        if steps:
            words.append(f"{name} {sum(steps)}/{len(steps)}")
    return f"coverage (seconds of the load with a finished request, not a share): {', '.join(words) or 'unknown'}"
