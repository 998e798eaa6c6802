"""Starting Locust for a plan, watching it, and reading back what it recorded."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdgate.serving.load.plan import LoadPlan
from pdgate.serving.record import Record

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
START_UP_S = 60.0
WAIT_REMOTE_S = 300.0
PROGRESS_S = 1.0
STOP = "stop"
Progress = Callable[[float, float, "Counter[str]"], None]  # seconds played, seconds planned, outcomes so far


class LoadFailed(Exception):
    """The load could not be applied as planned; the message says what Locust said."""


@dataclass
class LoadResult:
    """What a load left. Times are in the controller's clock, give or take `clock_radius_s` for workers elsewhere."""

    plan: LoadPlan
    records: list[Record]
    start: float
    unsent: int = 0
    workers: int = 1
    clock_radius_s: float = 0.0

    def counts(self) -> Counter[str]:
        return Counter(record.outcome for record in self.records)


def run_load(
    plan: LoadPlan, folder: Path, *, workers: int = 0, remote_workers: int = 0, master: str = "127.0.0.1:0",
    progress: Progress | None = None,
) -> LoadResult:  # fmt: skip
    """Play the plan; `workers` processes here (0: one process, no master) and `remote_workers` that others start.

    Leaves plan.json, records.jsonl and locust.log in `folder`; a file `stop` there ends a load without workers before its
    time (`end_early`). Raises LoadFailed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOP).unlink(missing_ok=True)
    records = folder / "records.jsonl"
    records.unlink(missing_ok=True)
    (folder / "plan.json").write_text(plan.model_dump_json(indent=1))
    users = max(1, workers + remote_workers)
    argv = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "-u", str(users), "-r", str(users),
            "--exit-code-on-error", "0", "--loglevel", "WARNING", "--stop-timeout", "1", "--host", plan.url]  # fmt: skip
    if workers + remote_workers:
        host, _, port = master.partition(":")
        argv += ["--master", "--master-bind-host", host, "--master-bind-port", port if port != "0" else str(_free_port()),
                 "--expect-workers", str(users)]  # fmt: skip
    environment = {
        **os.environ, "PDGATE_LOAD_PLAN": str(folder / "plan.json"), "PDGATE_LOAD_RECORDS": str(records), "PDGATE_LOAD_WORKERS": str(users),
        "PDGATE_LOAD_STOP": str(folder / STOP),
    }  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "locust.log").open("wb") as log:
        try:
            main = _spawn(argv, environment, log)
            started.append(main)
            if workers:
                place = argv[argv.index("--master-bind-port") + 1]
                connect = "127.0.0.1" if host in ("0.0.0.0", "") else host
                started += [_spawn(worker_argv(f"{connect}:{place}"), environment, log) for _ in range(workers)]
            within = plan.seconds + plan.deadline_s + 15 + (WAIT_REMOTE_S if remote_workers else START_UP_S)
            _watch(main, started[1:], records, plan, within, progress)
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"the load did not end within {within:g} s; {_tail(folder)}") from None
        finally:
            for process in started:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if main.returncode != 0:
        raise LoadFailed(f"locust ended with code {main.returncode}; {_tail(folder)}")
    return read_result(plan, folder)


def end_early(folder: Path) -> None:
    """Send nothing more of the load that plays in `folder`; what is on its way is waited for."""
    (folder / STOP).touch()


def worker_argv(master: str) -> list[str]:
    """The command of one worker, here or on another machine that has pdgate; `master` is host:port."""
    host, _, port = master.partition(":")
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--master-host", host, "--master-port", port or "5557",
            "--loglevel", "WARNING"]  # fmt: skip


def _spawn(argv: list[str], environment: dict[str, str], log: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_us)  # type: ignore[call-overload,no-any-return]


def _die_with_us() -> None:
    """Nobody must go on sending when pdgate itself was killed (Linux; elsewhere the plan's own end ends it)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(
    main: subprocess.Popen[bytes], workers: list[subprocess.Popen[bytes]], records: Path, plan: LoadPlan, within: float,
    progress: Progress | None,
) -> None:  # fmt: skip
    deadline = time.monotonic() + within
    began, read, outcomes = None, 0, Counter[str]()
    while main.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(main.args, within)
        dead = [worker.returncode for worker in workers if worker.poll()]  # 0: the master sent it home
        if dead:
            raise LoadFailed(f"a load worker ended with code {dead[0]}; {_tail(records.parent)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            main.wait(0.1 if began is None else min(PROGRESS_S, 0.25))
        if records.exists():
            began = began or time.monotonic()
            with records.open() as lines:
                lines.seek(read)
                for line in lines.readlines():
                    if line.endswith("\n"):
                        read += len(line.encode())
                        outcomes[json.loads(line).get("outcome", "")] += 1
        if progress and began is not None:
            progress(min(plan.seconds, time.monotonic() - began), plan.seconds, outcomes)


def read_result(plan: LoadPlan, folder: Path) -> LoadResult:
    """What a load left in `folder`; raises LoadFailed where it did not even start."""
    path = folder / "records.jsonl"
    if not path.exists():
        raise LoadFailed(f"no load was applied; {_tail(folder)}")
    result = LoadResult(plan, [], 0.0)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "outcome" in entry:
            result.records.append(Record.model_validate(entry))
        elif "start" in entry:
            result.start, result.workers, result.clock_radius_s = entry["start"], entry["workers"], entry["clock_radius_s"]
        else:
            result.unsent += entry["unsent"]
    result.records.sort(key=lambda record: record.scheduled)
    return result


def _tail(folder: Path) -> str:
    log = folder / "locust.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f"{log} ends: {' | '.join(said[-4:])}" if said else f"{log} is empty"
