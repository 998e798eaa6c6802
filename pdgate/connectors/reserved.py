"""Port ranges that Mooncake draws its own listeners from at random, by version and platform.

Sources: Mooncake `mooncake-transfer-engine/src/transport/ascend_transport/ascend_direct_transport` (v0.3.7, v0.3.9,
v0.3.11: `base_port_`, `kPortRange`, `FindAdxlListenPort`; bounds inclusive because of `% (max - min + 1)`),
`TransferMetadata` (P2PHANDSHAKE RPC port), vllm-ascend `docs/source/tutorials/features/
pd_disaggregation_mooncake_multi_node.md` (v0.23.0; states the 0.3.7 rule for every version), vllm-ascend#14263.
"""

from __future__ import annotations

from packaging.version import Version

from pdgate.connectors.base import PortRange

DEVICES = {"ascend-a2": 8, "ascend-a3": 16, "ascend-950": 16}
DEFAULT_BASE = 20000
RPC_FIRST, RPC_LAST = 15000, 17000


def transfer_engine_ranges(platform: str, mooncake: Version | None, environment: dict[str, str] | None = None) -> list[PortRange]:
    """Ranges a host with Mooncake draws from; an unknown version gets the widest (0.3.7) rule.

    `environment` is that of a running engine where known: it may move the ranges. A value that is no port number
    is ignored, as Mooncake does, with its default.
    """
    environment = environment or {}
    ranges = [_rpc_range(environment)]
    devices = DEVICES.get(platform)
    if devices is None:
        return ranges
    source = "Mooncake ascend_direct_transport"
    if mooncake is not None and mooncake < Version("0.3.7"):
        return ranges
    if mooncake is not None and mooncake >= Version("0.3.8"):
        base = _port(environment.get("ASCEND_BASE_PORT")) or DEFAULT_BASE
        what = f"ADXL listen ports ({devices} NPUs x 100 from {base}, Mooncake {mooncake})"
        return [*ranges, PortRange(base, base + devices * 100, what, source)]
    known = f"Mooncake {mooncake}" if mooncake else "Mooncake version unknown, so the widest rule"
    what = f"ADXL listen ports ({devices} NPUs x 1000 from {DEFAULT_BASE}, {known})"
    return [*ranges, PortRange(DEFAULT_BASE, DEFAULT_BASE + devices * 1000, what, source)]


def _rpc_range(environment: dict[str, str]) -> PortRange:
    first = _port(environment.get("MC_MIN_RPC_PORT") or environment.get("MC_MIN_PRC_PORT")) or RPC_FIRST
    last = _port(environment.get("MC_MAX_RPC_PORT") or environment.get("MC_MAX_PRC_PORT")) or RPC_LAST
    if first > last:
        first, last = RPC_FIRST, RPC_LAST
    return PortRange(first, last, "Transfer Engine RPC ports", "Mooncake transfer_metadata")


def _port(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and 0 < int(text) < 65536 else None
