"""verdict.json and what stands beside it in a bundle."""

from __future__ import annotations

import json
import platform
import shlex
import time
from pathlib import Path
from typing import Any

from pdgate import __version__
from pdgate.inventory.model import Deployment
from pdgate.plugin.run import Run
from pdgate.verdict import CheckResult, counts, overall, waiver_states

SCHEMA = 1


def verdict_document(run: Run, results: list[CheckResult], started: float, argv: list[str]) -> dict[str, Any]:
    """The whole verdict as plain data: run, deployment, every check."""
    return {
        "schema": SCHEMA,
        "run": {
            "started": _iso(started), "ended": _iso(time.time()), "phase": run.phase, "offline": run.offline,
            "command": shlex.join(["pytest", *argv]), "pdgate": __version__, "python": platform.python_version(),
        },
        "deployment": _deployment(run.deployment),
        "verdict": overall(results),
        "counts": counts(results),
        "hosts": {facts.host: _host(facts) for facts in run.facts.values()},
        "waivers": {
            "given": [waiver.model_dump(mode="json") for waiver in run.waivers], "without-effect": waiver_states(run.waivers, results),
        },
        # In one order, whichever worker was first.
        "checks": [result.model_dump(mode="json") for result in sorted(results, key=lambda result: (result.id, result.nodeid))],
    }  # fmt: skip


def _deployment(deployment: Deployment) -> dict[str, Any]:
    return {
        "name": deployment.name, "source": deployment.source,
        "engines": [{"name": e.name, "role": e.role, "connector": e.connector, "url": deployment.url_of(e)} for e in deployment.engines],
        "proxies": [{"name": proxy.name, "kind": proxy.kind, "url": deployment.url_of(proxy)} for proxy in deployment.proxies],
    }  # fmt: skip


def _host(facts: Any) -> dict[str, Any]:
    sections = {name: getattr(facts, name).unknown for name in type(facts).model_fields if hasattr(getattr(facts, name), "unknown")}
    return {
        "machine": facts.machine, "probe_s": facts.duration_s, "facts": f"facts/{facts.host}.json", "raw": f"raw/{facts.host}.probe.txt",
        "unknown": {name: reason for name, reason in sections.items() if reason},
    }  # fmt: skip


def _iso(epoch: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(epoch))


def write_verdict(bundle: Path, document: dict[str, Any]) -> None:
    (bundle / "verdict.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def point_latest(bundle: Path) -> None:
    """`latest` beside the bundle leads to it; a bundle elsewhere gets none."""
    latest = bundle.parent / "latest"
    if bundle.parent.name != "out" or (latest.exists() and not latest.is_symlink()):
        return
    fresh = bundle.parent / f".latest-{bundle.name}"
    fresh.symlink_to(bundle.name)
    fresh.replace(latest)
