"""The few requests an acceptance run makes, each with what the engines' metrics and logs said before and after."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import requests

from pdgate.facts.shell import Shells
from pdgate.inventory.model import Deployment, Engine, Proxy
from pdgate.serving.client import Endpoint, Prompt, complete
from pdgate.serving.logs import LogMark, LogUnavailable, mark, since
from pdgate.serving.metrics import MetricsUnavailable, Sample, scrape
from pdgate.serving.record import Record

# About 300 tokens: more than a block of any platform seen (128), so that whole blocks must move.
SENTENCE = "The harbour light turned slowly over the water while the last ferry of the evening came in from the north. "
SENTENCES = 16
POLL_S = 0.25


@dataclass
class Exchange:
    """A request through the proxy and everything seen around it."""

    record: Record
    golden: Record | None = None
    before: dict[str, Sample] = field(default_factory=dict)
    after: dict[str, Sample] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict, repr=False)  # "metrics p0/dp0" or "log p0/dp0" -> why


@dataclass(frozen=True)
class Settling:
    """How the engines came back after a request: the last sample of each, and how long it took (None: not at all)."""

    baseline: dict[str, Sample]
    last: dict[str, Sample]
    seconds: float | None
    bound_s: float


def endpoint_of(deployment: Deployment, unit: Engine | Proxy) -> Endpoint | None:
    url = deployment.url_of(unit)
    return Endpoint(url, unit.api_key_env) if url else None


def front_of(deployment: Deployment, proxy: Proxy) -> Endpoint:
    """The proxy's endpoint; raises ValueError where the inventory gives it no address."""
    endpoint = endpoint_of(deployment, proxy)
    if endpoint is None:
        raise ValueError(f"proxy {proxy.name}: the inventory gives no address (pd_address or an IP in ansible_host)")
    return endpoint


def decoder_alone(deployment: Deployment) -> Endpoint | None:
    """The first decode engine, to be asked by itself."""
    return next((endpoint for engine in deployment.engines if engine.serves_decode and (endpoint := endpoint_of(deployment, engine))), None)


def served_models(endpoint: Endpoint, timeout_s: float = 5.0) -> dict[str, int | None]:
    """Model name to max_model_len from /v1/models; raises ValueError worded for the operator."""
    url = f"{endpoint.url}/v1/models"
    try:
        answer = requests.get(url, headers=endpoint.headers(), timeout=timeout_s)
        answer.raise_for_status()
        return {model["id"]: model.get("max_model_len") for model in answer.json()["data"]}
    except (requests.exceptions.RequestException, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{url}: {error}") from None


def fresh_prompt(name: str, model: str, max_tokens: int = 16) -> Prompt:
    """A prompt nobody has cached: unique text, and a salt that keeps prefix caches from short-cutting the transfer."""
    nonce = uuid.uuid4().hex
    return Prompt(
        id=f"{name}-{nonce[:8]}", text=f"Log entry {nonce}. " + SENTENCE * SENTENCES + "What happened next?", model=model,
        max_tokens=max_tokens, extra={"cache_salt": nonce},
    )  # fmt: skip


def observe(deployment: Deployment) -> tuple[dict[str, Sample], dict[str, str]]:
    """One scrape of every engine: (samples by engine, reasons for those without)."""
    samples: dict[str, Sample] = {}
    unknown: dict[str, str] = {}
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        if endpoint is None:
            unknown[engine.name] = f"{engine.name}: the inventory gives no address for its HTTP"
            continue
        try:
            samples[engine.name] = scrape(endpoint)
        except MetricsUnavailable as error:
            unknown[engine.name] = str(error)
    return samples, unknown


def first_request(deployment: Deployment, proxy: Proxy, model: str, deadline_s: float, shells: Shells) -> Exchange:
    """One short request through the proxy; its golden answer is D's own, without remote prefill."""
    endpoint = front_of(deployment, proxy)
    prompt = fresh_prompt("first", model)
    golden = golden_answer(deployment, prompt, deadline_s)
    before, unknown_before = observe(deployment)
    marks, unknown_logs = _mark_logs(deployment, shells)
    record = complete(endpoint, prompt, deadline_s)
    time.sleep(POLL_S)  # counters follow the answer by a step
    after, unknown_after = observe(deployment)
    exchange = Exchange(record, golden, before, after)
    exchange.unknown = {f"metrics {name}": why for name, why in {**unknown_before, **unknown_after}.items()}
    exchange.unknown |= {f"log {name}": why for name, why in unknown_logs.items()}
    for host, places in marks.items():
        lines = since(shells, deployment.hosts[host].connection, list(places.values()))
        for name, place in places.items():
            read = lines.get(place.path, LogUnavailable(f"{host}: {place.path} was not read"))
            if isinstance(read, LogUnavailable) or read.gap:
                exchange.unknown[f"log {name}"] = str(read) if isinstance(read, LogUnavailable) else read.gap
            else:
                exchange.logs[name] = read.lines
    return exchange


def golden_answer(deployment: Deployment, prompt: Prompt, deadline_s: float) -> Record | None:
    """The first good answer a decode engine gives by itself to the same prompt under another cache salt."""
    alone = Prompt(f"{prompt.id}-golden", prompt.text, prompt.model, prompt.max_tokens, extra={"cache_salt": uuid.uuid4().hex})
    record = None
    for engine in (engine for engine in deployment.engines if engine.serves_decode):
        endpoint = endpoint_of(deployment, engine)
        if endpoint is None:
            continue
        record = complete(endpoint, alone, deadline_s)
        if record.outcome == "ok":
            return record
    return record


def _mark_logs(deployment: Deployment, shells: Shells) -> tuple[dict[str, dict[str, LogMark]], dict[str, str]]:
    """Marks by host and engine, one remote call a host, and why an engine has none."""
    marks: dict[str, dict[str, LogMark]] = {}
    unknown: dict[str, str] = {}
    for name, host in deployment.hosts.items():
        logs = {engine.name: engine.log for engine in deployment.engines if engine.host == name}
        unknown |= {engine: f"{engine}: no pd_log in the inventory" for engine, log in logs.items() if log is None}
        wanted = {engine: log for engine, log in logs.items() if log is not None}
        if not wanted:
            continue
        found = mark(shells, host.connection, list(wanted.values()))
        for engine, log in wanted.items():
            place = found[log]
            if isinstance(place, LogUnavailable):
                unknown[engine] = str(place)
            else:
                marks.setdefault(name, {})[engine] = place
    return marks, unknown


def wait_for_baseline(deployment: Deployment, model: str, baseline: dict[str, Sample], bound_s: float) -> Settling:
    """Poll until nothing runs, nothing waits and KV usage is where it was, at most `bound_s`.

    After two seconds a trickle of one-token requests keeps P stepping: an idle engine of an older vLLM notices
    neither an acknowledgement nor an expiry (vllm#43433).
    """
    start = time.monotonic()
    while True:
        last, _ = observe(deployment)
        took = time.monotonic() - start
        if baseline.keys() <= last.keys() and not unsettled(baseline, last):
            return Settling(baseline, last, took, bound_s)
        if took > bound_s:
            return Settling(baseline, last, None, bound_s)
        if took > 2:
            _trickle(deployment, model)
        time.sleep(POLL_S)


def unsettled(baseline: dict[str, Sample], last: dict[str, Sample]) -> dict[str, str]:
    """Engines that have not come back, each with what is still held."""
    held = {}
    for name, before in baseline.items():
        now = last.get(name)
        if now is None:
            held[name] = "its /metrics answers no more"
            continue
        parts = []
        for what, was, is_now in (
            ("running", before.running, now.running), ("waiting", before.waiting, now.waiting),
        ):  # fmt: skip
            if is_now is not None and is_now > (was or 0):
                parts.append(f"{what} {is_now:g}")
        if now.kv_usage is not None and now.kv_usage > (before.kv_usage or 0) + 1e-6:
            parts.append(f"KV usage {now.kv_usage:.2%} (was {before.kv_usage or 0:.2%})")
        if parts:
            held[name] = ", ".join(parts)
    return held


def _trickle(deployment: Deployment, model: str) -> None:
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        if engine.serves_prefill and endpoint is not None:
            complete(endpoint, Prompt("trickle", "tick", model, max_tokens=1), 5)
