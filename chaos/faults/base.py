"""What a fault is: six verbs. Scripts are POSIX sh with the guard's functions at hand (chaos/guard.sh); each ends with 0 or says why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdgate.facts.model import HostFacts, Process
from pdgate.rules.running import RunningEngine

CUT = "@@cut"  # and a number: connections that stood and had to end, which is not what is asked about


@dataclass(frozen=True)
class Plan:
    """What a fault will do, in words, and what undoes it. `hits` is the path it really takes effect on."""

    does: str
    hits: str
    undo: str
    survives_reboot: bool = False
    engines: tuple[str, ...] = ()  # engines that stop serving while it lasts


@runtime_checkable
class Fault(Protocol):
    """The six verbs. `host` is the inventory name of the faulted host."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...

    def available(self, facts: HostFacts) -> str | None:
        """Why it cannot be injected here, or None."""

    def plan(self) -> Plan:
        """What it does and what undoes it; nothing is touched."""

    def inject(self) -> str:
        """Script that hurts."""

    def verify_applied(self) -> str:
        """Script that ends with 0 only where the hurt is there, and prints the evidence."""

    def heal(self) -> str:
        """Script that takes it back; the same as the plan's undo."""

    def verify_healed(self) -> str:
        """Script that ends with 0 only where nothing of it is left."""


@dataclass(frozen=True)
class Victim:
    """A process that is meant: signalled only while pid, start time and command line are these."""

    pid: int
    ticks: str
    command: str  # POSIX cksum of /proc/PID/cmdline with NULs as blanks
    comm: str


# One line a process: pid, start ticks, cksum of its command line, comm.
IDENTIFY = 'for pid in {pids}; do t=$(started $pid); [ -n "$t" ] && echo "$pid $t $(command_of $pid) $(cat /proc/$pid/comm)"; done; true'


def victims_from(output: str) -> list[Victim]:
    words = [line.split(maxsplit=3) for line in output.splitlines() if line.strip()]
    return [Victim(int(pid), ticks, command, comm) for pid, ticks, command, comm in words]


def pids_of(running: RunningEngine, part: str) -> list[int]:
    """Pids of a part of an engine: one worker, all workers, its core, its API server, or everything."""
    processes: list[Process] = [process for pid in sorted(running.pids) if (process := running.facts.process(pid)) is not None]
    if part == "engine":
        return [process.pid for process in processes]
    if part == "api":
        return [running.api.pid]
    start = {"worker": "VLLM::Worker", "workers": "VLLM::Worker", "core": "VLLM::EngineCor"}[part]
    found = [process.pid for process in processes if process.comm.startswith(start)]
    return found[:1] if part == "worker" else found


def quiet_port(port: int) -> str:
    """sh: nobody listens on a port, whatever the address; from /proc, since not every host has ss."""
    return f"! cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -qE ': [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A'"
