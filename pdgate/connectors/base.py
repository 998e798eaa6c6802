"""What a KV connector is to the checks: who binds which port, what it reserves, its timers, what it logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pdgate.inventory.model import Engine, PortSlot

Holder = Literal["worker", "engine core", "engine"]


@dataclass(frozen=True)
class PortClaim:
    """One port of an engine's group and the process of the engine that must hold it."""

    port: int
    slot: PortSlot
    holder: Holder


@dataclass(frozen=True)
class PortRange:
    """Inclusive range of ports something draws from at random."""

    first: int
    last: int
    what: str
    source: str

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last


@dataclass(frozen=True)
class Timer:
    """A time after which the connector gives up: the variable that sets it, its default, the role that reads it."""

    name: Literal["abort", "transfer", "connect", "lease"]
    variable: str
    default_s: float
    unit_s: float
    read_by: Literal["prefill", "decode", "both"]
    source: str
    versions: SpecifierSet | None = None

    def seconds(self, environment: dict[str, str]) -> float:
        """The timer as an engine with this environment has it; raises ValueError if the variable is no number."""
        text = environment.get(self.variable)
        if text is None:
            return self.default_s
        try:
            return float(text) * self.unit_s
        except ValueError:
            raise ValueError(f"{self.variable}={text!r} is not a number") from None


@dataclass(frozen=True)
class LogSignatures:
    """Regular expressions over engine log lines; a group named `id` holds the request id where there is one."""

    transfer_done: str | None
    transfer_failed: str
    delayed_free: str | None
    forced_free: str
    bind_failed: str


@dataclass(frozen=True)
class Connector:
    """A connector as declared; build one per connector, with version ranges inside."""

    name: str
    package: str  # the key of `pd_versions` its behaviour follows
    binds: tuple[str, ...]  # roles that bind the group
    holder: Holder
    offset: Callable[[Engine, PortSlot, Version | None], int]
    signatures: LogSignatures
    timers: tuple[Timer, ...]
    port_variable: str = "kv_port"
    per_rank_ports: Literal["worker", "dp", "engine"] = "worker"
    binds_any_address: bool = False
    uses_transfer_engine: bool = True
    side_channel: Literal["zmq", "http"] = "zmq"  # http: the group's port is a bootstrap server, which names the real one
    kv_moves_by: Literal["pull", "push"] = "pull"  # D fetches it from P, or P writes it to D: the other end is connected to
    # None: the source does not say; then no promise is assumed.
    reports_load_failures: SpecifierSet | None = None
    # Issues of the connector by what they look like: "wrong" (200 with a wrong text), "hang".
    known_issues: dict[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = field(default=())

    def version(self, engine: Engine) -> Version | None:
        """The installed version the behaviour follows, or None when it is unknown: then the conservative rule holds."""
        return parse_version(engine.versions.get(self.package))

    def binds_on(self, engine: Engine) -> bool:
        return engine.role == "both" or engine.role in self.binds

    def port_group(self, engine: Engine) -> list[PortClaim]:
        """The ports this engine's processes must hold once it is up; empty where its role binds none.

        Raises ValueError when the inventory gives no `pd_kv_port`.
        """
        if not self.binds_on(engine):
            return []
        if engine.kv_port is None:
            raise ValueError(f"engine {engine.name}: 'pd_kv_port' is not set, so the ports of {self.name} cannot be planned")
        version = self.version(engine)
        slots = engine.slots
        if self.per_rank_ports == "dp":
            slots = [slot for slot in slots if (slot.pp_rank, slot.pcp_rank, slot.tp_rank) == (0, 0, 0)]
        elif self.per_rank_ports == "engine":
            slots = slots[:1]
        return [PortClaim(engine.kv_port + self.offset(engine, slot, version), slot, self.holder) for slot in slots]

    def load_failures_reported(self, engine: Engine) -> bool:
        """Whether a failed pull reaches the scheduler. False also when unknown: the unsafe case is the assumption."""
        version = self.version(engine)
        if self.reports_load_failures is None or version is None:
            return False
        return self.reports_load_failures.contains(version, prereleases=True)

    def timer(self, name: str, engine: Engine) -> Timer | None:
        """The timer of that name for the engine's version; with an unknown version, the newest rule."""
        version = self.version(engine)
        matching = [timer for timer in self.timers if timer.name == name]
        for timer in matching:
            if version is None or timer.versions is None or timer.versions.contains(version, prereleases=True):
                return timer
        return None


def parse_version(text: str | None) -> Version | None:
    """A version from an inventory or a host (`0.23.0`, `v0.20.2rc1`, `0.3.11.post1`), None where it is not one."""
    if not text:
        return None
    try:
        return Version(text.removeprefix("v"))
    except InvalidVersion:
        return None
