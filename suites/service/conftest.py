"""The requests an acceptance run makes; each is made once and judged by several checks."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.inventory import Deployment, Proxy
from pdgate.inventory.variables import Load
from pdgate.plugin.run import Run
from pdgate.rules.finding import NotRun
from pdgate.rules.load import must_be_applied
from pdgate.rules.service import recovery_bound
from pdgate.serving.client import Endpoint, post
from pdgate.serving.exchange import Exchange, Settling, decoder_alone, first_request, front_of, observe, wait_for_baseline
from pdgate.serving.golden import GoldenBook, judged_twice, prompt_with_salt, save_golden
from pdgate.serving.load import LoadFailed
from pdgate.serving.load.run import Progress
from pdgate.serving.logs import LogBook
from pdgate.serving.manners import at_once, levels
from pdgate.serving.metrics import Sample
from pdgate.serving.questions import context_length_of, deadline_of, golden_of, model_of
from pdgate.serving.record import Record
from pdgate.serving.steady import Steady, load_plan, run_steady

# Gentle first: single requests, then the load, then many at once, then clients that leave.
ORDER = ("test_first_requests", "test_errors", "test_load", "test_logs", "test_slo", "test_concurrency", "test_cancellation")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.stem in ORDER and item.path.parent.name == "service"]
    for place, item in zip(places, sorted((items[place] for place in places), key=lambda item: ORDER.index(item.path.stem)), strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def model(deployment: Deployment) -> str:
    return model_of(deployment)


@pytest.fixture(scope="session")
def deadline_s(deployment: Deployment) -> float:
    return deadline_of(deployment)


@pytest.fixture(scope="session")
def front(deployment: Deployment) -> Proxy:
    """The proxy requests go through."""
    if not deployment.proxies:
        raise UnknownFact("the inventory has no host in group 'proxy', so nothing can be asked of the deployment as a whole")
    return deployment.proxies[0]


@pytest.fixture(scope="session")
def door(deployment: Deployment, front: Proxy) -> Endpoint:
    """Where the proxy listens."""
    try:
        return front_of(deployment, front)
    except ValueError as error:
        raise UnknownFact(str(error)) from None


@pytest.fixture(scope="session")
def logbook(deployment: Deployment, pdgate_run: Run) -> LogBook:
    """All logs, followed from the first request on."""
    return LogBook(deployment, pdgate_run.shells, pdgate_run.bundle / "logs")


@pytest.fixture(scope="session")
def request_made(deployment: Deployment, front: Proxy, model: str, deadline_s: float, pdgate_run: Run, logbook: LogBook) -> Exchange:
    exchange = first_request(deployment, front, model, deadline_s, pdgate_run.shells)
    pdgate_run.keep(exchange.record)
    return exchange


@pytest.fixture(scope="session")
def bound(deployment: Deployment, pdgate_run: Run) -> tuple[float, str]:
    return recovery_bound(deployment, pdgate_run.facts)


@pytest.fixture(scope="session")
def context_length(deployment: Deployment, model: str) -> int:
    return context_length_of(deployment, model)


@pytest.fixture(scope="session")
def wish(pytestconfig: pytest.Config, deployment: Deployment) -> Load:
    """pd_load, with what the command line says instead."""
    options = {name: pytestconfig.getoption(f"load_{name}") for name in ("rate", "seconds", "seed")}
    asked = {name: value for name, value in options.items() if value is not None}
    if pytestconfig.getoption("gentle"):
        asked |= {"rate": 0.0, "max_concurrency": 0}
    return deployment.front_host.load.model_copy(update=asked)


@pytest.fixture(scope="session")
def longest_prompt(deployment: Deployment, context_length: int) -> int:
    """Tokens of the longest prompt the deployment is said to take."""
    return deployment.front_host.expect.max_prompt_tokens or context_length


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config, deployment: Deployment, model: str, wish: Load, pdgate_run: Run) -> GoldenBook:
    """Golden answers: of --golden=FILE, else learned; kept as golden.json."""
    given = pytestconfig.getoption("golden")
    book = golden_of(deployment, model, wish.output_tokens, Path(given) if given else None)
    save_golden(book, pdgate_run.bundle / "golden.json")
    return book


@pytest.fixture(scope="session")
def steady(
    pytestconfig: pytest.Config, deployment: Deployment, front: Proxy, golden: GoldenBook, wish: Load, deadline_s: float, bound: tuple[float, str],
    logbook: LogBook, pdgate_run: Run,
) -> Steady:  # fmt: skip
    """The load, applied once; what stands on it is invalid where it was not applied as planned."""
    if wish.rate <= 0 or wish.seconds <= 0:
        raise NotRun("no load asked for (--gentle, or rate or seconds of pd_load is 0)")
    workers, remote = pytestconfig.getoption("load_workers"), pytestconfig.getoption("load_remote_workers")
    plan = load_plan(deployment, front, wish, golden, deadline_s)
    try:
        with live(pytestconfig) as progress:
            found = run_steady(
                deployment, plan, golden, logbook, pdgate_run.bundle, bound_s=bound[0], workers=workers, remote_workers=remote,
                master=pytestconfig.getoption("load_master"), progress=progress,
            )  # fmt: skip
    except LoadFailed as error:
        raise UnknownFact(f"the load was not applied: {error}") from None
    must_be_applied(found.load)
    return found


@contextlib.contextmanager
def live(config: pytest.Config):
    """Progress of the load on the terminal: one line that moves, or, where nobody watches, one at the end."""
    capture = config.pluginmanager.getplugin("capturemanager")
    terminal = sys.__stderr__ is not None and sys.__stderr__.isatty() and not hasattr(config, "workerinput")
    last = ""

    def show(played: float, planned: float, outcomes: Counter[str]) -> None:
        nonlocal last
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if outcome)
        last = f"load: {played:.0f} of {planned:.0f} s, {words or 'nothing answered yet'}"
        if terminal:
            with capture.global_and_fixture_disabled():
                print(f"\r\x1b[K{last}", end="", file=sys.__stderr__, flush=True)

    progress: Progress = show
    yield progress
    if terminal:
        with capture.global_and_fixture_disabled():
            print("\r\x1b[K", end="", file=sys.__stderr__, flush=True)


@dataclass
class Sweep:
    """Records by level, and the engines' counters around the top one."""

    levels: dict[int, list[Record]]
    before: dict[str, Sample]
    after: dict[str, Sample]


@pytest.fixture(scope="session")
def sweep(door: Endpoint, deployment: Deployment, golden: GoldenBook, wish: Load, deadline_s: float, pdgate_run: Run) -> Sweep:
    """1, 2, 4 … requests at the same moment up to the declared maximum."""
    if wish.max_concurrency < 1:
        raise NotRun("no concurrency asked for (--gentle, or pd_load.max_concurrency is 0)")
    middle = sorted(golden.answers.values(), key=lambda one: len(one.prompt.text))[len(golden.answers) // 2].prompt
    found: dict[int, list[Record]] = {}
    before: dict[str, Sample] = {}
    for level in levels(wish.max_concurrency):
        before, _ = observe(deployment)
        prompts = [prompt_with_salt(middle, golden.model) for _ in range(level)]
        found[level] = judged_twice(at_once(door, prompts, deadline_s), golden, decoder_alone(deployment), deadline_s)[0]
        for record in found[level]:
            pdgate_run.keep(record)
    time.sleep(0.3)
    after, _ = observe(deployment)
    return Sweep(found, before, after)


@pytest.fixture
def refused(deployment: Deployment, door: Endpoint, model: str, deadline_s: float):
    """Send a raw body and say what came back and what it left on the engines."""

    def send(name: str, body: str, path: str = "/v1/completions", to: Endpoint | None = None) -> tuple[Record, Settling]:
        baseline, _ = observe(deployment)
        record = post(to or door, path, body, name, deadline_s)
        return record, wait_for_baseline(deployment, model, baseline, 2.0)

    return send
