"""Fixtures of the suites: what is declared, what was seen, and the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Engine, Host, Proxy
from pdgate.plugin.check import info_of, target_of
from pdgate.plugin.run import RUN_KEY, Run
from pdgate.rules.finding import Finding, NotRun
from pdgate.verdict import CheckResult, finding_text
from pdgate.verdict import judge as verdict_of

RESULT_KEY = pytest.StashKey[CheckResult]()
Judge = Callable[[Iterable[Finding]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = metafunc.config.stash.get(RUN_KEY, None)
    if not any(mark.name == "pdgate_check" for mark in metafunc.definition.iter_markers()):
        return
    deployment = run.deployment if run else None
    units: dict[str, list[Engine] | list[Host] | list[Proxy]] = {
        "engine": deployment.engines if deployment else [],
        # One per machine: two inventory names of one machine share their clock, links and leftovers.
        "pd_host": [hosts[0] for hosts in deployment.machines.values()] if deployment else [],
        "proxy": deployment.proxies if deployment else [],
    }
    for name, values in units.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=[value.name for value in values])


@pytest.fixture(scope="session")
def pdgate_run(pytestconfig: pytest.Config) -> Run:
    run = pytestconfig.stash.get(RUN_KEY, None)
    if run is None:
        pytest.skip("no --hosts given: pytest --hosts=INVENTORY, or --hosts=lab for the embedded one")
    return run


@pytest.fixture(scope="session")
def deployment(pdgate_run: Run) -> Deployment:
    """The deployment as the inventory declares it."""
    return pdgate_run.deployment


@pytest.fixture(scope="session")
def all_facts(pdgate_run: Run) -> dict[str, HostFacts]:
    """Facts of every machine, by machine name."""
    return pdgate_run.facts


@pytest.fixture
def facts(request: pytest.FixtureRequest, deployment: Deployment, all_facts: dict[str, HostFacts]) -> HostFacts:
    """Facts of the machine the check's engine, host or proxy lives on."""
    params = request.node.callspec.params
    unit = params.get("engine") or params.get("proxy")
    host = params.get("pd_host") or deployment.host_of(unit)
    return all_facts[host.machine]


@pytest.fixture
def judge(request: pytest.FixtureRequest, pdgate_run: Run) -> Judge:
    """Judge the findings of a rule: pass in silence, or end the test with the verdict and its evidence."""
    item = request.node
    info = info_of(item)
    assert info is not None, "the judge fixture belongs to tests marked with @check"

    def judge_findings(findings: Iterable[Finding]) -> None:
        found: list[Finding] = []
        unknown: str | None = None
        try:
            for finding in findings:
                found.append(finding)
        except UnknownFact as error:
            unknown = str(error)
        except NotRun as error:
            if not found:
                pytest.skip(str(error))
        verdict, used = verdict_of(info.id, info.severity, found, unknown, pdgate_run.waivers, info.waivable)
        earlier = item.stash.get(RESULT_KEY, None)
        kept = [f.model_copy(update={"reference": f.reference or info.reference or None}) for f in found]
        result = CheckResult(
            id=info.id, title=info.title, target=target_of(item), verdict=verdict, severity=info.severity,
            reason=unknown or "", reference=info.reference, waivable=info.waivable, findings=(earlier.findings if earlier else []) + kept,
            waivers=(earlier.waivers if earlier else []) + used, nodeid=item.nodeid,
        )  # fmt: skip
        if earlier and earlier.verdict == "waived" and verdict == "pass":
            result.verdict = "waived"
        item.stash[RESULT_KEY] = result
        item.config.hook.pytest_pdgate_judged(item=item, result=result)
        if verdict == "fail":
            pytest.fail("\n".join(finding_text(f) for f in kept if f.severity != "note") + (f"\nalso unknown: {unknown}" if unknown else ""), pytrace=False)
        if verdict == "invalid":
            pytest.fail(f"cannot be judged: {unknown}", pytrace=False)

    return judge_findings
