"""The chaos plugin: double consent, a lock, a budget, `--cleanup`, and the stage experiments stand on."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from chaos import lock
from chaos.blast import refusal
from chaos.experiment import Outcome, Stage, aftermath, comes_back, identify, serving
from chaos.faults.processes import Kill
from chaos.guard import GuardFailed, Hand, clean_up
from chaos.injection import Applied, NotApplied, injected
from pdgate.facts.collect import collect
from pdgate.facts.model import UnknownFact
from pdgate.inventory import Deployment, Engine
from pdgate.inventory.variables import Load
from pdgate.plugin.run import RUN_KEY, Run
from pdgate.rules import recovery
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.logs import freed_before
from pdgate.rules.recovery import Expectation
from pdgate.rules.running import running_engine
from pdgate.rules.service import recovery_bound
from pdgate.serving.golden import save_golden
from pdgate.serving.questions import deadline_of, golden_of, model_of

START_S = 180.0
LOST_S = 300.0  # the longest a request may take, and more
LEFT_TO_GUARD = "left to its guard, which undoes it in its time; pytest chaos --cleanup does so at once"
Outage = Callable[[list[Engine]], contextlib.AbstractContextManager[None]]
BEGAN = pytest.StashKey[float]()
APPLIED = pytest.StashKey[list[Applied]]()  # every fault of the run, in turn


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()
    config.stash[APPLIED] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--cleanup` heals and runs nothing."""
    run = config.stash.get(RUN_KEY, None)
    if not config.getoption("cleanup") or run is None or config.option.collectonly:
        return
    items.clear()
    said = []
    hands = [Hand(host, run.shells) for host in run.deployment.hosts.values()]  # also where consent was taken back meanwhile
    try:
        for hand in hands:
            lock.refuse_the_living(hand, config.getoption("break_lock"))
        for hand in hands:
            said += [f"{hand.host.name}: undone: {line}" for line in clean_up(hand)]
    except (lock.Held, GuardFailed) as error:
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
def locked(consent: None, deployment: Deployment, pdgate_run: Run) -> Iterator[lock.Holder]:
    """One chaos run at a time on every host; the owner."""
    owner = lock.this_run(f"pdgate{uuid.uuid4().hex[:8]}")
    hands = [Hand(hosts[0], pdgate_run.shells) for hosts in deployment.machines.values()]
    taken = []
    try:
        for hand in hands:
            try:
                lock.take(hand, owner)
                taken.append(hand)
                lock.refuse_leftovers(hand, owner.run)
            except (lock.Held, GuardFailed) as error:
                raise NotRun(str(error)) from None
        yield owner
    finally:
        for hand in taken:
            lock.drop(hand, owner)


@pytest.fixture(scope="session")
def stage(pytestconfig: pytest.Config, locked: lock.Holder, deployment: Deployment, pdgate_run: Run) -> Stage:
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
    return Stage(deployment, pdgate_run.shells, pdgate_run.bundle, deployment.proxies[0], book, wish, deadline_of(deployment), bound, locked, pytestconfig.getoption("allow_outage"), pytestconfig.stash[APPLIED])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """Ctrl-C in an experiment: what was done and undone is on record, and the run ends there."""
    done = pyfuncitem.config.stash[APPLIED]
    before = len(done)
    try:
        return (yield)
    except (KeyboardInterrupt, UnknownFact) as error:
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        pyfuncitem.session.shouldstop = "interrupted in an experiment"
        undone = "; ".join(f"{one.plan.does}: {'undone, and that was verified' if one.over else LEFT_TO_GUARD}" for one in done[before:]) or "nothing had been done yet"
        raise UnknownFact(f"interrupted: {undone}" if isinstance(error, KeyboardInterrupt) else f"interrupted: {error}") from None


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
            recovery.behaved(f"proxy {stage.proxy.name}", outcome.measures, expected, outcome.records, outcome.by_fault(), "; ".join(one.plan.does for one in outcome.applied),
                             freed_before(stage.deployment, outcome.records, outcome.logs), outcome.parted),
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


# -- all engines of a host at once, without a load -----------------------------------------------------------------------------


@pytest.fixture
def outage(pytestconfig: pytest.Config, locked: lock.Holder, deployment: Deployment, pdgate_run: Run) -> Outage:
    """SIGKILL every process of some engines of one host, a guard each; when the block ends they are started again, and serve."""
    tags = (f"{locked.run}-lost{number}" for number in itertools.count())

    @contextlib.contextmanager
    def without(engines: list[Engine]) -> Iterator[None]:
        hand = Hand(deployment.host_of(engines[0]), pdgate_run.shells)
        facts = collect(deployment, pdgate_run.shells, quick=True)[0][hand.host.machine]
        faults = []
        for engine in engines:
            running = running_engine(engine, facts)
            if running is None:
                raise UnknownFact(f"{engine.name} is not running, so it cannot be killed")
            faults.append(Kill(engine.name, engine.host, "engine", identify(hand, running, "engine"), engine.restart or "", engine.http_port))
        names = [engine.name for engine in engines]
        why_not = next(filter(None, (fault.available(facts) for fault in faults)), None) or refusal(
            deployment, hand.host.name, names, serving(deployment), pytestconfig.getoption("allow_outage")
        )
        if why_not:
            raise NotRun(why_not)
        try:
            with contextlib.ExitStack() as stack:
                for fault, tag in zip(faults, tags, strict=False):
                    stack.enter_context(injected(fault, hand, tag, f"{locked}: {fault.plan().does}", LOST_S, book=pytestconfig.stash[APPLIED]))
                yield
        except (NotApplied, GuardFailed) as error:
            raise UnknownFact(str(error)) from None
        deadline = time.monotonic() + START_S
        for name in names:
            if comes_back(deployment, name, deadline - time.monotonic()) is None:
                raise UnknownFact(f"{name} did not come back within {START_S:g} s after it was started again")

    return without
