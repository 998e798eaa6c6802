"""The report plugin: what a run leaves in its bundle. Switched on by `--hosts`."""

from __future__ import annotations

import time

import allure
import pytest

from pdgate.plugin.check import info_of
from pdgate.plugin.run import RUN_KEY
from pdgate.verdict import CheckResult, finding_text
from reports.allure_files import write_categories, write_environment
from reports.bundle import point_latest, verdict_document, write_verdict
from reports.experiments import experiments_of
from reports.page import render_page

STARTED_KEY = pytest.StashKey[float]()
ALLURE_SEVERITY = {"critical": allure.severity_level.CRITICAL, "major": allure.severity_level.NORMAL,
                   "minor": allure.severity_level.MINOR, "note": allure.severity_level.TRIVIAL}  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED_KEY] = time.time()


def pytest_sessionstart(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN_KEY, None)
    if run is not None and not hasattr(session.config, "workerinput") and not session.config.getoption("collectonly"):
        write_environment(run.bundle / "allure-results", run)
        write_categories(run.bundle / "allure-results")


def pytest_runtest_setup(item: pytest.Item) -> None:
    info = info_of(item)
    if info is not None:
        allure.dynamic.title(f"{info.id}: {info.title}")
        allure.dynamic.severity(ALLURE_SEVERITY[info.severity])
        allure.dynamic.feature(info.id.partition(".")[0])
        allure.dynamic.story(info.id)


def pytest_pdgate_judged(item: pytest.Item, result: CheckResult) -> None:
    """Each finding is a step with its evidence attached; the host's facts are at hand beside it."""
    for finding in result.findings:
        with allure.step(f"{finding.target}: expected {finding.expected}"):
            allure.attach(finding_text(finding), name="evidence", attachment_type=allure.attachment_type.TEXT)
    if result.findings:
        run = item.config.stash[RUN_KEY]
        for name, facts in run.facts.items():
            if any(finding.target.partition("/")[0] == facts.host for finding in result.findings):
                allure.attach.file(str(run.bundle / "facts" / f"{facts.host}.json"), name=f"facts of {name}", extension="json")


def pytest_pdgate_finished(config: pytest.Config, results: list[CheckResult]) -> None:
    run = config.stash[RUN_KEY]
    document = verdict_document(run, results, config.stash[STARTED_KEY], list(config.invocation_params.args))
    write_verdict(run.bundle, document)
    (run.bundle / "index.html").write_text(render_page(document, experiments_of(run.bundle)))
    point_latest(run.bundle)
