"""What the lab is to be: one plan made from an inventory, which defects change before anything is started."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.tools import DeviceState
from pdgate.inventory.model import Deployment, Engine

HEALTHY_ZONE = "Asia/Shanghai"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
MODELS = "/models"
PROXY_SCRIPT = "/opt/pd/load_balance_proxy_server_example.py"
LOGS = "/var/log/pd"
OWN_VLLM = "/usr/local/python3.11/bin"


@dataclass
class EnginePlan:
    """One `vllm serve` of the launch script."""

    engine: Engine
    args: dict[str, str]
    kv_config: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    started: bool = True
    in_container: bool = True
    model_path: str | None = None
    nice: int = 0
    after: list[str] = field(default_factory=list)  # lines of the script behind its command

    def command(self) -> str:
        env = "".join(f"{key}={value} " for key, value in self.env.items())
        flags = " ".join(f"--{key} {value}" for key, value in self.args.items())
        config = json.dumps(self.kv_config)
        nice = f"nice -n {self.nice} " if self.nice else ""
        return f"{env}{nice}vllm serve {self.model_path or f'{MODELS}/{self.engine.model}'} {flags} --kv-transfer-config '{config}' >> {self.engine.log} 2>&1 &"


@dataclass
class ContainerPlan:
    """A container docker tells about; only the engines' own has processes."""

    name: str
    image: str
    network: str = "host"
    published: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)


@dataclass
class ListenerPlan:
    """A program that holds a port: Grafana, in report R1."""

    name: str
    address: str
    port: int
    after_engines: bool = False


@dataclass
class HostPlan:
    """One machine of the lab."""

    name: str
    address: str
    zone: str = HEALTHY_ZONE
    container_zone: str = HEALTHY_ZONE
    timezone_directory: bool = False
    clock_offset_s: float = 0.0
    login_user: str = "root"
    container: ContainerPlan = field(default_factory=lambda: ContainerPlan("vllm", "quay.io/ascend/vllm-ascend:v0.23.0"))
    other_containers: list[ContainerPlan] = field(default_factory=list)
    engines: list[EnginePlan] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    script_head: list[str] = field(default_factory=list)
    script_tail: list[str] = field(default_factory=list)
    listeners: list[ListenerPlan] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    devices: dict[int, DeviceState] = field(default_factory=dict)
    missing_tools: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    launch: str = "/opt/pd/start.sh"
    files: dict[str, str] = field(default_factory=dict)
    emulated: bool = True
    path: list[str] = field(default_factory=list)  # where its programs are; default: the lab's own vllm
    proxy_command: str | None = None
    proxy_log: str | None = None
    proxy_port: int | None = None

    def misbehave(self, unit: str, name: str, value: Any = True) -> None:
        """Switch a misbehaviour of one unit (`engine:7000`, `proxy`) on."""
        self.settings.setdefault(unit, {}).setdefault("misbehave", {})[name] = value

    def script(self) -> str:
        lines = ["#!/bin/bash", f"# Starts the engines of {self.name}, one per DP rank.", "mkdir -p /var/log/pd", *self.script_head]
        lines.append(f"export PATH={':'.join(self.path or [OWN_VLLM])}:$PATH")
        lines += [f"export {key}={value}" for key, value in self.env.items()]
        for entry in self.engines:
            if entry.started and entry.in_container:
                lines += [entry.command(), *entry.after]
        return "\n".join([*lines, *self.script_tail, "wait", ""])

    def restart_script(self) -> str:
        """Starts one engine again, named by its first DP rank."""
        lines = ["#!/bin/bash", "# Starts one engine: restart.sh RANK", f"export PATH={':'.join(self.path or [OWN_VLLM])}:$PATH"]
        lines += [f"export {key}={value}" for key, value in self.env.items()]
        cases = [f"  {entry.engine.dp_ranks[0]}) {entry.command().removesuffix('&')}</dev/null & ;;" for entry in self.engines if entry.started]
        return "\n".join([*lines, 'case "$1" in', *cases, '  *) echo "no engine of rank $1 on this host"; exit 1 ;;', "esac", ""])

    def restart_proxy_script(self) -> str:
        """Starts the proxy again."""
        path = f"export PATH={':'.join(self.path or [OWN_VLLM])}:$PATH PYTHONDONTWRITEBYTECODE=1"
        return f"#!/bin/bash\n{path}\nsetsid {self.proxy_command} </dev/null >> {self.proxy_log} 2>&1 &\n"

    def stray_script(self) -> str | None:
        """Engines somebody started beside the container."""
        stray = [plan.command() for plan in self.engines if plan.started and not plan.in_container]
        return "\n".join(["#!/bin/bash", *(f"export {k}={v}" for k, v in self.env.items()), *stray, "wait", ""]) if stray else None


@dataclass
class LabPlan:
    """The whole lab. `hosts` is by inventory name of the first unit on each machine."""

    deployment: Deployment
    hosts: dict[str, HostPlan]
    prefill_first: bool = True
    with_engines: bool = True
    up_within_s: float = 40.0
    # Engines that do not come up in that time are what a defect is about, not a reason to give up.
    tolerate_down: bool = False
    warm_up: bool = False

    def host_of(self, name: str) -> HostPlan:
        """The plan of the machine an inventory name lives on."""
        machine = self.deployment.hosts[name].machine
        return self.hosts[self.deployment.machines[machine][0].name]

    def engine(self, name: str) -> EnginePlan:
        engine = self.deployment.engine(name)
        return next(plan for plan in self.host_of(engine.host).engines if plan.engine.name == name)


def plan_lab(deployment: Deployment) -> LabPlan:
    """A healthy lab for the deployment; its hosts need an IP address each."""
    plans: dict[str, HostPlan] = {}
    for machine, hosts in deployment.machines.items():
        first = hosts[0]
        if first.address is None:
            raise ValueError(f"host '{first.name}': the lab needs an IP in ansible_host")
        plan = HostPlan(name=first.name, address=first.address, launch=first.launch or "/opt/pd/start.sh")
        for host in hosts:
            plan.env |= _environment(first.address) | host.env
        for engine in deployment.engines_on(machine):
            plan.engines.append(_engine(engine, deployment))
            for slot in engine.slots:
                if slot.device is not None:
                    plan.devices[slot.device] = DeviceState.healthy(slot.device, int(first.address.split(".")[-1]))
            plan.packages |= {
                {"vllm": "vllm", "vllm_ascend": "vllm_ascend", "mooncake": "mooncake_transfer_engine_npu"}[key]: version
                for key, version in engine.versions.items() if key in ("vllm", "vllm_ascend", "mooncake")
            }  # fmt: skip
        for proxy in deployment.proxies_on(machine):
            if proxy.kind == "vllm-router":
                plan.proxy_command = f"{_installed('vllm-router')} {router_arguments(deployment, first.address, proxy.port)}"
            else:
                plan.proxy_command = _proxy_command(deployment, proxy.port)
            plan.proxy_log, plan.proxy_port = proxy.log or "/var/log/pd/proxy.log", proxy.port
        plan.container.mounts = ["/etc/localtime", "/etc/hccn.conf", "/usr/local/Ascend/driver"]
        plans[first.name] = plan
    return LabPlan(deployment, plans)


def _environment(address: str) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": address, "HCCL_IF_IP": address, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0",
        "HCCL_SOCKET_IFNAME": "eth0", "HCCL_INTRA_ROCE_ENABLE": "1", "ASCEND_TRANSFER_TIMEOUT": "1500", "OMP_PROC_BIND": "false", "OMP_NUM_THREADS": "10",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TASK_QUEUE_ENABLE": "1", "VLLM_LOGGING_LEVEL": "info",
        "OPENAI_API_KEY": "sk-lab-0123456789",
    }  # fmt: skip


def _engine(engine: Engine, deployment: Deployment) -> EnginePlan:
    sizes = {
        role: {"dp_size": first.dp_size, "tp_size": first.tp}
        for role in ("prefill", "decode")
        if (first := next((e for e in deployment.engines if e.role == role), None))
    }
    args = {
        "host": "0.0.0.0", "port": str(engine.http_port), "served-model-name": str(engine.model),
        "tensor-parallel-size": str(engine.tp), "data-parallel-size": str(engine.dp_size),
        "data-parallel-rank": str(engine.dp_ranks[0]), "data-parallel-address": str(engine.address),
        "data-parallel-rpc-port": str(engine.dp_rpc_port), "max-model-len": "8192", "block-size": "128", "trust-remote-code": "",
    }  # fmt: skip
    config = {
        "kv_connector": engine.connector, "kv_role": ROLES[engine.role], "kv_port": str(engine.kv_port),
        "engine_id": f"{engine.host}-{engine.dp_ranks[0]}", "kv_connector_extra_config": sizes,
    }  # fmt: skip
    env = {"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, engine.devices))} if engine.devices else {}
    return EnginePlan(engine, args, config, env)


def _installed(command: str) -> Path:
    """A command beside the running Python; raises ValueError with how to get it."""
    path = Path(sys.executable).parent / command
    if not path.is_file():
        raise ValueError(f"pd_proxy_kind: {command} needs the {command} package beside pdgate: pip install {command} (make setup does)")
    return path


def router_arguments(deployment: Deployment, address: str, port: int) -> str:
    """vllm-router in the mode the connector speaks: kv_transfer_params for all but upstream Mooncake."""
    upstream = any(engine.connector == "MooncakeConnector" for engine in deployment.engines)
    words = ["--vllm-pd-disaggregation", f"--kv-connector {'mooncake' if upstream else 'nixl'}", f"--host 0.0.0.0 --port {port}"]
    for engine in deployment.engines:
        url = deployment.url_of(engine)
        if engine.role == "decode":
            words.append(f"--decode {url}")
        else:
            words.append(f"--prefill {url}" + (f" {engine.kv_port}" if upstream else ""))
    return " ".join([*words, f"--prometheus-host {address} --prometheus-port 29000 --health-check-interval-secs 2"])


def _proxy_command(deployment: Deployment, port: int) -> str:
    parts = [f"python3 {PROXY_SCRIPT} --host 0.0.0.0 --port {port}"]
    for flag, serves in (("prefiller", "serves_prefill"), ("decoder", "serves_decode")):
        engines = [engine for engine in deployment.engines if getattr(engine, serves)]
        parts.append(f"--{flag}-hosts " + " ".join(str(engine.address) for engine in engines))
        parts.append(f"--{flag}-ports " + " ".join(str(engine.http_port) for engine in engines))
    return " ".join(parts)
