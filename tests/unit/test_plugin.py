"""Verdicts inside pytest: letters, summary, exit codes, waivers, re-judging; on saved facts of a healthy lab."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SAVED = ROOT / "tests" / "fixtures" / "bundle"


def pdgate(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def verdict(bundle: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((bundle / "verdict.json").read_text())
    return document


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy of the saved bundle that a test may spoil."""
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


def spoil(bundle: Path, host: str, change: Any) -> None:
    path = bundle / "facts" / f"{host}.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def clock_behind(facts: dict[str, Any]) -> None:
    facts["clock"]["value"]["offset_s"] = {"low": -90.1, "high": -89.9}


def test_saved_facts_of_a_healthy_lab_are_judged_again_in_silence(tmp_path: Path) -> None:
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}/b", "-q")
    assert run.returncode == 0, run.stdout
    document = verdict(tmp_path / "b")
    assert document["verdict"] == "pass" and document["run"]["offline"]
    # What cannot be asked of saved facts is listed, not forgotten.
    service = [check for check in document["checks"] if check["id"].startswith("service.")]
    assert service and {check["verdict"] for check in service} == {"not-run"}
    assert "saved facts hold no requests" in run.stdout


def test_a_failed_check_tells_expected_seen_why_and_remedy(saved: Path, tmp_path: Path) -> None:
    spoil(saved, "d0", clock_behind)
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", "-v", "-k", "clock")
    assert run.returncode == 1
    for part in ("FAIL", "expected: ", "seen: ", "90 s behind", "why: ", "remedy: ", "verdict: FAIL"):
        assert part in run.stdout
    (failed,) = [check for check in verdict(tmp_path / "b")["checks"] if check["verdict"] == "fail"]
    assert (failed["id"], failed["target"], failed["severity"]) == ("clocks.offset", "d0", "major")
    assert failed["findings"][0]["remedy"]


def test_an_unknown_fact_is_invalid_and_never_a_pass(saved: Path, tmp_path: Path) -> None:
    spoil(saved, "d0", lambda facts: facts.update(clock={"value": None, "unknown": "exit code 127: date not found"}))
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", "-q", "-k", "clocks or clock")
    assert run.returncode == 1
    assert "cannot be judged: exit code 127: date not found" in run.stdout and "I" in run.stdout.splitlines()[0]
    invalid = {check["id"] for check in verdict(tmp_path / "b")["checks"] if check["verdict"] == "invalid"}
    assert "clocks.offset" in invalid


WAIVER = "- {check: clocks.offset, target: d0, reason: NTP ticket 12, approver: ops lead, expires: %s}\n"


@pytest.mark.parametrize(("expires", "code", "expected"), [("2999-01-01", 0, "waived"), ("2020-01-01", 1, "fail")])
def test_a_waiver_holds_until_it_expires(saved: Path, tmp_path: Path, expires: str, code: int, expected: str) -> None:
    spoil(saved, "d0", clock_behind)
    (tmp_path / "w.yaml").write_text(WAIVER % expires)
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", f"--waivers={tmp_path}/w.yaml", "-q", "-k", "clock_agrees")
    assert run.returncode == code, run.stdout
    assert verdict(tmp_path / "b")["verdict"] == expected
    if expected == "waived":
        assert "ops lead: NTP ticket 12" in run.stdout


def test_a_waiver_without_effect_is_said_so(saved: Path, tmp_path: Path) -> None:
    spoil(saved, "d0", clock_behind)
    entry = "- {check: %s, target: %s, reason: r, approver: a, expires: %s}\n"
    rows = [("clocks.offset", "d0", "2020-01-01"), ("clock.offset", "d0", "2999-01-01"), ("clocks.offset", "p9", "2999-01-01")]
    (tmp_path / "w.yaml").write_text("".join(entry % row for row in rows))
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", f"--waivers={tmp_path}/w.yaml", "-q", "-k", "clocks.offset")
    for words in ("expired on 2020-01-01", "did you mean 'clocks.offset'?", "covered nothing"):
        assert words in run.stdout
    assert len(verdict(tmp_path / "b")["waivers"]["without-effect"]) == 3


def test_what_was_judged_from_requests_stands_when_facts_are_judged_again(saved: Path, tmp_path: Path) -> None:
    failed = {"id": "service.request.golden", "title": "t", "target": "deployment", "verdict": "fail", "severity": "critical",
              "findings": [{"target": "proxy", "expected": "x", "seen": "wrong text", "why": "y", "remedy": "z"}]}  # fmt: skip
    (saved / "verdict.json").write_text(json.dumps({"checks": [failed]}))
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", "-q")
    assert run.returncode == 1 and "as judged when the facts were saved" in run.stdout and "wrong text" in run.stdout
    assert verdict(tmp_path / "b")["verdict"] == "fail"


def test_checks_are_selected_by_their_id(tmp_path: Path) -> None:
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}/b", "-q", "-k", "ports and not ephemeral")
    assert run.returncode == 0
    judged = {check["id"] for check in verdict(tmp_path / "b")["checks"] if check["reason"] != "deselected"}
    assert "ports.group.owned" in judged and all(name.startswith("ports.") for name in judged)


def test_a_broken_waiver_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("- {check: clocks.offset, reason: x, approver: y}\n")
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}/b", f"--waivers={tmp_path}/w.yaml")
    assert run.returncode == 4 and "w.yaml: waiver 1: key 'expires'" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [["-n", "2"], ["-x", "-q"], ["-v"], ["--maxfail=5"]])
def test_the_verdict_is_the_same_however_pytest_is_run(saved: Path, tmp_path: Path, options: list[str]) -> None:
    spoil(saved, "d0", clock_behind)
    run = pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", *options)
    assert run.returncode == 1, run.stdout + run.stderr
    document = verdict(tmp_path / "b")
    assert {check["id"] for check in document["checks"] if check["verdict"] == "fail"} == {"clocks.offset"}
    assert len(document["checks"]) > 100 or "-x" in options


def test_checks_never_reached_are_not_run(saved: Path, tmp_path: Path) -> None:
    spoil(saved, "d0", clock_behind)
    pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", "-x", "-q")
    reasons = {check["reason"] for check in verdict(tmp_path / "b")["checks"] if check["verdict"] == "not-run"}
    assert "the run ended before it" in reasons


def test_a_run_that_judged_nothing_does_not_pass(tmp_path: Path) -> None:
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}/b", "suites/service", "-q")
    assert run.returncode == 1 and verdict(tmp_path / "b")["verdict"] == "not-run"


def test_a_selection_that_matches_nothing_says_so(tmp_path: Path) -> None:
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}/b", "-q", "-k", "no.such.check")
    assert run.returncode != 0 and "nothing was selected: no check matches" in run.stdout


def test_without_hosts_pytest_explains_itself_in_two_lines() -> None:
    run = pdgate()
    assert run.returncode == 4
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert len(lines) == 2 and "--hosts=inventory.yaml" in lines[0] and "--hosts=lab" in lines[1]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--hosts=no-such-inventory"], "no such inventory"),
        (["--hosts=lab", "--lab-defect=grafana-on-a-group-prt"], "did you mean 'grafana-on-a-group-port'?"),
        (["--hosts=a2-1p1d", "--lab-defect=x"], "needs --hosts=lab"),
    ],
)
def test_bad_input_ends_with_code_4_and_no_traceback(args: list[str], part: str) -> None:
    run = pdgate(*args)
    assert run.returncode == 4 and part in run.stderr and "Traceback" not in run.stderr + run.stdout


def test_an_unreachable_host_is_named_with_its_inventory(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "all:\n  vars: {pd_kv_port: 28000, pd_http_port: 7000, pd_platform: cpu}\n  children:\n"
        "    prefill: {hosts: {p0: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n"
        "    decode: {hosts: {d0: {ansible_connection: local, pd_http_port: 7001}}}\n"
    )
    run = pdgate(f"--hosts={tmp_path}/x.yaml", f"--bundle={tmp_path}/b")
    assert run.returncode == 4 and "x.yaml: host 'p0': host unreachable" in run.stderr
    assert "Traceback" not in run.stderr + run.stdout
    run = pdgate(f"--hosts={tmp_path}/x.yaml", f"--bundle={tmp_path}/c", "--allow-unreachable", "-q", "-k", "clock_agrees")
    assert run.returncode == 1
    verdicts = {check["target"]: check["verdict"] for check in verdict(tmp_path / "c")["checks"] if check["id"] == "clocks.offset"}
    assert verdicts == {"p0": "invalid", "d0": "pass"}


def test_a_bundle_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    run = pdgate(f"--hosts={SAVED}", f"--bundle={tmp_path}")
    assert run.returncode == 4 and "not empty" in run.stderr


def test_users_own_testinfra_tests_run_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "all:\n  vars: {pd_kv_port: 28000, pd_platform: cpu, ansible_connection: local}\n  children:\n"
        "    prefill: {hosts: {p0: {pd_http_port: 7000}}}\n    decode: {hosts: {d0: {pd_http_port: 7001}}}\n"
    )
    (tmp_path / "test_mine.py").write_text("def test_shell(host):\n    assert host.run('echo hi').stdout.strip() == 'hi'\n")
    run = pdgate(
        f"--hosts={tmp_path}/x.yaml",
        f"--bundle={tmp_path}/b",
        f"--confcutdir={ROOT}",
        f"--rootdir={ROOT}",
        "-p",
        "conftest",
        str(tmp_path / "test_mine.py"),
        "-v",
    )
    assert run.returncode == 0 and "test_shell[local] PASSED" in run.stdout, run.stdout + run.stderr


def test_the_page_and_the_junit_file_say_the_same(saved: Path, tmp_path: Path) -> None:
    spoil(saved, "d0", clock_behind)
    pdgate(f"--hosts={saved}", f"--bundle={tmp_path}/b", "-q")
    page, junit = (tmp_path / "b" / "index.html").read_text(), (tmp_path / "b" / "junit.xml").read_text()
    assert "90 s behind" in page and "<script" not in page and "src=" not in page
    assert 'name="verdict" value="fail"' in junit and "90 s behind" in junit
    results = list((tmp_path / "b" / "allure-results").glob("*-result.json"))
    failed = [json.loads(path.read_text()) for path in results if '"failed"' in path.read_text()]
    assert len(results) > 100 and any(step["name"].startswith("d0: expected") for result in failed for step in result.get("steps", []))
    assert (tmp_path / "b" / "allure-results" / "environment.properties").exists()
