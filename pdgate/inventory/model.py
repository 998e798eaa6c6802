"""The deployment as declared: hosts, engines, proxies. Plain frozen data, serialisable, no I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pdgate.inventory.connection import Connection
from pdgate.inventory.variables import Expect, Load, Platform, ProxyKind

Role = Literal["prefill", "decode", "both"]


class InventoryError(Exception):
    """The inventory cannot be used; the message names file, host and key and says what to do."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(Frozen):
    """One inventory name: how to reach it and which machine it is."""

    name: str
    connection: Connection
    machine: str
    address: str | None = Field(None, description="IP the engines on it bind and are reached on")
    platform: Platform = "ascend-a2"
    rack: str | None = None
    zone: str | None = None
    launch: str | None = None
    container: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    expect: Expect = Field(default_factory=lambda: Expect.model_validate({}))
    load: Load = Field(default_factory=lambda: Load.model_validate({}))
    plog: str | None = None
    toxiproxy: str = "toxiproxy-server"
    kv_transport: Literal["tcp", "rdma"] | None = None
    chaos: bool = False


class PortSlot(Frozen):
    """One rank's place in an engine: which worker, on which device."""

    dp_rank: int
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    device: int | None


class Engine(Frozen):
    """One vLLM instance with a role. Ports are not here: they follow from the connector (pdgate.connectors)."""

    name: str
    host: str
    role: Role
    connector: str
    versions: dict[str, str] = Field(default_factory=dict)
    model: str | None = None
    scheme: Literal["http", "https"] = "http"
    api_key_env: str | None = None
    http_port: int | None = None
    kv_port: int | None = None
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dp_size: int = 1
    dp_ranks: tuple[int, ...] = (0,)
    dp_mode: Literal["external", "internal"] = "external"
    dp_rpc_port: int | None = None
    devices: tuple[int, ...] = ()
    address: str | None = None
    log: str | None = None
    restart: str | None = None

    @property
    def serves_prefill(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def serves_decode(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def slots(self) -> list[PortSlot]:
        """Every worker of the engine, in device order (dp, pp, pcp, tp)."""
        places = [(dp, pp, pcp, tp) for dp in self.dp_ranks for pp in range(self.pp) for pcp in range(self.pcp) for tp in range(self.tp)]
        devices: tuple[int | None, ...] = self.devices or (None,) * len(places)
        return [
            PortSlot(dp_rank=dp, pp_rank=pp, pcp_rank=pcp, tp_rank=tp, device=device)
            for (dp, pp, pcp, tp), device in zip(places, devices, strict=True)
        ]


class Proxy(Frozen):
    """What clients talk to."""

    name: str
    host: str
    address: str | None
    port: int
    scheme: Literal["http", "https"] = "http"
    kind: ProxyKind = "vllm-ascend"
    api_key_env: str | None = None
    log: str | None = None
    path: str | None = None
    restart: str | None = None


class Deployment(Frozen):
    """Everything one inventory describes."""

    name: str
    source: str = Field(description="the inventory it was read from")
    hosts: dict[str, Host]
    engines: list[Engine]
    proxies: list[Proxy] = Field(default_factory=list)

    def host_of(self, unit: Engine | Proxy) -> Host:
        return self.hosts[unit.host]

    def engines_on(self, machine: str) -> list[Engine]:
        return [engine for engine in self.engines if self.hosts[engine.host].machine == machine]

    def proxies_on(self, machine: str) -> list[Proxy]:
        return [proxy for proxy in self.proxies if self.hosts[proxy.host].machine == machine]

    @property
    def front_host(self) -> Host:
        """The host whose `pd_expect` and `pd_load` hold for the deployment as a whole: the first proxy's, else the first."""
        return self.host_of(self.proxies[0]) if self.proxies else next(iter(self.hosts.values()))

    @property
    def machines(self) -> dict[str, list[Host]]:
        """Machine name to the inventory names that live on it, in inventory order."""
        machines: dict[str, list[Host]] = {}
        for host in self.hosts.values():
            machines.setdefault(host.machine, []).append(host)
        return machines

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def url_of(self, unit: Engine | Proxy) -> str | None:
        """Base URL of an engine's or proxy's HTTP, or None where the inventory gives no address or port."""
        port = unit.http_port if isinstance(unit, Engine) else unit.port
        address = unit.address or self.host_of(unit).address
        if port is None or address is None:
            return None
        return f"{unit.scheme}://{f'[{address}]' if ':' in address else address}:{port}"
