"""What each connector and version does. One declaration per connector; nothing else in pdgate knows their formulas."""

import difflib

from pdgate.connectors.base import Connector, LogSignatures, PortClaim, PortRange, Timer, parse_version
from pdgate.connectors.mooncake import MOONCAKE_HYBRID, MOONCAKE_LAYERWISE, MOONCAKE_V1, UPSTREAM_MOONCAKE
from pdgate.connectors.nixl import NIXL
from pdgate.connectors.reserved import transfer_engine_ranges

CONNECTORS: dict[str, Connector] = {
    connector.name: connector for connector in (MOONCAKE_V1, MOONCAKE_HYBRID, MOONCAKE_LAYERWISE, UPSTREAM_MOONCAKE, NIXL)
}


def connector_of(name: str) -> Connector:
    """The declaration of `kv_connector` name; raises KeyError with the near miss named."""
    if name not in CONNECTORS:
        near = difflib.get_close_matches(name, CONNECTORS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(CONNECTORS)}"
        raise KeyError(f"connector '{name}' is unknown; {hint}")
    return CONNECTORS[name]


__all__ = [
    "CONNECTORS", "Connector", "LogSignatures", "PortClaim", "PortRange", "Timer", "connector_of", "parse_version",
    "transfer_engine_ranges",
]  # fmt: skip
