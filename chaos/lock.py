"""Who holds a host: one chaos run at a time, and whoever finds it held can tell whether the holder is still alive."""

from __future__ import annotations

import os
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path

from chaos.guard import Hand, leftovers

LOCK_S = 600  # renewed before each experiment
ENDS_IT = "end it first (Ctrl-C: it undoes what it has done), then --cleanup"


class Held(Exception):
    """Another chaos run holds the host, or one has left a fault on it; the message says who, for how long, and what to do."""


@dataclass(frozen=True)
class Holder:
    """A run and the process it is. `place`: the controller's boot and pid name space, so that a pid means anything."""

    run: str
    machine: str
    place: str
    pid: int
    ticks: str

    def word(self) -> str:
        return f"{self.run}@{self.machine}:{self.place}:{self.pid}:{self.ticks}"

    def __str__(self) -> str:
        return f"{self.run} (pid {self.pid} on {self.machine})"

    @property
    def alive(self) -> bool | None:
        """None where that cannot be told from here."""
        if self.place != _place():
            return None
        return _ticks(self.pid) == self.ticks


def parse(word: str) -> Holder | None:
    run, _, rest = word.partition("@")
    parts = rest.split(":")
    return Holder(run, parts[0], parts[1], int(parts[2]), parts[3]) if len(parts) == 4 and parts[2].isdigit() else None


def this_run(run: str) -> Holder:
    return Holder(run, platform.node().replace(":", "-") or "here", _place(), os.getpid(), _ticks(os.getpid()))


def _place() -> str:
    names = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    return f"{zlib.crc32(names.encode()):08x}"


def _ticks(pid: int) -> str:
    """Start time of a process, empty where it is gone or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]


def take(hand: Hand, owner: Holder) -> None:
    """Hold the host for LOCK_S, or renew that; raises Held, GuardFailed where the host gives no answer.

    A lock whose holder is known to be dead is nobody's, but a fault it has left must be undone first.
    """
    found = holder(hand)
    if found and found[0] != owner.word():
        other = parse(found[0])
        if other is None or other.alive is not False:
            raise Held(f"{hand.host.name}: another chaos run holds this host: {in_words(*found)}")
        hand.must("lock_break", "the lock of a dead run could not be taken away")
    hand.must(f"lock_take {owner.word()} {LOCK_S}", "the chaos lock could not be taken")


def refuse_leftovers(hand: Hand, run: str) -> None:
    """Raises Held where another run's fault is still on the host."""
    left = [tag for tag in leftovers(hand) if not tag.startswith(run)]
    if left:
        raise Held(
            f"{hand.host.name}: a fault of an earlier run is still there ({', '.join(left)}); its guard undoes it when its time has come, "
            "pytest chaos --cleanup at once"
        )


def drop(hand: Hand, owner: Holder) -> None:
    hand.run(f"lock_drop {owner.word()}")


def holder(hand: Hand) -> tuple[str, int] | None:
    """The holder's word and for how many seconds at most, or None."""
    words = hand.must("lock_holder", "whether another run holds this host cannot be told").split()
    return (words[0], int(words[1])) if len(words) == 2 else None


def in_words(word: str, seconds: int) -> str:
    other = parse(word)
    if other is None or other.alive is None:
        who = f"{other or word}, which cannot be looked at from here"
        return f"{who}, for another {seconds} s at most; if it is dead: pytest chaos --cleanup --break-lock"
    return f"{other} is alive; {ENDS_IT}" if other.alive else f"{other} is dead; pytest chaos --cleanup"


def refuse_the_living(hand: Hand, break_lock: bool) -> None:
    """For `--cleanup`: raises Held where undoing would pull the ground from under a run that is alive, or may be and nobody vouched for its death."""
    found = holder(hand)
    other = parse(found[0]) if found else None
    alive = other.alive if other else None
    if found and (alive or (alive is None and not break_lock)):
        raise Held(f"{hand.host.name} is held by {in_words(*found)}; nothing was undone")
