"""Small builders of deployments and facts for tests of rules."""

from __future__ import annotations

from typing import Any

from pdgate.facts.model import Clock, HostFacts, Interval, Listener, PortSettings, Process, unknown_host
from pdgate.inventory.connection import Connection
from pdgate.inventory.model import Deployment, Engine, Host

NOW = 1_790_000_000.0
CONFIG = '{"kv_connector": "MooncakeConnectorV1", "kv_role": "%s", "kv_port": "28000"}'


def host(name: str = "p0", address: str = "10.0.0.1", **values: Any) -> Host:
    return Host(name=name, connection=Connection(kind="ssh", name=name), machine=values.pop("machine", name), address=address, **values)


def engine(name: str = "p0", **values: Any) -> Engine:
    defaults: dict[str, Any] = {
        "host": name.partition("/")[0], "role": "prefill", "connector": "MooncakeConnectorV1", "http_port": 7000, "kv_port": 28000,
        "tp": 2, "devices": (0, 1), "address": "10.0.0.1", "model": "m", "log": "/var/log/e.log",
        "versions": {"vllm": "0.23.0", "vllm_ascend": "0.23.0", "mooncake": "0.3.11.post1"},
    }  # fmt: skip
    return Engine(name=name, **{**defaults, **values})


def deployment(engines: list[Engine], hosts: list[Host] | None = None) -> Deployment:
    hosts = hosts or [host(name) for name in dict.fromkeys(one.host for one in engines)]
    return Deployment(name="test", source="test.yaml", hosts={one.name: one for one in hosts}, engines=engines)


def serve(role: str = "kv_producer", port: int = 7000, **flags: str) -> list[str]:
    """argv of a `vllm serve`."""
    extra = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
    return ["python3", "/usr/bin/vllm", "serve", "/models/m", "--port", str(port), "--tensor-parallel-size", "2", *extra,
            "--served-model-name", "m", "--kv-transfer-config", CONFIG % role]  # fmt: skip


def process(pid: int, ppid: int = 1, argv: list[str] | None = None, comm: str = "x", started: float = NOW - 600) -> Process:
    return Process(pid=pid, ppid=ppid, comm=comm, argv=argv or [comm], started=started)


def facts(machine: str = "p0", **sections: Any) -> HostFacts:
    """Facts with the given sections known (plain values) and all others unknown."""
    found = unknown_host(machine, machine, NOW, "not in this test").model_dump()
    for name, value in sections.items():
        found[name] = value if name in ("launch", "logs") else {"value": value}
    return HostFacts.model_validate(_plain(found))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def running_prefill(**more: Any) -> HostFacts:
    """A healthy P: API server 10, core 11, workers 12 and 13 on their ports."""
    sections: dict[str, Any] = {
        "processes": [process(1), process(10, argv=serve()), process(11, 10, comm="VLLM::EngineCor"),
                      process(12, 11, comm="VLLM::Worker_TP"), process(13, 11, comm="VLLM::Worker_TP")],
        "listeners": [Listener(address="0.0.0.0", port=7000, inode=1, pid=10), Listener(address="10.0.0.1", port=28000, inode=2, pid=12),
                      Listener(address="10.0.0.1", port=28001, inode=3, pid=13)],
        "engine_processes": [{"pid": 10, "mntns": "m1", "netns": "n1", "exe": "/usr/bin/python3", "cgroup": "/", "environment": {}}],
        "roots": {"m1": {"utc_offset": "+0800", "packages": {"vllm": "0.23.0"}}},
        "containers": [],
        "ports": PortSettings(ephemeral=(32768, 60999)),
        "clock": Clock(offset_s=Interval(low=-0.001, high=0.001), utc_offset="+0800", localtime="/usr/share/zoneinfo/Asia/Shanghai"),
    }  # fmt: skip
    return facts(**{**sections, **more})
