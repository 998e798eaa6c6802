"""The Mooncake connectors of vllm-ascend, and vLLM's own.

Sources: vllm-project/vllm-ascend `vllm_ascend/distributed/kv_transfer/kv_p2p/{mooncake_connector,
mooncake_hybrid_connector,mooncake_layerwise_connector}.py` and `kv_transfer/utils/utils.py` (v0.11.0 … v0.23.0, main),
vllm-project/vllm `vllm/distributed/kv_transfer/kv_connector/v1/mooncake/` (00f4240e).
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pdgate.connectors.base import Connector, LogSignatures, Timer
from pdgate.inventory.model import Engine, PortSlot

V1_SOURCE = "vllm-ascend mooncake_connector.py"
HYBRID_SOURCE = "vllm-ascend mooncake_hybrid_connector.py"

# int(4.096 us * 2**HCCL_RDMA_TIMEOUT * HCCL_RDMA_RETRY_CNT // 1000 + 3000) with the defaults 20 and 7
TRANSFER_DEFAULT_S = 33.064


def _v1_offset(engine: Engine, slot: PortSlot, version: Version | None) -> int:
    if version is not None and version < Version("0.12"):  # v0.11: neither PP nor PCP in the formula
        return slot.dp_rank * engine.tp + slot.tp_rank
    base = slot.dp_rank * engine.tp * engine.pp * engine.pcp
    if version is not None and version < Version("0.19"):  # collides when both exceed 1, which these versions refuse
        return base + (slot.pp_rank + slot.pcp_rank) * engine.tp + slot.tp_rank
    return base + (slot.pp_rank * engine.pcp + slot.pcp_rank) * engine.tp + slot.tp_rank


def _hybrid_offset(engine: Engine, slot: PortSlot, version: Version | None) -> int:
    return slot.dp_rank * engine.tp * engine.pp + slot.pp_rank * engine.tp + slot.tp_rank


def _layerwise_offset(engine: Engine, slot: PortSlot, version: Version | None) -> int:
    return slot.dp_rank * engine.pcp * engine.tp + slot.pcp_rank * engine.tp + slot.tp_rank


ASCEND_SIGNATURES = LogSignatures(
    transfer_done=r"KV cache transfer for request (?P<id>\S+) took [\d.]+ ms",
    transfer_failed=r"Mooncake transfer failed for request(?:\. remote_request_id=| )(?P<id>[^\s,]+)",
    delayed_free=r"Delaying free of \d+ blocks for request (?P<id>\S+)",
    forced_free=r"Force freed (?:expired )?request: (?P<id>[^\s.]+)",
    bind_failed=r"Address already in use \(addr='tcp://[^']*'\)",
)

ASCEND_TRANSFER_TIMERS = (
    Timer("transfer", "ASCEND_TRANSFER_TIMEOUT", TRANSFER_DEFAULT_S, 0.001, "decode",
          "vllm-ascend kv_transfer/utils/utils.py get_transfer_timeout_value"),
    Timer("connect", "ASCEND_CONNECT_TIMEOUT", 10.0, 0.001, "decode", "Mooncake >= 0.3.8 ascend_direct_transport"),
)  # fmt: skip

MOONCAKE_V1 = Connector(
    name="MooncakeConnectorV1",
    package="vllm_ascend",
    binds=("prefill",),
    holder="worker",
    offset=_v1_offset,
    signatures=ASCEND_SIGNATURES,
    timers=(
        Timer("abort", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480, 1, "prefill", V1_SOURCE, SpecifierSet(">=0.18.0rc0")),
        Timer("abort", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", 480, 1, "prefill", V1_SOURCE, SpecifierSet(">=0.11.0rc0,<0.18")),
        *ASCEND_TRANSFER_TIMERS,
    ),
    reports_load_failures=SpecifierSet(">=0.20.2rc1"),
    known_issues={
        "wrong": "vllm-ascend#5660, #8427 (before 0.20.2rc1)",
        "hang": "docs/track-record.md (first contact with a dead side channel)",
    },
    sources=("ascend-pd-facts 0-3, 5", V1_SOURCE),
)

MOONCAKE_HYBRID = Connector(
    name="MooncakeHybridConnector",
    package="vllm_ascend",
    binds=("prefill",),
    holder="worker",
    offset=_hybrid_offset,
    signatures=ASCEND_SIGNATURES,
    timers=(
        Timer("abort", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480, 1, "prefill", HYBRID_SOURCE, SpecifierSet(">=0.22.1rc1")),
        Timer("abort", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", 480, 1, "prefill", HYBRID_SOURCE, SpecifierSet("<0.22.1rc1")),
        *ASCEND_TRANSFER_TIMERS,
    ),
    # A failed pull is logged and then marked received, in every version so far: vllm-ascend#17044.
    reports_load_failures=None,
    known_issues={"wrong": "vllm-ascend#17044", "hang": "docs/track-record.md (first contact with a dead side channel)"},
    sources=("ascend-pd-facts 0.1", HYBRID_SOURCE),
)

MOONCAKE_LAYERWISE = Connector(
    name="MooncakeLayerwiseConnector",
    package="vllm_ascend",
    kv_moves_by="push",
    binds=("decode",),
    holder="worker",
    offset=_layerwise_offset,
    signatures=LogSignatures(
        transfer_done=None,
        transfer_failed=r"(?:Mooncake transfer failed for send requests\. req_ids=|MooncakeLayerwiseConnector transfer fail\. req_id=)(?P<id>\S+)",
        delayed_free=None,
        forced_free=ASCEND_SIGNATURES.forced_free,
        bind_failed=ASCEND_SIGNATURES.bind_failed,
    ),
    timers=ASCEND_TRANSFER_TIMERS,
    sources=("ascend-pd-facts 1.2, 5.6", "vllm-ascend mooncake_layerwise_connector.py"),
)

UPSTREAM_MOONCAKE = Connector(
    name="MooncakeConnector",
    package="vllm",
    binds=("prefill",),
    holder="engine",
    offset=lambda engine, slot, version: 0,
    per_rank_ports="engine",
    port_variable="VLLM_MOONCAKE_BOOTSTRAP_PORT",
    binds_any_address=True,
    side_channel="http",
    kv_moves_by="push",  # mooncake_connector.py: P's sender calls batch_transfer_sync_write
    signatures=LogSignatures(
        transfer_done=None,
        transfer_failed=r"pulling kv_caches for \['(?P<id>[^']+)'.*\] failed",
        delayed_free=None,
        forced_free=r"Request (?P<id>\S+) timed out after [\d.]+ seconds without being sent",
        bind_failed=r"Address already in use",
    ),
    timers=(Timer("abort", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480, 1, "both", "vllm envs.py"),),
    reports_load_failures=SpecifierSet(">=0.12"),
    known_issues={"hang": "vllm#35943, #50719"},
    sources=("ascend-pd-facts 1.6, 5.8", "real-engines (a)"),
)
