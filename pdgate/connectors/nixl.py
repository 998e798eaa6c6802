"""vLLM's NixlConnector. Source: vllm-project/vllm `vllm/distributed/kv_transfer/kv_connector/v1/nixl*`; real-engines (b)."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from pdgate.connectors.base import Connector, LogSignatures, Timer

NIXL = Connector(
    name="NixlConnector",
    package="vllm",
    binds=("prefill", "decode"),
    holder="engine core",
    offset=lambda engine, slot, version: slot.dp_rank,
    per_rank_ports="dp",
    port_variable="VLLM_NIXL_SIDE_CHANNEL_PORT",
    uses_transfer_engine=False,
    signatures=LogSignatures(
        transfer_done=None,
        transfer_failed=r"NIXL transfer (?:setup )?failed(?: for request (?P<id>\S+))?",
        delayed_free=None,
        forced_free=r"Releasing expired KV blocks for request (?P<id>\S+)",
        bind_failed=r"Address already in use \(addr='tcp://[^']*'\)",
    ),
    timers=(
        Timer("abort", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", 480, 1, "prefill", "vllm envs.py", SpecifierSet("<0.20")),
        Timer("lease", "kv_lease_duration", 30, 1, "prefill", "vllm nixl connector (extra config)", SpecifierSet(">=0.20")),
    ),
    reports_load_failures=SpecifierSet(">=0.12"),
    sources=("real-engines (b)",),
)
