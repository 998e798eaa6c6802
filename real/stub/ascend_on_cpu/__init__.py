"""The one place that exists only to let an NPU connector run on a CPU.

How it gets in: this folder's parent is on PYTHONPATH, the dist-info beside it declares a vLLM general plugin, and
VLLM_PLUGINS=ascend_on_cpu loads it in every vLLM process (and keeps vllm-ascend's own NPU platform plugin out). The
kv-transfer-config then is word for word that of an Ascend deployment.

Real:     vllm_ascend.distributed.kv_transfer (the connectors, their schedulers, threads, timers, retries and log text), Mooncake,
          its ZMQ side channel, vLLM.
Stubbed:  torch_npu and torch.npu (there are no kernels here), and the vllm_ascend modules in STUBS, which would pull in NPU
          operators; of each only the names the connectors import.
Replaced: Mooncake's protocol name "ascend" (HCCL over RDMA) by "tcp"; waiting in a loop (vLLM's queues, its shared memory between TP ranks, NIXL's
          progress thread) by waiting on sockets, or with a pause.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any


class _AscendConfig:
    """What the connectors read from additional_config."""

    enable_kv_nz = False
    enable_transpose_kv_cache_by_block = False


def _dcp_group() -> Any:
    from vllm.distributed import get_dcp_group

    return get_dcp_group()


STUBS: dict[str, dict[str, Any]] = {
    "vllm_ascend.ascend_config": {"init_ascend_config": lambda config: _AscendConfig, "get_ascend_config": lambda: _AscendConfig},
    "vllm_ascend.utils": {
        "enable_custom_op": lambda: False,
        "enable_sfa_dcp_replicated_indexer": lambda config: False,
        "is_vl_model": lambda config=None: False,
    },
    "vllm_ascend.distributed.utils": {
        "get_decode_context_model_parallel_world_size": lambda: _dcp_group().world_size,
        "get_decode_context_model_parallel_rank": lambda: _dcp_group().rank_in_group,
    },
    "vllm_ascend.distributed.parallel_state": {"get_p_tp_group": None},
}


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    # With a spec, so that importlib.util.find_spec() (transformers and vLLM ask) is content.
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.__dict__.update(names)
    sys.modules[name] = module


def install_stubs() -> None:
    """Make vllm_ascend's connectors importable; called when one of them is configured."""
    import torch

    npu = {"set_device": lambda device: None, "current_device": lambda: 0, "synchronize": lambda *args: None}
    _module("torch_npu", npu=types.SimpleNamespace(**npu), atb=types.SimpleNamespace())
    torch.npu = types.SimpleNamespace(**npu)
    for name, names in STUBS.items():
        _module(name, **names)
    _tcp_instead_of_ascend()


def _tcp_instead_of_ascend() -> None:
    import mooncake.engine

    real = mooncake.engine.TransferEngine
    if getattr(real, "on_cpu", False):
        return

    class TransferEngine(real):
        on_cpu = True

        def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
            return super().initialize(hostname, metadata, "tcp" if protocol == "ascend" else protocol, device)

    mooncake.engine.TransferEngine = TransferEngine


def _fork_instead_of_spawn() -> None:
    """vLLM's CPU platform insists on spawn, and each process imports torch and vLLM again: ten seconds of CPU each.

    With one OpenMP thread and no thread binding fork is safe; it is vLLM's default on other platforms.
    """
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        real(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _workers_sleep_while_they_wait() -> None:
    """Readers of vLLM's message queue spin for a second after each message, and ranks of one TP group spin in shared memory: with
    more workers than cores they take from each other what they wait for. They wait on sockets instead, as vLLM does when it has to,
    and look every 20 ms: a notice may be lost, which the spinning hides."""
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    condition = shm_broadcast.SpinCondition
    condition.__init__.__defaults__ = (0,)
    wait = condition.wait
    condition.wait = lambda self, timeout_ms=None: wait(self, 20 if timeout_ms is None else min(timeout_ms, 20))
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _nixl_sleeps_between_polls(delay_us: int) -> None:
    """NIXL's progress thread polls without a pause (nixl _api.py sets pthrDelay to 0): two engines would leave two cores to nobody else."""
    from nixl import _api

    real = _api.nixlBind.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return real(name, config)

    _api.nixlBind.nixlAgent = agent


def register() -> None:
    """vLLM's plugin hook: runs in every vLLM process before an engine is built."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # An engine whose very first forward is one token (a D that pulled its whole prompt) dies with SIGILL on AMX machines
    # unless AMX was asked for in the process; elsewhere this returns False.
    torch.cpu._init_amx()
    # Raises where there is no accelerator, and upstream's MooncakeConnector asks for it.
    torch.accelerator.current_device_index = lambda: 0
    if os.environ.get("ASCEND_ON_CPU_FORK") == "1":
        _fork_instead_of_spawn()
    _workers_sleep_while_they_wait()
    if delay := os.environ.get("NIXL_ON_CPU_DELAY_US"):
        _nixl_sleeps_between_polls(int(delay))
    for name in ("MooncakeConnectorV1", "MooncakeHybridConnector"):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "ascend_on_cpu.connectors", name)
