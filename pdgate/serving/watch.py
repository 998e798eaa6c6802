"""What everybody said of the deployment's health while tokens flowed or did not: /health, /metrics and the proxy, each second."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from pdgate.inventory.model import Deployment, Engine, Proxy
from pdgate.serving.client import Endpoint
from pdgate.serving.exchange import endpoint_of
from pdgate.serving.metrics import MetricsUnavailable, Sample, scrape
from pdgate.serving.record import now

ASK_S = 2.0
# Where each kind of proxy says how it is.
PROXY_HEALTH = {"vllm-ascend": "/healthcheck", "vllm-ascend-layerwise": "/healthcheck", "vllm-router": "/health", "other": "/health"}


@dataclass(frozen=True)
class Moment:
    """One look at one unit. `healthy` is what its health endpoint claimed; None where it has none or no address."""

    at: float
    unit: str
    healthy: bool | None
    said: str
    sample: Sample | None = None
    counters: dict[str, Any] = field(default_factory=dict)


class Watch:
    """Looks at every engine and proxy each `period_s`, from a thread, while used as a context manager."""

    def __init__(self, deployment: Deployment, period_s: float = 1.0) -> None:
        self.deployment, self.period_s = deployment, period_s
        self.moments: list[Moment] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdgate-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=self.period_s + 4 * ASK_S)

    def _run(self) -> None:
        units: list[Engine | Proxy] = [*self.deployment.engines, *self.deployment.proxies]
        with ThreadPoolExecutor(max(1, len(units))) as pool:
            while True:
                due = now() + self.period_s
                self.moments += pool.map(lambda unit: look(self.deployment, unit), units)
                if self._stop.wait(max(0.0, due - now())):
                    return

    def of(self, unit: str) -> list[Moment]:
        return [moment for moment in self.moments if moment.unit == unit]


def look(deployment: Deployment, unit: Engine | Proxy) -> Moment:
    """Ask one unit how it is; what it does not answer is said, not guessed."""
    endpoint = endpoint_of(deployment, unit)
    name = unit.name if isinstance(unit, Engine) else f"proxy {unit.name}"
    if endpoint is None:
        return Moment(now(), name, None, "the inventory gives no address")
    path = "/health" if isinstance(unit, Engine) else PROXY_HEALTH[unit.kind]
    at = now()
    healthy, said, counters = _ask(endpoint, path)
    sample = None
    if isinstance(unit, Engine):
        try:
            sample = scrape(endpoint, ASK_S)
        except MetricsUnavailable as error:
            said += f"; {error}"
    return Moment(at, name, healthy, said, sample, counters)


def _ask(endpoint: Endpoint, path: str) -> tuple[bool | None, str, dict[str, Any]]:
    try:
        answer = requests.get(endpoint.url + path, headers=endpoint.headers(), timeout=ASK_S)
    except requests.exceptions.RequestException as error:
        return False, f"GET {path}: {type(error).__name__}", {}
    try:
        document = answer.json()
    except ValueError:
        document = {}
    if answer.status_code == 404:
        return None, f"GET {path}: not served", {}
    return answer.status_code == 200, f"GET {path}: HTTP {answer.status_code}", document if isinstance(document, dict) else {}


def matrix(moments: list[Moment], tokens: list[float], failures: list[float], start: float) -> list[dict[str, object]]:
    """One row a second: what each unit claimed, how many tokens came, how many requests failed. For the bundle and the report."""
    rows: dict[int, dict[str, object]] = {}
    for moment in moments:
        row = rows.setdefault(math.floor(moment.at - start), {"second": math.floor(moment.at - start), "tokens": 0, "failed": 0})
        row[moment.unit] = "?" if moment.healthy is None else "ok" if moment.healthy else moment.said
    for key, times in (("tokens", tokens), ("failed", failures)):
        for at in times:
            if math.floor(at - start) in rows:
                rows[math.floor(at - start)][key] = int(str(rows[math.floor(at - start)][key])) + 1
    return [rows[second] for second in sorted(rows)]
