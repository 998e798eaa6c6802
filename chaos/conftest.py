"""Faults need a double consent, and, until the guard that outlives us exists, an embedded deployment."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import pytest

from lab.plugin import LAB_KEY
from pdgate.facts.collect import collect
from pdgate.facts.model import UnknownFact
from pdgate.inventory import Deployment, Engine, Host
from pdgate.plugin.run import Run
from pdgate.rules.finding import NotRun
from pdgate.rules.running import running_engine
from pdgate.serving.client import Endpoint
from pdgate.serving.exchange import endpoint_of, served_models

START_S = 120.0
Kill = Callable[[list[Engine]], None]
Start = Callable[[Host], None]


@pytest.fixture(scope="session")
def consent(pytestconfig: pytest.Config, deployment: Deployment) -> None:
    """Raises NotRun unless the operator agreed twice, on a deployment whose loss costs nothing."""
    if not pytestconfig.getoption("--chaos"):
        raise NotRun("faults need --chaos")
    silent = [host.name for host in deployment.hosts.values() if not host.chaos]
    if silent:
        raise NotRun(f"faults need pd_chaos: true for {', '.join(silent)}")
    if pytestconfig.stash.get(LAB_KEY, None) is None:
        raise NotRun("this release injects faults into embedded deployments only (--hosts=lab, --hosts=real …)")


@pytest.fixture
def kill(consent: None, deployment: Deployment, pdgate_run: Run) -> Kill:
    """SIGKILL every process of some engines, each checked to be the one the probe saw, and prove that they are gone."""

    def kill_engines(engines: list[Engine]) -> None:
        facts, _ = collect(deployment, pdgate_run.shells)
        victims: dict[str, list[str]] = {}
        for engine in engines:
            host = deployment.host_of(engine)
            running = running_engine(engine, facts[host.machine])
            if running is None:
                raise UnknownFact(f"{engine.name} is not running, so it cannot be killed")
            for pid in sorted(running.pids):
                process = running.facts.process(pid)
                assert process is not None
                # Signalled only if the pid still is that program.
                victims.setdefault(host.name, []).append(
                    f'read -r comm < /proc/{pid}/comm && [ "$comm" = {shlex.quote(process.comm)} ] && kill -9 {pid}'
                )
        for name, lines in victims.items():
            pdgate_run.shells.run(deployment.hosts[name].connection, "\n".join(lines))
        _wait_gone(deployment, pdgate_run, engines)

    return kill_engines


def _wait_gone(deployment: Deployment, run: Run, engines: list[Engine]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        facts, _ = collect(deployment, run.shells)
        try:
            if all(running_engine(engine, facts[deployment.host_of(engine).machine]) is None for engine in engines):
                return
        except UnknownFact:
            continue  # caught while dying: a socket whose owner is on its way out
    raise UnknownFact("the kill had no effect within 10 s: the fault was not applied")


@pytest.fixture
def start(consent: None, deployment: Deployment, pdgate_run: Run) -> Start:
    """Run a host's launch script again and wait until all its engines serve."""

    def start_engines(host: Host) -> None:
        assert host.launch is not None
        script = f"nohup setsid bash {shlex.quote(host.launch)} >/dev/null 2>&1 </dev/null &"
        pdgate_run.shells.run(host.connection, script)
        waiting = [engine for engine in deployment.engines if engine.host == host.name]
        deadline = time.monotonic() + START_S
        while waiting and time.monotonic() < deadline:
            waiting = [engine for engine in waiting if not _serves(endpoint_of(deployment, engine))]
            time.sleep(0.5)
        if waiting:
            raise UnknownFact(f"{waiting[0].name} did not come back within {START_S:g} s after its launch script was run")

    return start_engines


def _serves(endpoint: Endpoint | None) -> bool:
    if endpoint is None:
        raise UnknownFact("the inventory gives no address for an engine's HTTP, so its return cannot be seen")
    try:
        return bool(served_models(endpoint))
    except ValueError:
        return False
