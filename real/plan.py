"""Real vLLM on the lab's hosts: the same plan, with real command lines in the launch script.

Not covered: the ascend transport (HCCL, RDMA), NPU memory and hangs, graph mode, several machines, real performance. On one machine
a killed peer is noticed at once by TCP; a lost NPU host may be noticed far later.
"""

from __future__ import annotations

import os
from pathlib import Path

from lab.plan import PROXY_SCRIPT, EnginePlan, HostPlan, LabPlan, plan_lab, router_arguments
from pdgate.inventory.model import Deployment, Proxy

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache" / "real"
# PDGATE_REAL_MODEL=bigkv: 32 KiB of KV per token, so that a transfer lasts long enough to be cut. It is served under the same name.
SHAPE = os.environ.get("PDGATE_REAL_MODEL", "tiny")
MODEL = HOME / "models" / SHAPE
# One request at least must warm each engine up: a first forward on this CPU takes seconds.
UP_WITHIN_S = 240.0


class NotSetUp(RuntimeError):
    """The real engines are not installed; the message says how."""


def plan_real(deployment: Deployment) -> LabPlan:
    """Real engines for the deployment; raises NotSetUp."""
    if not (HOME / "venv" / ".pdgate-real").exists():
        raise NotSetUp("real engines are not set up here; run: make real-setup (about 7 GB, two to five minutes)")
    plan = plan_lab(deployment)
    plan.up_within_s = UP_WITHIN_S
    plan.warm_up = True
    for host in plan.hosts.values():
        host.path = [str(HOME / "venv" / "bin")]
        host.emulated = False
        host.packages = {}
        host.missing_tools = {"hccn_tool", "npu-smi"}
        for entry in host.engines:
            _real_engine(entry)
        for proxy in deployment.proxies_on(deployment.hosts[host.name].machine):
            host.proxy_command = _front(deployment, host, proxy)
    return plan


def _real_engine(entry: EnginePlan) -> None:
    engine = entry.engine
    address = str(engine.address)
    entry.model_path = str(MODEL)
    entry.nice = 5  # workers that poll would starve the one who judges them, on two cores
    entry.args = {
        "host": "0.0.0.0", "port": str(engine.http_port), "served-model-name": str(engine.model), "tensor-parallel-size": str(engine.tp),
        "enforce-eager": "", "block-size": "32", "num-gpu-blocks-override": "512", "max-model-len": "4096",
    }  # fmt: skip
    entry.env = {
        "VLLM_HOST_IP": address, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT / "real" / "stub"),
        "VLLM_PLUGINS": "ascend_on_cpu", "ASCEND_ON_CPU_FORK": "1",
    }  # fmt: skip
    config = {"kv_connector": engine.connector, "kv_role": entry.kv_config["kv_role"], "kv_load_failure_policy": "fail"}
    if engine.connector in ("MooncakeConnectorV1", "MooncakeHybridConnector"):
        sizes = {"dp_size": 1, "tp_size": engine.tp}
        config |= {"kv_port": str(engine.kv_port), "kv_connector_extra_config": {"prefill": sizes, "decode": sizes}}
    elif engine.connector == "NixlConnector":
        config |= {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"]}}
        entry.env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.kv_port), "UCX_TLS": "tcp,self", "NIXL_ON_CPU_DELAY_US": "2000"}
    else:
        config |= {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
        entry.env |= {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(engine.kv_port)}
    entry.kv_config = config


def _front(deployment: Deployment, host: HostPlan, proxy: Proxy) -> str:
    """vllm-router, or the upstream pull proxy of a user who has it."""
    if proxy.kind != "vllm-ascend":
        return f"vllm-router {router_arguments(deployment, host.address, proxy.port)}"
    if proxy.path is None or not Path(proxy.path).is_file():
        raise NotSetUp(
            f"host '{proxy.host}': pd_proxy_kind vllm-ascend needs pd_proxy_path, the path of load_balance_proxy_server_example.py on this "
            f"machine (have: {proxy.path}); without it use pd_proxy_kind: vllm-router"
        )
    # Beside our own files, so that it is there also where its folder is not visible on the lab's hosts.
    copy = "/opt/pd/upstream_proxy.py"
    host.files[copy] = Path(proxy.path).read_text()
    emulated = f"python3 {PROXY_SCRIPT}"
    return str(host.proxy_command).replace(emulated, f"{HOME}/venv/bin/python {copy}")
