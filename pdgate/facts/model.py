"""What was observed on one machine at one moment. Plain data: serialisable, replayable, and honest about what is unknown."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class UnknownFact(Exception):
    """A rule asked for something that could not be observed. A check that needs it is invalid, never passed."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(Frozen, Generic[T]):
    """A section of the facts: its value, or why it is unknown."""

    value: T | None = None
    unknown: str | None = Field(None, description="why there is no value")

    def get(self) -> T:
        """The value; raises UnknownFact with the reason where there is none."""
        if self.value is None:
            raise UnknownFact(self.unknown or "not collected")
        return self.value

    @property
    def known(self) -> bool:
        return self.value is not None


class Interval(Frozen):
    """A measured number with its uncertainty: the truth lies in [low, high]."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> float:
        return (self.high - self.low) / 2


class Identity(Frozen):
    uid: int
    hostname: str
    kernel: str
    boot_id: str
    boot_time: float = Field(description="epoch seconds, in the host's own clock")
    hz: int
    netns: str
    mntns: str

    @property
    def is_root(self) -> bool:
        return self.uid == 0


class Clock(Frozen):
    """The host's clock against the controller's."""

    offset_s: Interval = Field(description="host time minus controller time, seconds")
    utc_offset: str = Field(description="the host's zone, as +0800")
    localtime: str = Field(description="where /etc/localtime leads")
    timezone_is_directory: bool = False


class Listener(Frozen):
    """A listening TCP socket and, where it can be known, its owner."""

    address: str
    port: int
    inode: int
    pid: int | None = None
    netns: str | None = None

    @property
    def any_address(self) -> bool:
        return self.address in ("0.0.0.0", "::")


class Process(Frozen):
    pid: int
    ppid: int
    comm: str
    argv: list[str] = Field(default_factory=list)
    started: float = Field(description="epoch seconds, in the host's own clock")
    state: str = "S"

    @property
    def command(self) -> str:
        return " ".join(self.argv) or f"[{self.comm}]"


class EngineProcess(Frozen):
    """More about a process that looks like part of an engine: only these have their (filtered) environment read."""

    pid: int
    mntns: str
    netns: str
    exe: str
    cgroup: str
    environment: dict[str, str] = Field(default_factory=dict)
    readable: bool = True


class Root(Frozen):
    """A mount namespace an engine process lives in: the host itself or a container."""

    utc_offset: str | None = None
    timezone_is_directory: bool = False
    has_hccn_conf: bool = False
    packages: dict[str, str] = Field(default_factory=dict, description="distribution to version, from *.dist-info")


class Container(Frozen):
    id: str
    name: str
    pid: int
    network: str
    image: str
    published: list[tuple[str, int]] = Field(default_factory=list, description="host address and port")
    mounts: list[str] = Field(default_factory=list, description="destinations inside the container")


class Leftover(Frozen):
    path: str
    kind: str
    size: int
    modified: float = Field(description="epoch seconds, in the host's own clock")


class Device(Frozen):
    """One NPU's network device as hccn_tool tells; a query that failed is missing from `answers`."""

    id: int
    link: str | None = None
    net_health: str | None = None
    netdetect: str | None = None
    tls_switch: int | None = None
    ip: str | None = None
    link_up: int | None = None
    link_down: int | None = None
    last_changes: list[str] = Field(default_factory=list)
    counters: dict[str, int] = Field(default_factory=dict, description="-stat and -stat_extra; absent is unknown, not 0")
    failed: dict[str, str] = Field(default_factory=dict, description="query to what the tool said instead")


class NpuChip(Frozen):
    npu: int
    chip: int
    phy_id: int | None
    name: str
    health: str
    bus_id: str
    hbm_used_mb: int | None = None
    hbm_total_mb: int | None = None


class NpuProcess(Frozen):
    npu: int
    chip: int
    pid: int
    name: str


class NpuSmi(Frozen):
    version: str
    chips: list[NpuChip] = Field(default_factory=list)
    processes: list[NpuProcess] = Field(default_factory=list)


class LogFacts(Frozen):
    size: int
    modified: float
    inode: int
    started: list[str] = Field(default_factory=list, description="lines before and at 'Application startup complete'")
    tail: list[str] = Field(default_factory=list)


class PortSettings(Frozen):
    ephemeral: tuple[int, int]
    reserved: list[tuple[int, int]] = Field(default_factory=list)


class HostFacts(Frozen):
    """Everything one probe saw on one machine."""

    machine: str
    host: str = Field(description="the inventory name it was reached through")
    collected: float = Field(description="epoch seconds, in the controller's clock")
    duration_s: float
    identity: Section[Identity]
    clock: Section[Clock]
    ports: Section[PortSettings]
    addresses: Section[dict[str, list[str]]]
    listeners: Section[list[Listener]]
    processes: Section[list[Process]]
    engine_processes: Section[list[EngineProcess]]
    roots: Section[dict[str, Root]]
    containers: Section[list[Container]]
    leftovers: Section[list[Leftover]]
    devices: Section[list[Device]]
    npu: Section[NpuSmi]
    cann: Section[str]
    launch: dict[str, Section[str]] = Field(default_factory=dict, description="path to script text")
    logs: dict[str, Section[LogFacts]] = Field(default_factory=dict, description="path to what was seen of it")

    def process(self, pid: int) -> Process | None:
        return next((process for process in self.processes.get() if process.pid == pid), None)

    def lineage(self, pid: int) -> list[Process]:
        """The process and its ancestors, youngest first."""
        by_pid = {process.pid: process for process in self.processes.get()}
        line: list[Process] = []
        while pid in by_pid and len(line) < 64:
            line.append(by_pid[pid])
            pid = by_pid[pid].ppid
        return line

    def descendants(self, pid: int) -> set[int]:
        """Pids of the process and all that it started, directly or not."""
        children: dict[int, list[int]] = {}
        for process in self.processes.get():
            children.setdefault(process.ppid, []).append(process.pid)
        found: set[int] = set()
        waiting = [pid]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += children.get(current, [])
        return found

    def container_of(self, pid: int) -> Container | None:
        """The container whose first process is an ancestor of `pid`; None also where containers are unknown."""
        if not self.containers.known:
            return None
        line = {process.pid for process in self.lineage(pid)}
        return next((container for container in self.containers.get() if container.pid in line), None)


def unknown_host(machine: str, host: str, collected: float, reason: str) -> HostFacts:
    """Facts of a machine that could not be probed: every section unknown for the same reason."""
    sections = {
        name: {"unknown": reason}
        for name in HostFacts.model_fields
        if name not in ("machine", "host", "collected", "duration_s", "launch", "logs")
    }
    return HostFacts.model_validate({"machine": machine, "host": host, "collected": collected, "duration_s": 0.0, **sections})
