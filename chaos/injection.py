"""One injection, in this order: persist the undo, arm the timer, verify it, inject, verify the effect, … heal, verify, disarm."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chaos.faults.base import Fault, Plan
from chaos.guard import Guard, GuardFailed, Hand, connections_cut, spoken, timed, when
from pdgate.facts.shell import ShellResult
from pdgate.serving.record import now

STEPS = ("persist", "arm", "verify-armed", "inject", "verify-applied", "observe", "heal", "verify-healed", "disarm")
OnStep = Callable[[str], None]


class NotApplied(Exception):
    """The fault had no effect, so nothing can be concluded; the message says what the host said."""


@dataclass
class Applied:
    """What happened, with the controller's times. `injected` and `healed` are intervals that hold the moment for certain."""

    fault: str
    plan: Plan
    evidence: str = ""
    idle: str = ""  # why it is said that nobody came its way
    injected: tuple[float, float] = (0.0, 0.0)
    healed: tuple[float, float] = (0.0, 0.0)
    renewed: int = 0  # connections that stood and were reset when it came, before it hurt
    cut: int = 0  # connections that stood when it was undone and ended with it
    guard_s: float = 0.0  # from arming on, after which the guard undoes it by itself
    over: bool = False  # undone, verified, and its guard disarmed
    steps: list[tuple[float, str]] = field(default_factory=list)


@contextlib.contextmanager
def injected(
    fault: Fault, hand: Hand, tag: str, owner: str, guard_s: float, on_step: OnStep = lambda step: None, book: list[Applied] | None = None
) -> Iterator[Applied]:  # fmt: skip
    """The fault is there within the block and gone after it; raises NotApplied (also where it did not last) or GuardFailed.

    Whatever ends the block, it is healed; whatever ends *us*, the guard heals it `guard_s` after it was armed. `book`: where it is
    written down before anything is touched.
    """
    plan = fault.plan()
    guard = Guard(hand, tag, owner, plan.undo, plan.survives_reboot)
    applied = Applied(fault.name, plan, guard_s=guard_s)
    if book is not None:
        book.append(applied)

    def step(name: str) -> None:
        applied.steps.append((now(), name))
        on_step(name)

    step("persist")
    guard.persist()
    try:
        step("arm")
        guard.arm(guard_s)
        step("verify-armed")
        guard.verify_armed()
        step("inject")
        result, applied.injected = _timed(hand, fault.inject())
        applied.renewed = connections_cut(result.stdout)
        if result.code != 0:
            raise NotApplied(f"{fault.name} on {fault.host}: {(spoken(result.stdout) + result.stderr).strip()[-400:] or f'code {result.code}'}")
        step("verify-applied")
        seen = hand.run(fault.verify_applied(), 60.0)
        if seen.code != 0:
            raise NotApplied(f"{fault.name} on {fault.host} shows no effect: {(seen.stdout + seen.stderr).strip()[-400:]}")
        applied.evidence = seen.stdout.strip()
        step("observe")
        yield applied
        met = getattr(fault, "met", None)  # whether anybody came that way at all
        if met is not None:
            seen = hand.run(met(), 60.0)
            said = (seen.stdout + seen.stderr).strip()[-400:]
            applied.evidence += f"; {said}"
            applied.idle = f"{fault.name} on {fault.host} met nobody: {said}" if seen.code != 0 else ""
    finally:
        with _undisturbed():
            step("heal")
            relieve = getattr(fault, "relieve", None)  # ends the effect at once where the whole undo takes longer
            if relieve is not None:
                _, applied.healed = _timed(hand, relieve())
            undone = guard.fire()
            applied.cut = undone.cut
            applied.evidence += f"; undone: {undone.said}" if undone.said else ""
            if relieve is None:
                applied.healed = undone.at
            step("verify-healed")
            _verify_healed(fault, hand)
            step("disarm")
            guard.disarm()
            applied.over = True
    if not undone.by_us:
        raise NotApplied(
            f"{fault.name} on {fault.host} was undone by somebody else before its time (--cleanup, a reboot, or its own guard after {guard_s:g} s): "
            "what was seen since is not its doing"
        )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not stop the undo of the first; every call in it has its deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _timed(hand: Hand, script: str) -> tuple[ShellResult, tuple[float, float]]:
    """Run a script; the interval of the controller's clock that holds its moment."""
    before = now()
    result = hand.run(timed(script), 60.0)
    return result, when(before, result.stdout, now())


def _verify_healed(fault: Fault, hand: Hand) -> None:
    """A heal that did not take is tried once more before anybody is told."""
    for last in (False, True):
        result = hand.run(fault.verify_healed(), 60.0)
        if result.code == 0:
            return
        if last:
            raise GuardFailed(
                f"{fault.name} on {fault.host} is not healed: {(result.stdout + result.stderr).strip()[-400:]}; its guard stays armed; "
                "pytest chaos --cleanup tries again"
            )
        time.sleep(0.5)
        hand.run(fault.heal(), 60.0)
