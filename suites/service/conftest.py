"""The requests an acceptance run makes; each is made once and judged by several checks."""

from __future__ import annotations

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.inventory import Deployment, Proxy
from pdgate.plugin.run import Run
from pdgate.rules.service import recovery_bound
from pdgate.serving.exchange import (
    Exchange,
    Settling,
    bad_request,
    cancelled_request,
    endpoint_of,
    first_request,
    observe,
    served_models,
    wait_for_baseline,
)  # fmt: skip
from pdgate.serving.record import Record


@pytest.fixture(scope="session")
def model(deployment: Deployment) -> str:
    """The model name requests ask for: the declared one, else what the first answering engine serves."""
    for engine in deployment.engines:
        if engine.model:
            return engine.model
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        try:
            names = served_models(endpoint) if endpoint else {}
        except ValueError:
            continue
        if names:
            return next(iter(names))
    raise UnknownFact("no pd_model in the inventory and no engine answers /v1/models")


@pytest.fixture(scope="session")
def deadline_s(deployment: Deployment) -> float:
    return max(deployment.host_of(engine).expect.request_deadline_s for engine in deployment.engines)


@pytest.fixture(scope="session")
def front(deployment: Deployment) -> Proxy:
    """The proxy requests go through."""
    if not deployment.proxies:
        raise UnknownFact("the inventory has no host in group 'proxy', so nothing can be asked of the deployment as a whole")
    return deployment.proxies[0]


@pytest.fixture(scope="session")
def request_made(deployment: Deployment, front: Proxy, model: str, deadline_s: float, pdgate_run: Run) -> Exchange:
    return first_request(deployment, front, model, deadline_s, pdgate_run.shells)


@pytest.fixture(scope="session")
def bound(deployment: Deployment, pdgate_run: Run) -> tuple[float, str]:
    return recovery_bound(deployment, pdgate_run.facts)


@pytest.fixture(scope="session")
def cancelled(deployment: Deployment, front: Proxy, model: str, deadline_s: float, bound: tuple[float, str]) -> tuple[Record, Settling]:
    return cancelled_request(deployment, front, model, deadline_s, bound[0])


@pytest.fixture
def refused(deployment: Deployment, front: Proxy, model: str, deadline_s: float):
    """Send a raw body and say what came back and what it left on the engines."""

    def send(name: str, body: str) -> tuple[Record, Settling]:
        baseline, _ = observe(deployment)
        record = bad_request(deployment, front, body, name, deadline_s)
        return record, wait_for_baseline(deployment, model, baseline, 2.0)

    return send
