"""Kill and stall: a worker, the engine core, the API server, a whole engine, or the proxy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from chaos.aim import Aim
from chaos.faults.base import Plan, Victim, quiet_port
from pdgate.facts.model import HostFacts

GOES_DOWN_S = 10
STRANGER = "echo 'a process is not the one that was meant any more: nothing was signalled'; exit 1"


def _meant(victims: tuple[Victim, ...]) -> str:
    """sh: each is the very process that was meant: pid, start time, command line."""
    checks = " && ".join(f"same {v.pid} {v.ticks} && [ \"$(command_of {v.pid})\" = {v.command} ]" for v in victims)
    return f"{{ {checks}; }} || {{ {STRANGER}; }}\n"


def _shot(victims: tuple[Victim, ...], signal: str) -> str:
    """sh: signal them all in one call, after a last look at pid and start time that starts no process (so nothing delays it)."""
    still = " && ".join(f"same {v.pid} {v.ticks}" for v in victims)
    # Some may end on their own once the first is gone; the next verb proves the effect.
    return f"{{ {still}; }} || {{ {STRANGER}; }}\nkill -{signal} {' '.join(str(victim.pid) for victim in victims)} 2>/dev/null; moment"


def _each(signal: str, victims: tuple[Victim, ...]) -> str:
    """sh for the undo: signal those that are still the processes that were meant."""
    return " ".join(["signal_if_same", signal, *(f"{v.pid} {v.ticks} {v.command}" for v in victims)]) if victims else ""


def _aimed(aim: Aim | None, shot: str) -> str:
    """sh: the shot, at once or when the aim sees its moment."""
    return f"{aim.script()}[ -z \"$hit\" ] || {{ {shot}\n}}\n{aim.epilogue()}" if aim else shot


def _gone(victims: tuple[Victim, ...]) -> str:
    tests = " || ".join(f"same {victim.pid} {victim.ticks}" for victim in victims)
    return f"n=0; while {tests}; do n=$((n + 1)); [ $n -lt 100 ] || {{ echo 'still there after 10 s'; exit 1; }}; sleep 0.1; done"


def _state(victims: tuple[Victim, ...], stopped: bool) -> str:
    want = "T" if stopped else "[RSDI]"
    lines = []
    for victim in victims:
        lines.append(
            f"st=$(cat /proc/{victim.pid}/stat 2>/dev/null); st=${{st##*) }}; case $st in {want}*) echo 'pid {victim.pid} {shlex.quote(victim.comm)}: '${{st%% *}};; "
            f"*) echo 'pid {victim.pid} is not {'stopped' if stopped else 'running'}: '${{st%% *}}; exit 1;; esac"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Kill:
    """SIGKILL. Undone by starting what was killed again: `restart` is the operator's command (pd_restart), run on the host."""

    target: str
    host: str
    part: str
    victims: tuple[Victim, ...]
    restart: str
    port: int | None  # the HTTP port that tells whether it serves again
    aim: Aim | None = None
    rest: tuple[Victim, ...] = ()  # what of the engine is not killed, and may be left when it is to start again

    @property
    def name(self) -> str:
        return f"kill-{self.part}"

    def available(self, facts: HostFacts) -> str | None:
        if not self.victims:
            return f"{self.target} has no running {self.part}"
        if not self.restart:
            return f"nothing would start {self.target} again: no {'pd_proxy_restart' if self.part == 'proxy' else 'pd_restart'} in the inventory"
        return None

    def plan(self) -> Plan:
        # An engine that lost a part goes down by itself, in a while; one that stays up is left alone. Without its API server it serves
        # nobody, though what was forked from it may hold its port on (vLLM forks the engine core after it has bound).
        down = free = quiet_port(self.port) if self.port is not None else "true"
        if self.part == "api":
            down, free = " && ".join(f"! same {victim.pid} {victim.ticks}" for victim in self.rest), "true"
        wait = f"n=0; until {down}; do n=$((n + 1)); [ $n -lt {GOES_DOWN_S * 10} ] || break; sleep 0.1; done" if self.rest else ":"
        # What is left of it goes before it is started again: an orphaned worker would hold the ports of the new one.
        left, rest = (_each("KILL", some) for some in (self.victims, self.rest))
        failed = f"{{ echo 'what starts {self.target} again ended with code '$?': run it by hand, and see why'; exit 1; }}"
        undo = f"{left}\n{wait}\nif {free}; then\n{rest or ':'}\n{{ {self.restart}\n}} </dev/null >/dev/null 2>&1 || {failed}\nelse echo 'somebody listens on its port {self.port}: {self.target} was not started again'; fi"
        names = ", ".join(f"{v.pid} ({v.comm})" for v in self.victims)
        return Plan(f"SIGKILL {self.part} of {self.target}: pid {names}", "processes of one unit", undo, engines=() if self.part == "proxy" else (self.target,))

    def inject(self) -> str:
        return _meant(self.victims) + _aimed(self.aim, _shot(self.victims, "KILL"))

    def verify_applied(self) -> str:
        return _gone(self.victims) + f"\necho 'gone: {', '.join(str(v.pid) for v in self.victims)}'"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        # Whether it serves again is measured from outside, with tokens; here only that the restart was begun.
        return "true"


@dataclass(frozen=True)
class Stall:
    """SIGSTOP: the process is there, its ports accept, and nothing moves. Undone by SIGCONT."""

    target: str
    host: str
    part: str
    victims: tuple[Victim, ...]
    aim: Aim | None = None

    @property
    def name(self) -> str:
        return f"stall-{self.part}"

    def available(self, facts: HostFacts) -> str | None:
        return None if self.victims else f"{self.target} has no running {self.part}"

    def plan(self) -> Plan:
        undo = f"{_each('CONT', self.victims)}\ntrue"
        return Plan(f"SIGSTOP {self.part} of {self.target}", "processes of one engine; the kernel still accepts for them", undo, engines=(self.target,))

    def inject(self) -> str:
        return _meant(self.victims) + _aimed(self.aim, _shot(self.victims, "STOP"))

    def verify_applied(self) -> str:
        # A process in the middle of something stops when it is scheduled next.
        state = _state(self.victims, stopped=True)
        return f"n=0; until (\n{state}\n) >/dev/null || [ $n -ge 40 ]; do n=$((n + 1)); sleep 0.05; done\n{state}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        # A process that has died meanwhile is not stopped either.
        tests = "\n".join(
            f"if same {v.pid} {v.ticks}; then st=$(cat /proc/{v.pid}/stat); st=${{st##*) }}; case $st in T*) echo 'pid {v.pid} is still stopped'; exit 1;; esac; fi"
            for v in self.victims
        )
        return f"sleep 0.05\n{tests}"
