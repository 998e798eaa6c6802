"""Who holds a host: one chaos run at a time, and whoever finds it held can tell whether the holder is still alive."""

from __future__ import annotations

import os
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path

from chaos.guard import Hand, leftovers
from pdgate.process import start_ticks

LOCK_S = 600  # renewed before each experiment


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
        return start_ticks(self.pid) == self.ticks


def parse(word: str) -> Holder:
    """What `Holder.word` wrote; of anything else the run alone, which nobody can look at."""
    run, _, rest = word.partition("@")
    parts = rest.split(":")
    if len(parts) != 4 or not parts[2].isdigit():
        return Holder(word, "an unknown machine", "", 0, "")
    return Holder(run, parts[0], parts[1], int(parts[2]), parts[3])


def this_run(run: str) -> Holder:
    return Holder(run, platform.node().replace(":", "-") or "here", _place(), os.getpid(), start_ticks(os.getpid()))


def _place() -> str:
    names = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    return f"{zlib.crc32(names.encode()):08x}"


def take(hand: Hand, owner: Holder) -> None:
    """Hold the host for LOCK_S, or renew that; raises Held, GuardFailed where the host gives no answer.

    A lock whose holder is known to be dead is nobody's, but a fault it has left must be undone first (`refuse_leftovers`).
    """
    ours = f"lock_take {owner.word()} {LOCK_S}"
    if hand.run(ours).code == 0:
        return
    if found := holder(hand):
        other, seconds = found
        if other.alive is not False:
            raise Held(f"{hand.host.name}: another chaos run holds this host: {in_words(other, seconds)}")
        hand.must("lock_break", "the lock of a dead run could not be taken away")
    hand.must(ours, "the chaos lock could not be taken")


def refuse_leftovers(hand: Hand, run: str) -> None:
    """Raises Held where another run's fault is still on the host."""
    left = [tag for tag in leftovers(hand) if not tag.startswith(run)]
    if left:
        raise Held(
            f"{hand.host.name}: a fault of an earlier run is still there ({', '.join(left)}); its guard undoes it when its time has come, "
            "pytest chaos --cleanup at once"
        )


def refuse_the_living(hand: Hand, break_lock: bool) -> None:
    """For `--cleanup`: raises Held where undoing would pull the ground from under a run that is alive, or may be and nobody vouched for its death."""
    if found := holder(hand):
        other, seconds = found
        if other.alive or (other.alive is None and not break_lock):
            raise Held(f"{hand.host.name} is held by {in_words(other, seconds)}; nothing was undone")


def drop(hand: Hand, owner: Holder) -> None:
    hand.run(f"lock_drop {owner.word()}")


def holder(hand: Hand) -> tuple[Holder, int] | None:
    """The holder and for how many seconds at most, or None."""
    words = hand.must("lock_holder", "whether another run holds this host cannot be told").split()
    return (parse(words[0]), int(words[1])) if len(words) == 2 else None


def in_words(other: Holder, seconds: int) -> str:
    """A holder that is not known to be dead, and what to do."""
    if other.alive:
        return f"{other} is alive; end it first (Ctrl-C: it undoes what it has done), then --cleanup"
    return f"{other}, which cannot be looked at from here, for another {seconds} s at most; if it is dead: pytest chaos --cleanup --break-lock"
