"""What a fault must not do: take the last healthy P or D, touch a host that did not consent, meet other people's traffic."""

from __future__ import annotations

from collections.abc import Collection

from pdgate.inventory.model import Deployment
from pdgate.serving.metrics import Sample


def refusal(deployment: Deployment, host: str, engines: Collection[str], serving: set[str], allow_last: bool) -> str | None:
    """Why the fault is refused, or None. `engines`: those that stop serving; `serving`: those that answer right now."""
    if host not in deployment.hosts:
        return f"host '{host}' is not in {deployment.source}"
    if not deployment.hosts[host].chaos:
        return f"host '{host}' has no pd_chaos: true"
    for role in ("prefill", "decode"):
        able = {engine.name for engine in deployment.engines if getattr(engine, f"serves_{role}")} & serving
        hurt = able & set(engines)
        if hurt and hurt == able and not allow_last:
            return f"{', '.join(sorted(hurt))} is the last healthy {role} engine: the deployment would serve nobody (--allow-outage agrees to that)"
    return None


def foreign_traffic(before: dict[str, Sample], after: dict[str, Sample]) -> str | None:
    """What moved between two looks in which we sent nothing, or None."""
    for name in before.keys() & after.keys():
        if after[name].in_hand:
            return f"{name} serves {after[name].running or 0:g} requests and {after[name].waiting or 0:g} wait, none of them ours"
        if (after[name].generated_tokens or 0) > (before[name].generated_tokens or 0):
            return f"{name} generated tokens while we sent nothing"
    return None
