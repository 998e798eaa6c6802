"""Random, admissible schedules of faults from a seed, and the few events a failing one comes down to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdgate.connectors import connector_of
from pdgate.inventory.model import Deployment

HURT_S = (1.0, 4.0)


@dataclass(frozen=True)
class Event:
    """One fault: what, on which engine, for how long."""

    kind: str
    engine: str
    hurt_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.engine} for {self.hurt_s:g} s"


def admissible(deployment: Deployment) -> list[tuple[str, str]]:
    """Kinds and engines a campaign may draw: nothing that takes the last engine of a role, nothing that cannot work."""
    found = []
    for engine in deployment.engines:
        spare = sum(getattr(other, f"serves_{role}") for role in ("prefill", "decode") if getattr(engine, f"serves_{role}") for other in deployment.engines) > 1
        if spare and engine.restart:
            found += [(kind, engine.name) for kind in ("kill", "kill-worker", "kill-core", "kill-api")]
        if spare:
            found += [("stall", engine.name), ("no-descriptors", engine.name)]
        if connector_of(engine.connector).port_group(engine):
            found += [("side-channel-latency", engine.name), ("side-channel-reset_peer", engine.name)]
        if engine.serves_decode and engine.http_port is not None:
            found += [("http-latency", engine.name), ("http-slicer", engine.name)]
            found += [("http-reset_peer", engine.name)] if spare else []
    return found


def draw(deployment: Deployment, seed: int, count: int) -> list[Event]:
    """`count` events; the same seed and inventory give the same schedule. Empty where nothing is admissible."""
    rng = random.Random(seed)
    choices = admissible(deployment)
    return [Event(*rng.choice(choices), round(rng.uniform(*HURT_S), 1)) for _ in range(count)] if choices else []


def reduce(events: Sequence[Event], fails: Callable[[list[Event]], bool]) -> list[Event]:
    """A subsequence that still fails and of which no part does (delta debugging); `events` itself must fail."""
    kept, parts = list(events), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[start : start + size] for start in range(0, len(kept), size)]
        candidates = pieces + [[event for other in pieces if other is not piece for event in other] for piece in pieces]
        smaller = next((candidate for candidate in candidates if 0 < len(candidate) < len(kept) and fails(candidate)), None)
        if smaller is not None:
            kept, parts = smaller, 2
        elif parts >= len(kept):
            break
        else:
            parts = min(len(kept), parts * 2)
    return kept


def keep_schedule(folder: Path, name: str, seed: int, events: Sequence[Event]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"seed": seed, "events": [asdict(event) for event in events]}, indent=1) + "\n")
