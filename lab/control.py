"""Starting, finding and leaving a lab, from pytest and from the command line."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lab.requirements import missing
from pdgate.process import start_ticks

ROOT = Path(__file__).resolve().parent.parent
CLONE_NEWNET = 0x40000000


class LabUnavailable(Exception):
    """The lab cannot be started here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Lab:
    """A running lab, known by its keeper process."""

    pid: int
    started: str  # start time in ticks, so that a reused pid is not taken for it
    inventory: str
    hosts: list[str]
    defects: list[str]
    seconds: float

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.started

    def join(self) -> None:
        """Move this process (and what it starts from now on) into the lab's network."""
        with Path(f"/proc/{self.pid}/ns/net").open("rb") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
                raise LabUnavailable(f"cannot enter the lab's network: {os.strerror(ctypes.get_errno())}")

    @property
    def joining(self) -> str:
        """Python source that moves a process into the lab's network, and has the lab at hand as `lab`."""
        return f"from lab.control import Lab; lab = Lab(**{asdict(self)!r}); lab.join()"

    def upper(self, host: str) -> Path:
        """Where everything the host has written lies: the upper layer of its root."""
        return Path(f"/proc/{self.pid}/root/run/pdlab/hosts/{host}/upper")

    def stop(self) -> None:
        if not self.alive:
            return
        os.kill(self.pid, signal.SIGKILL)  # its hosts die with it, by the kernel's hand
        deadline = time.monotonic() + 10
        while self.alive and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.02)


def embedded() -> dict[str, str]:
    """Names `--hosts` starts a lab for, with the planner of each: entry points of the group `pdgate.labs`."""
    return {entry.name: entry.value for entry in entry_points(group="pdgate.labs")}


def inventory_of(name: str) -> Path:
    return ROOT / "inventories" / f"{name}.yaml"


def start(name: str, defects: list[str], phase: str = "after", keep: bool = False, settings: dict[str, Any] | None = None) -> Lab:
    """Boot a lab and wait until it is up; raises LabUnavailable."""
    lacking = missing()
    if lacking:
        raise LabUnavailable("the embedded lab cannot be started here; missing:\n  " + "\n  ".join(lacking))
    keeper = subprocess.Popen(
        [sys.executable, "-m", "lab.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    assert keeper.stdin and keeper.stdout and keeper.stderr
    orders = {"inventory": str(inventory_of(name)), "planner": embedded()[name], "defects": defects, "phase": phase, "keep": keep, "parent": os.getpid(),
              "settings": settings or {}}  # fmt: skip
    keeper.stdin.write(json.dumps(orders) + "\n")
    keeper.stdin.close()
    try:
        line = keeper.stdout.readline()
    except BaseException:  # Ctrl-C: nobody would know of a lab that comes up later
        keeper.terminate()
        keeper.wait()
        raise
    if not line:
        keeper.wait()
        raise LabUnavailable(f"the lab's keeper died: {keeper.stderr.read().strip()[-500:]}")
    answer = json.loads(line)
    if "error" in answer:
        keeper.wait()
        raise LabUnavailable(answer["error"])
    return Lab(answer["pid"], start_ticks(answer["pid"]), answer["inventory"], answer["hosts"], answer["defects"], answer["seconds"])


def _state(name: str) -> Path:
    return ROOT / ".cache" / f"lab-{name}.json"


def kept(name: str) -> Lab | None:
    """The lab `pdgate lab up NAME` has left running, or None."""
    if not _state(name).exists():
        return None
    lab = Lab(**json.loads(_state(name).read_text()))
    return lab if lab.alive else None


def remember(name: str, lab: Lab) -> None:
    _state(name).parent.mkdir(exist_ok=True)
    _state(name).write_text(json.dumps(asdict(lab)))


def forget(name: str) -> None:
    _state(name).unlink(missing_ok=True)
