"""The classes vLLM's connector factory is given; imported only where one of them is configured."""

from __future__ import annotations

from typing import Any

from ascend_on_cpu import install_stubs

install_stubs()

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_connector, mooncake_hybrid_connector  # noqa: E402


def _with_base_constructor(real: type, name: str) -> type:
    """vllm-ascend 0.23.0 does not call its base class's constructor; vLLM 0.32 needs what that sets."""

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        real.__init__(self, vllm_config, role, kv_cache_config)

    return type(name, (real,), {"__init__": __init__})


MooncakeConnectorV1 = _with_base_constructor(mooncake_connector.MooncakeConnector, "MooncakeConnectorV1")
MooncakeHybridConnector = _with_base_constructor(mooncake_hybrid_connector.MooncakeConnector, "MooncakeHybridConnector")
