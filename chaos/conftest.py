"""The chaos plugin: double consent, a lock, a budget, `--cleanup`, and the stage experiments stand on."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from chaos.experiment import LOCK_S, Outcome, Stage, aftermath, identify, serves
from chaos.faults.processes import Kill as KillFault
from chaos.guard import GuardFailed, Hand, clean_up
from pdgate.facts.collect import collect
from pdgate.facts.model import UnknownFact
from pdgate.inventory import Deployment, Engine, Host
from pdgate.inventory.variables import Load
from pdgate.plugin.run import RUN_KEY, Run
from pdgate.rules import recovery
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.recovery import Expectation
from pdgate.rules.running import running_engine
from pdgate.rules.service import recovery_bound
from pdgate.serving.golden import save_golden
from pdgate.serving.questions import deadline_of, golden_of, model_of

START_S = 180.0
Kill = Callable[[list[Engine]], None]
Start = Callable[[Host], None]
BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--cleanup` heals and runs nothing."""
    run = config.stash.get(RUN_KEY, None)
    if not config.getoption("cleanup") or run is None:
        return
    items.clear()
    said = []
    for name, host in run.deployment.hosts.items():
        if host.chaos:
            try:
                said += [f"{name}: undone: {line}" for line in clean_up(Hand(host, run.shells))]
            except GuardFailed as error:
                raise pytest.UsageError(f"--cleanup: {error}") from None
    reporter = config.pluginmanager.getplugin("terminalreporter")
    for line in said or ["nothing was left by an earlier chaos run"]:
        reporter.write_line(f"cleanup: {line}")
    pytest.exit("cleaned up; no experiment was run", returncode=0)


@pytest.fixture(scope="session")
def consent(pytestconfig: pytest.Config, deployment: Deployment) -> None:
    """Raises NotRun unless the operator agreed twice."""
    if not pytestconfig.getoption("--chaos"):
        raise NotRun("faults need --chaos")
    silent = [host.name for host in deployment.hosts.values() if not host.chaos]
    if silent:
        raise NotRun(f"faults need pd_chaos: true for {', '.join(silent)}")


@pytest.fixture(scope="session")
def locked(consent: None, deployment: Deployment, pdgate_run: Run) -> Iterator[str]:
    """One chaos run at a time on every host; the owner's name."""
    owner = f"pdgate{uuid.uuid4().hex[:8]}"
    hands = [Hand(hosts[0], pdgate_run.shells) for hosts in deployment.machines.values()]
    taken = []
    try:
        for hand in hands:
            try:
                hand.must(f"lock_take {owner} {LOCK_S}", "the chaos lock could not be taken")
            except GuardFailed as error:
                raise NotRun(str(error)) from None
            taken.append(hand)
        yield owner
    finally:
        for hand in taken:
            hand.run(f"lock_drop {owner}")


@pytest.fixture(scope="session")
def stage(pytestconfig: pytest.Config, locked: str, deployment: Deployment, pdgate_run: Run) -> Stage:
    """Golden answers, load and bounds, once for all experiments."""
    if not deployment.proxies:
        raise UnknownFact("the inventory has no host in group 'proxy', so no load can run through a fault")
    wish = deployment.front_host.load
    asked = {name: value for name in ("rate", "seed") if (value := pytestconfig.getoption(f"load_{name}")) is not None}
    wish = Load.model_validate({**wish.model_dump(), **asked})
    known = pytestconfig.getoption("golden")
    book = golden_of(deployment, model_of(deployment), wish.output_tokens, Path(known) if known else None)
    save_golden(book, pdgate_run.bundle / "golden.json")
    bound = recovery_bound(deployment, pdgate_run.facts)[0]
    return Stage(deployment, pdgate_run.shells, pdgate_run.bundle, deployment.proxies[0], book, wish, deadline_of(deployment), bound, locked, pytestconfig.getoption("allow_outage"))


@pytest.fixture(autouse=True)
def within_budget(request: pytest.FixtureRequest) -> None:
    """No experiment begins after the run's time budget."""
    config = request.config
    spent = time.monotonic() - config.stash[BEGAN]
    if request.node.get_closest_marker("pdgate_check") and spent > config.getoption("chaos_budget"):
        raise NotRun(f"the time budget of {config.getoption('chaos_budget'):g} s is spent (--chaos-budget)")


@pytest.fixture
def judged_by(stage: Stage, judge):
    """Judge an experiment's outcome: behaviour, KV, cascade."""

    def run(outcome: Outcome, expected: Expectation, *more: Iterable[Finding]) -> None:
        judge(itertools.chain(
            recovery.behaved(f"proxy {stage.proxy.name}", outcome.measures, expected, outcome.records, outcome.by_fault()),
            aftermath(stage, outcome),
            *more,
        ))  # fmt: skip

    return run


@pytest.fixture
def prefills(deployment: Deployment) -> list[Engine]:
    found = [engine for engine in deployment.engines if engine.serves_prefill]
    if not found:
        raise NotRun("the inventory has no prefill engine")
    return found


@pytest.fixture
def decoders(deployment: Deployment) -> list[Engine]:
    found = [engine for engine in deployment.engines if engine.serves_decode]
    if not found:
        raise NotRun("the inventory has no decode engine")
    return found


# -- killing and starting whole hosts, for the experiments that lose P --------------------------------------------------------


@pytest.fixture
def kill(locked: str, deployment: Deployment, pdgate_run: Run) -> Kill:
    """SIGKILL every process of some engines, each checked to be the one that was meant, and prove that they are gone."""

    def kill_engines(engines: list[Engine]) -> None:
        facts, _ = collect(deployment, pdgate_run.shells, quick=True)
        for engine in engines:
            running = running_engine(engine, facts[deployment.host_of(engine).machine])
            if running is None:
                raise UnknownFact(f"{engine.name} is not running, so it cannot be killed")
            hand = Hand(deployment.host_of(engine), pdgate_run.shells)
            fault = KillFault(engine.name, engine.host, "engine", identify(hand, running, "engine"), engine.restart or "true", engine.http_port)
            try:
                hand.must(fault.inject(), f"{engine.name} could not be killed")
                hand.must(fault.verify_applied(), f"{engine.name} is not gone")
            except GuardFailed as error:
                raise UnknownFact(f"the fault was not applied: {error}") from None

    return kill_engines


@pytest.fixture
def start(locked: str, deployment: Deployment, pdgate_run: Run) -> Start:
    """Start all engines of a host again (pd_restart, else its launch script) and wait until they serve."""

    def start_engines(host: Host) -> None:
        waiting = [engine for engine in deployment.engines if engine.host == host.name]
        commands = list(dict.fromkeys(engine.restart or f"bash {host.launch}" for engine in waiting))
        script = "\n".join(f"setsid sh -c {command!r} >/dev/null 2>&1 </dev/null &" for command in commands)
        Hand(host, pdgate_run.shells).run(script)
        deadline = time.monotonic() + START_S
        while waiting and time.monotonic() < deadline:
            waiting = [engine for engine in waiting if not serves(deployment, engine)]
            time.sleep(0.5)
        if waiting:
            raise UnknownFact(f"{waiting[0].name} did not come back within {START_S:g} s after it was started again")

    return start_engines
