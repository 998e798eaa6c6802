"""Who gets the next request: the scores of vllm-ascend's pull proxy.

Source: vllm-ascend `examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py`, `SharedProxyScheduler` (v0.22.1rc1 to main):
prefill by KV it holds for others, decode by bytes in flight, ties by command-line order, one count of requests in flight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass
class Instance:
    """One backend and its scores."""

    url: str
    ordinal: int
    active_tokens: float = 0.0
    active_kv_cache: float = 0.0
    tainted: bool = False
    in_flight: int = 0

    @property
    def priority(self) -> tuple[bool, float, int]:
        return self.tainted, self.active_tokens + 0.3 * self.active_kv_cache, self.ordinal


class Balancer:
    """Both pools. Instances are added and, once nothing is in flight on them, removed while requests run."""

    def __init__(self, prefillers: list[str], decoders: list[str]) -> None:
        self._ordinals = itertools.count()
        self.pools: dict[str, list[Instance]] = {"prefill": [], "decode": []}
        self.requests = 0
        for role, urls in (("prefill", prefillers), ("decode", decoders)):
            for url in urls:
                self.add(role, url)

    def add(self, role: str, url: str) -> bool:
        """False where it is there already."""
        known = next((instance for instance in self.pools[role] if instance.url == url), None)
        if known is not None:
            known.tainted = False
            return False
        self.pools[role].append(Instance(url, next(self._ordinals)))
        return True

    def remove(self, role: str, url: str) -> bool:
        """It gets no more requests, and goes once its last one has ended; False where it is not there."""
        known = next((instance for instance in self.pools[role] if instance.url == url), None)
        if known is None:
            return False
        known.tainted = True
        self._sweep()
        return True

    def pick(self, role: str) -> Instance:
        """The lowest score; raises LookupError without an instance."""
        usable = [instance for instance in self.pools[role] if not instance.tainted]
        if not usable:
            raise LookupError(f"No available {role} servers")
        chosen = min(usable, key=lambda instance: instance.priority)
        chosen.in_flight += 1
        return chosen

    def finish(self, instance: Instance) -> None:
        instance.in_flight -= 1
        self._sweep()

    def _sweep(self) -> None:
        for role, pool in self.pools.items():
            self.pools[role] = [instance for instance in pool if not (instance.tainted and instance.in_flight <= 0)]


def prefill_score(size: int) -> float:
    return size / 4 * 0.0345 + 120.0745
