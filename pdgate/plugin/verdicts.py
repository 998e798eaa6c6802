"""From pytest's outcomes to verdicts: letters, summary, exit code. Works with -q -v -n -x -k --lf."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.plugin.check import CheckInfo, info_of, target_of
from pdgate.plugin.fixtures import RESULT_KEY
from pdgate.plugin.run import RUN_KEY
from pdgate.rules.finding import NotRun
from pdgate.verdict import VERDICTS, CheckResult, Verdict, counts, finding_text, overall, waiver_states

LETTERS: dict[Verdict, tuple[str, str, dict[str, bool]]] = {
    "pass": (".", "PASS", {"green": True}),
    "fail": ("F", "FAIL", {"red": True}),
    "invalid": ("I", "INVALID", {"red": True, "bold": True}),
    "waived": ("W", "WAIVED", {"yellow": True}),
    "not-run": ("N", "NOT RUN", {"cyan": True}),
}
RESULTS_KEY = pytest.StashKey[dict[str, CheckResult]]()


class Hooks:
    """Hooks pdgate offers to the plugins above it."""

    @pytest.hookspec
    def pytest_pdgate_judged(self, item: pytest.Item, result: CheckResult) -> None:
        """A check has just been judged; the test is still running, so attachments belong to it."""

    @pytest.hookspec
    def pytest_pdgate_finished(self, config: pytest.Config, results: list[CheckResult]) -> None:
        """All checks of the run are known; called once, before the terminal summary."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS_KEY] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash.get(RUN_KEY, None)
    for item in items:
        info = info_of(item)
        if info is None:
            continue
        item.extra_keyword_matches.update({info.id, info.id.replace(".", " ")})  # -k takes check ids, whole or in part
        if "service" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("service"))
        if run and info.phase not in ("any", run.phase):
            item.add_marker(pytest.mark.skip(reason=f"belongs to --phase={info.phase}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Saved facts hold no requests: what was judged from requests then stands, and a pass is not repeated."""
    info, run = info_of(item), item.config.stash.get(RUN_KEY, None)
    if info is None or run is None or not run.offline or not {"service", "chaos"} & set(item.path.parts):
        return
    saved = run.saved_results().get((info.id, target_of(item)))
    if saved is None or saved.verdict not in ("fail", "invalid"):
        pytest.skip("saved facts hold no requests" + (f" (was {saved.verdict})" if saved else ""))
    item.stash[RESULT_KEY] = saved.model_copy(update={"nodeid": item.nodeid})
    text = "\n".join(finding_text(finding) for finding in saved.findings) or f"cannot be judged: {saved.reason}"
    pytest.fail(f"as judged when the facts were saved:\n{text}", pytrace=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every check that is selected counts, also one that is never reached."""
    for item in session.items:
        _expect(session.config, item, "the run ended before it")


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        _expect(item.config, item, "deselected")


def _expect(config: pytest.Config, item: pytest.Item, reason: str) -> None:
    info = info_of(item)
    if info is not None:
        config.stash[RESULTS_KEY][item.nodeid] = _result(info, item, "not-run", reason)


def _result(info: CheckInfo, item: pytest.Item, verdict: Verdict, reason: str) -> CheckResult:
    return CheckResult(
        id=info.id, title=info.title, target=target_of(item), verdict=verdict, severity=info.severity, reason=reason,
        reference=info.reference, waivable=info.waivable, nodeid=item.nodeid,
    )  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    info = info_of(item)
    if info is None:
        return report
    result = item.stash.get(RESULT_KEY, None)
    if call.excinfo is not None and isinstance(call.excinfo.value, NotRun):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {call.excinfo.value}")
    if report.skipped:
        result = _result(info, item, "not-run", _skip_reason(report))
    elif report.failed and (result is None or result.verdict not in ("fail", "invalid")):
        # The check did not get as far as a judgement: its premises could not be established.
        reason = _reason(call)
        if call.excinfo is not None and isinstance(call.excinfo.value, UnknownFact):
            report.longrepr = f"cannot be judged: {reason}"
        result = _result(info, item, "invalid", reason)
        item.stash[RESULT_KEY] = result
    elif report.when == "call" and result is None:
        result = _result(info, item, "invalid", "the check ended without judging anything")
        report.outcome, report.longrepr = "failed", "cannot be judged: the check ended without judging anything"
        item.stash[RESULT_KEY] = result
    if report.when == "call" or report.failed or report.skipped:
        assert result is not None
        result.duration_s = round(call.duration, 3)
        report.pdgate = result.model_dump(mode="json")
        # On the item: junit takes them from its teardown report.
        item.user_properties += [
            ("check", result.id),
            ("target", result.target),
            ("verdict", result.verdict),
            ("severity", result.severity),
        ]
    return report


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _reason(call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return "failed without an exception"
    error = call.excinfo.value
    return str(error) if isinstance(error, UnknownFact) else f"{type(error).__name__}: {error}"


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    found = getattr(report, "pdgate", None)
    if found is None:
        return None
    letter, word, markup = LETTERS[found["verdict"]]
    # pytest's own categories keep its closing line ("N passed, M failed"), --lf and -x as everybody knows them.
    category = {"pass": "passed", "waived": "passed", "not-run": "skipped"}.get(found["verdict"], "failed")
    return category, letter, (word, markup)


class Recorder:
    """Collects results on the controller (under xdist, reports arrive from the workers)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "pdgate", None)
        if found is not None:
            self._config.stash[RESULTS_KEY][report.nodeid] = CheckResult.model_validate(found)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Recorder(session.config), "pdgate-recorder")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    run = config.stash.get(RUN_KEY, None)
    if run is None or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    results = list(config.stash[RESULTS_KEY].values())
    if not results:
        return
    config.hook.pytest_pdgate_finished(config=config, results=results)
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and overall(results) == "not-run":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash.get(RUN_KEY, None)
    results = list(config.stash[RESULTS_KEY].values())
    if run is None or not results or config.getoption("collectonly"):
        return
    write = terminalreporter
    write.section("pdgate", sep="=")
    for verdict in ("fail", "invalid", "waived"):
        for result in results:
            if result.verdict == verdict:
                _write_result(write, result)
    notes = [(result, finding) for result in results for finding in result.findings if finding.severity == "note"]
    for result, finding in notes:
        write.write_line(f"note: {result.id}: {finding.target}: {finding.seen}")
    for state in waiver_states(run.waivers, results):
        write.write_line(f"waiver: {state}", yellow=True)
    _write_not_run(write, results)
    if all(result.reason == "deselected" for result in results):
        write.write_line("nothing was selected: no check matches; pdgate checks lists them all", cyan=True)
    verdict = overall(results)
    numbers = counts(results)
    line = ", ".join(f"{numbers[name]} {name}" for name in VERDICTS if numbers[name])
    write.write_line(f"verdict: {verdict.upper()}  ({line})", **{**LETTERS[verdict][2], "bold": True})
    write.write_line(f"bundle:  {run.bundle}")
    write.write_line(f"page:    {run.bundle / 'index.html'}")


def _write_result(write: Any, result: CheckResult) -> None:
    _, word, markup = LETTERS[result.verdict]
    write.write_line(f"{word} {result.id} [{result.target}] {result.title} ({result.severity})", **markup)
    for finding in result.findings:
        if finding.severity != "note":  # pytest's own FAILURES section has each finding whole
            write.write_line(f"    {finding.target}: {finding.seen}")
            write.write_line(f"      {finding.remedy}")
    for waiver in result.waivers:
        write.write_line(f"    waived until {waiver.expires} by {waiver.approver}: {waiver.reason}")
    if result.reason:
        write.write_line(f"    unknown: {result.reason}")


def _write_not_run(write: Any, results: list[CheckResult]) -> None:
    """Not-run checks, grouped by reason: a reason of forty checks is one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.verdict == "not-run" and result.reason != "deselected":
            groups.setdefault((result.id, result.reason), []).append(result.target)
    by_reason: dict[str, list[str]] = {}
    for (check, reason), targets in groups.items():
        by_reason.setdefault(reason, []).append(check if len(targets) == 1 else f"{check} ({len(targets)})")
    for reason, checks in by_reason.items():
        write.write_line(f"not run: {', '.join(checks)}: {reason}", cyan=True)
