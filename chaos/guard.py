"""The guard: before a fault bites, what undoes it lies on the faulted host and a timer runs there. It outlives the controller."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from chaos.faults.base import CUT
from pdgate.facts.shell import HostUnreachable, ShellResult, Shells
from pdgate.inventory.model import Host
from pdgate.serving.record import now

LIBRARY = Path(__file__).with_name("guard.sh").read_text()
FOLDER = "/var/lib/pdgate"
REPLAY = f"for lib in {FOLDER}/*/lib.sh; do . $lib && guard_replay && break; done"
# So that what survives a reboot is undone after one: a line for cron's @reboot, or a unit where systemd runs.
BOOT = f"""
if [ -d /run/systemd/system ]; then
  printf '[Unit]\\nDescription=pdgate: undo faults left from before a reboot\\n[Service]\\nType=oneshot\\nExecStart=/bin/sh -c "{REPLAY}"\\n[Install]\\nWantedBy=multi-user.target\\n' > /etc/systemd/system/pdgate-guard.service
  systemctl -q enable pdgate-guard.service
elif [ -d /etc/cron.d ]; then
  echo '@reboot root {REPLAY}' > /etc/cron.d/pdgate-guard
else
  echo "neither systemd nor cron: nothing would undo this fault after a reboot"; exit 3
fi
"""

class GuardFailed(Exception):
    """The guard could not be set, or could not undo; the message names host, fault and what the host said."""


@dataclass(frozen=True)
class Hand:
    """A shell on one host, with the guard's functions at hand and a deadline for every call."""

    host: Host
    shells: Shells

    def run(self, script: str, timeout_s: float = 30.0) -> ShellResult:
        """Run a script; raises GuardFailed where the host gives no shell in time."""
        try:
            return self.shells.run(self.host.connection, f"{LIBRARY}\n{script}\n", timeout_s)
        except HostUnreachable as error:
            raise GuardFailed(f"{self.host.name}: {error}") from None

    def must(self, script: str, what: str, timeout_s: float = 30.0) -> str:
        """Run a script that must end with 0; raises GuardFailed with what it said."""
        result = self.run(script, timeout_s)
        if result.code != 0:
            raise GuardFailed(f"{self.host.name}: {what}: {(spoken(result.stdout) + result.stderr).strip()[-400:] or f'code {result.code}'}")
        return result.stdout


@dataclass(frozen=True)
class Undone:
    """What an undo was: the interval of the controller's clock that holds it, whether it was ours, how many standing connections it ended, and what it said."""

    at: tuple[float, float]
    by_us: bool
    cut: int
    said: str


@dataclass(frozen=True)
class Guard:
    """The guard of one fault: `tag` names it on the host, `owner` says whose it is."""

    hand: Hand
    tag: str
    owner: str
    undo: str
    survives_reboot: bool = False

    @property
    def checksum(self) -> int:
        return posix_cksum(f"{self.undo}\n".encode())

    def persist(self) -> None:
        """Write the undo (and, where it must survive a reboot, the boot replay) on the host's disk; raises GuardFailed."""
        # Each guard has the functions beside it: none depends on what another one writes or takes away.
        library = f"cat > {FOLDER}/{self.tag}/lib.sh <<'PDGATE_LIB_END'\n{LIBRARY}PDGATE_LIB_END\n"
        boot = f"( {BOOT} ) || exit 3\n" if self.survives_reboot else ""
        words = f"guard_persist {self.tag} {shlex.quote(self.owner)} {'yes' if self.survives_reboot else 'no'}"
        undo = f"<<'PDGATE_UNDO_END' || exit 1\n{self.undo}\nPDGATE_UNDO_END\n"
        self.hand.must(f"{boot}{words} {undo}{library}", f"the undo of {self.tag} could not be written")

    def arm(self, seconds: float) -> None:
        self.hand.must(f"guard_arm {self.tag} {max(1, round(seconds))}", f"the timer of {self.tag} could not be started")

    def verify_armed(self) -> None:
        self.hand.must(f"guard_armed {self.tag} {self.checksum} || {{ echo 'no timer runs, or the undo is not the one sent'; exit 1; }}", f"{self.tag} is not armed")

    def fire(self) -> Undone:
        """Undo now; raises GuardFailed where the undo itself fails."""
        before = now()
        out = self.hand.must(timed(f"guard_fire {self.tag} controller"), f"the undo of {self.tag} failed", 60.0)
        return Undone(when(before, out, now()), "@@gone" not in out.splitlines(), connections_cut(out), spoken(out).strip())

    def disarm(self) -> None:
        self.hand.must(f"guard_disarm {self.tag}", f"the timer of {self.tag} could not be stopped")


TICK_S = 0.02  # /proc/uptime counts in hundredths; two of them are read


def timed(script: str) -> str:
    """The script, which says by the host's uptime when it began and ended; what counts in it may be marked with `moment`."""
    return f"read -r pdgate_from pdgate_rest </proc/uptime\n(\n{script}\n)\npdgate_code=$?; read -r pdgate_to pdgate_rest </proc/uptime; echo; echo \"@@timed $pdgate_from $pdgate_to\"; exit $pdgate_code"


def spoken(out: str) -> str:
    """What a script said to people: without its marks."""
    return "".join(line for line in out.splitlines(keepends=True) if not line.startswith("@@"))


def connections_cut(out: str) -> int:
    """How many standing connections a script says it has ended."""
    return sum(map(int, re.findall(rf"^{CUT} (\d+)$", out, re.MULTILINE)))


def when(before: float, said: str, after: float) -> tuple[float, float]:
    """The interval of the controller's clock that holds the last `moment` of a `timed` script, or its end; as wide as the remote call alone."""
    found = re.search(r"^@@timed ([\d.]+) ([\d.]+)$", said, re.MULTILINE)
    if not found:
        return before, after
    marks = re.findall(r"^@@moment ([\d.]+)$", said, re.MULTILINE)
    began, ended = float(found[1]), float(found[2])
    at = float(marks[-1]) if marks else ended
    return before + max(0.0, at - began - TICK_S), after - max(0.0, ended - at - TICK_S)


def clean_up(hand: Hand) -> list[str]:
    """Undo whatever any earlier run has left on the host; a line each. Raises GuardFailed."""
    out = hand.must(f"[ ! -d {FOLDER} ] || guard_replay all cleanup; lock_break", "what earlier runs left could not be undone", 120.0)
    return [line for line in spoken(out).splitlines() if line.strip()]


def leftovers(hand: Hand) -> list[str]:
    """Tags of guards that are still on the host."""
    return hand.must(f"ls {FOLDER} 2>/dev/null; true", "the guard's folder could not be read").split()


def posix_cksum(data: bytes) -> int:
    """What POSIX `cksum` prints for these bytes."""
    length, extra = len(data), b""
    while length:
        extra += bytes([length & 0xFF])
        length >>= 8
    crc = 0
    for byte in data + extra:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1) ^ 0x04C11DB7 if crc & 0x80000000 else crc << 1
            crc &= 0xFFFFFFFF
    return crc ^ 0xFFFFFFFF


