"""What a host runs out of, or what an earlier engine left on it: planted leftovers, a full log disk, no file descriptors."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from chaos.faults.base import Plan, Victim
from pdgate.facts.model import HostFacts

MARK = "planted by pdgate chaos"


@dataclass(frozen=True)
class PlantLeftovers:
    """Files a dead engine leaves (`/tmp/mooncake*`, `/dev/shm/mooncake*`), older than the running ones."""

    host: str
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        return "plant-leftovers"

    def available(self, facts: HostFacts) -> str | None:
        return None if self.paths else "no path to plant"

    def plan(self) -> Plan:
        undo = "\n".join(f"grep -qs {shlex.quote(MARK)} {shlex.quote(path)} && rm -f {shlex.quote(path)}" for path in self.paths) + "\ntrue"
        return Plan(f"stale files on {self.host}: {', '.join(self.paths)}", "what an engine finds when it starts next", undo, survives_reboot=True)

    def inject(self) -> str:
        lines = [f"[ ! -e {shlex.quote(path)} ] || {{ echo '{path} exists and is not ours: refused'; exit 1; }}" for path in self.paths]
        lines += [f"echo {shlex.quote(MARK)} > {shlex.quote(path)} && touch -t 202001010000 {shlex.quote(path)}" for path in self.paths]
        return "set -e\n" + "\n".join(lines)

    def verify_applied(self) -> str:
        return " && ".join(f"grep -q {shlex.quote(MARK)} {shlex.quote(path)}" for path in self.paths) + " && echo planted"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        tests = " ".join(shlex.quote(path) for path in self.paths)
        return f"for path in {tests}; do ! grep -qs {shlex.quote(MARK)} $path || {{ echo \"$path is still there\"; exit 1; }}; done"


@dataclass(frozen=True)
class FillDisk:
    """The file system of a log folder is full but for `leave_kb`; refused on a file system that holds / or is large."""

    host: str
    folder: str
    leave_kb: int = 4
    most_mb: int = 20480

    @property
    def name(self) -> str:
        return "log-disk-full"

    @property
    def _file(self) -> str:
        return f"{self.folder}/.pdgate-fill"

    def available(self, facts: HostFacts) -> str | None:
        return None

    def plan(self) -> Plan:
        undo = f"rm -f {shlex.quote(self._file)}"
        return Plan(f"the file system of {self.folder} on {self.host} is full", "everything that writes there", undo, survives_reboot=True)

    def inject(self) -> str:
        folder = shlex.quote(self.folder)
        return (
            f"set -- $(df -Pk {folder} | tail -n1)\n"
            f"[ \"$6\" != / ] || {{ echo '{self.folder} lies on the root file system: filling it would hurt more than the log'; exit 1; }}\n"
            f"[ $4 -lt $(({self.most_mb} * 1024)) ] || {{ echo \"$(($4 / 1024)) MB are free on $6, more than {self.most_mb} MB: refused\"; exit 1; }}\n"
            f"dd if=/dev/zero of={shlex.quote(self._file)} bs=1024 count=$(($4 - {self.leave_kb})) 2>/dev/null; true"
        )

    def verify_applied(self) -> str:
        folder = shlex.quote(self.folder)
        return f"set -- $(df -Pk {folder} | tail -n1); [ -e {shlex.quote(self._file)} ] && [ $4 -le $(({self.leave_kb} * 4)) ] && echo \"$4 KB free on $6\" || {{ echo \"$4 KB are free\"; exit 1; }}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return f"[ ! -e {shlex.quote(self._file)} ] || {{ echo 'the filling file is still there'; exit 1; }}"


@dataclass(frozen=True)
class FewDescriptors:
    """A process may open no more files or connections: its soft limit is set to what it has open (prlimit)."""

    target: str
    host: str
    victims: tuple[Victim, ...]
    tag: str

    @property
    def name(self) -> str:
        return "no-file-descriptors"

    def available(self, facts: HostFacts) -> str | None:
        return None if self.victims else f"{self.target} has no such process"

    def plan(self) -> Plan:
        undo = f"while read pid ticks soft hard; do same $pid $ticks && prlimit --pid $pid --nofile=$soft:$hard; done <$PDGATE_GUARD/{self.tag}/limits 2>/dev/null; true"
        return Plan(f"{self.target} can open no more files or connections", "new connections and files of these processes", undo)

    def inject(self) -> str:
        lines = ["command -v prlimit >/dev/null || { echo 'no prlimit (util-linux) on the host'; exit 1; }", f": >$PDGATE_GUARD/{self.tag}/limits"]
        for victim in self.victims:
            lines += [
                f"same {victim.pid} {victim.ticks} && [ \"$(command_of {victim.pid})\" = {victim.command} ] || {{ echo 'pid {victim.pid} is not the process that was meant'; exit 1; }}",
                f"set -- $(prlimit --pid {victim.pid} --nofile --output SOFT,HARD --noheadings)",
                f"echo \"{victim.pid} {victim.ticks} $1 $2\" >>$PDGATE_GUARD/{self.tag}/limits",
                f"prlimit --pid {victim.pid} --nofile=$(ls /proc/{victim.pid}/fd | wc -l):$2 || exit 1",
            ]
        return "\n".join(lines)

    def verify_applied(self) -> str:
        return "\n".join(
            f"open=$(ls /proc/{v.pid}/fd | wc -l); soft=$(prlimit --pid {v.pid} --nofile --output SOFT --noheadings | tr -d ' '); "
            f"[ \"$soft\" -le $((open + 2)) ] && echo \"pid {v.pid}: $open open, limit $soft\" || {{ echo \"pid {v.pid} may still open files\"; exit 1; }}"
            for v in self.victims
        )

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return (
            f"while read pid ticks soft hard; do same $pid $ticks || continue; now=$(prlimit --pid $pid --nofile --output SOFT --noheadings | tr -d ' '); "
            f"[ \"$now\" = \"$soft\" ] || {{ echo \"pid $pid has limit $now, had $soft\"; exit 1; }}; done <$PDGATE_GUARD/{self.tag}/limits"
        )


@dataclass(frozen=True)
class LinkDown:
    """One NPU's network port down through hccn_tool; up again with its stored configuration. *Not proven on hardware.*"""

    host: str
    device: int

    @property
    def name(self) -> str:
        return "npu-link-down"

    def available(self, facts: HostFacts) -> str | None:
        return None

    def plan(self) -> Plan:
        undo = f"hccn_tool -i {self.device} -link -s up; hccn_tool -i {self.device} -cfg recovery; true"
        return Plan(f"the link of NPU {self.device} of {self.host} is down", "RoCE of this NPU: its transfers and collectives", undo, survives_reboot=True)

    def inject(self) -> str:
        return f"command -v hccn_tool >/dev/null || {{ echo 'no hccn_tool on the host'; exit 1; }}\nhccn_tool -i {self.device} -link -s down"

    def verify_applied(self) -> str:
        return f"hccn_tool -i {self.device} -link -g | grep -qi 'link status: *DOWN' && echo 'link status: DOWN' || {{ hccn_tool -i {self.device} -link -g; exit 1; }}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return f"n=0; until hccn_tool -i {self.device} -link -g | grep -qi 'link status: *UP'; do n=$((n + 1)); [ $n -lt 100 ] || {{ echo 'the link is not up after 10 s'; exit 1; }}; sleep 0.1; done"
