"""vLLM's /metrics, by name across versions. Sources: vllm `vllm/v1/metrics/loggers.py`; real-engines."""

from __future__ import annotations

import time
from dataclasses import dataclass

import requests
from prometheus_client.parser import text_string_to_metric_families

from pdgate.serving.client import Endpoint


class MetricsUnavailable(Exception):
    """/metrics gave nothing usable; the message says what it answered."""


@dataclass(frozen=True)
class Sample:
    """One scrape. Values are summed over label sets (models, DP engines of one server)."""

    at: float
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples of `name` that bear these labels; None where the server has no such metric."""
        wanted = set(labels.items())
        found = [value for (key, have), value in self.values.items() if key == name and wanted <= have]
        return sum(found) if found else None

    @property
    def running(self) -> float | None:
        return self.total("vllm:num_requests_running")

    @property
    def waiting(self) -> float | None:
        """Waiting and deferred: a request stuck on remote KV counts as either, by version."""
        return self.total("vllm:num_requests_waiting")

    @property
    def in_hand(self) -> float:
        """Running and waiting together, as far as the server counts them."""
        return (self.running or 0) + (self.waiting or 0)

    @property
    def kv_usage(self) -> float | None:
        usage = self.total("vllm:kv_cache_usage_perc")
        return usage if usage is not None else self.total("vllm:gpu_cache_usage_perc")

    @property
    def external_tokens(self) -> float | None:
        """Prompt tokens whose KV came from another engine: the best proof that a transfer happened."""
        tokens = self.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        return tokens if tokens is not None else self.total("vllm:external_prefix_cache_hits_total")

    @property
    def generated_tokens(self) -> float | None:
        return self.total("vllm:generation_tokens_total")


def scrape(endpoint: Endpoint, timeout_s: float = 5.0) -> Sample:
    """Read /metrics once; raises MetricsUnavailable."""
    url = f"{endpoint.url}/metrics"
    try:
        answer = requests.get(url, headers=endpoint.headers(), timeout=timeout_s)
    except requests.exceptions.RequestException as error:
        raise MetricsUnavailable(f"{url}: {error}") from None
    if answer.status_code != 200:
        raise MetricsUnavailable(f"{url}: HTTP {answer.status_code}")
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    try:
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                values[key] = values.get(key, 0.0) + sample.value
    except ValueError as error:
        raise MetricsUnavailable(f"{url}: not Prometheus text: {error}") from None
    return Sample(time.time(), values)
