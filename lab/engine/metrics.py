"""/metrics of a lab engine, with vLLM's names and labels (vllm `vllm/v1/metrics/loggers.py`, real-engines)."""

from __future__ import annotations

from typing import Any

SLEEP = ("awake", "weights_offloaded", "discard_all")
REASONS = ("stop", "length", "abort", "error", "repetition")


def metrics_text(model: str, engine: str, stats: dict[str, Any], prompt_tokens: int) -> str:
    labels = f'engine="{engine}",model_name="{model}"'
    counters = stats["counters"]
    external, local = counters.get("external_tokens", 0), counters.get("local_tokens", 0)
    waiting, deferred = stats["waiting"], stats["deferred"]
    families: list[tuple[str, str, list[tuple[str, float]]]] = [
        ("vllm:num_requests_running", "gauge", [("", stats["running"])]),
        ("vllm:num_requests_waiting", "gauge", [("", waiting)]),
        ("vllm:num_requests_waiting_by_reason", "gauge", [
            (',reason="capacity"', waiting - deferred), (',reason="deferred"', deferred)]),
        ("vllm:kv_cache_usage_perc", "gauge", [("", stats["usage"])]),
        ("vllm:num_preemptions_total", "counter", [("", 0)]),
        ("vllm:prompt_tokens_total", "counter", [("", prompt_tokens)]),
        ("vllm:generation_tokens_total", "counter", [("", counters.get("generation_tokens", 0))]),
        ("vllm:prompt_tokens_by_source_total", "counter", [
            (',source="local_compute"', local), (',source="local_cache_hit"', 0), (',source="external_kv_transfer"', external)]),
        ("vllm:external_prefix_cache_queries_total", "counter", [("", counters.get("external_queries", 0))]),
        ("vllm:external_prefix_cache_hits_total", "counter", [("", external)]),
        ("vllm:prefix_cache_queries_total", "counter", [("", prompt_tokens)]),
        ("vllm:prefix_cache_hits_total", "counter", [("", 0)]),
        ("vllm:prompt_tokens_cached_total", "counter", [("", external)]),
        ("vllm:engine_sleep_state", "gauge", [(f',sleep_state="{state}"', float(state == "awake")) for state in SLEEP]),
        ("vllm:request_success_total", "counter", [
            (f',finished_reason="{reason}"', counters.get(f"success:{reason}", 0)) for reason in REASONS]),
    ]  # fmt: skip
    lines = []
    for name, kind, samples in families:
        base = name.removesuffix("_total") if kind == "counter" else name
        lines += [f"# HELP {base} {base.removeprefix('vllm:').replace('_', ' ')}.", f"# TYPE {base} {kind}"]
        lines += [f"{name}{{{labels}{extra}}} {float(value)}" for extra, value in samples]
    return "\n".join(lines) + "\n"
