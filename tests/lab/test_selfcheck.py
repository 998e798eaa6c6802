"""No check is blind: the healthy lab raises nothing, each defect trips the checks it names and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.defects import load_all
from lab.defects.registry import DEFECTS, GENTLE, Defect
from suites.catalogue import all_checks

pytestmark = [pytest.mark.lab, pytest.mark.selfcheck]
ROOT = Path(__file__).resolve().parent.parent.parent
load_all()


def judge_lab(bundle: Path, *options: str) -> tuple[int, dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--hosts=lab", f"--bundle={bundle}", "-q", "-p", "no:cacheprovider", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (bundle / "verdict.json").exists(), run.stdout + run.stderr
    document: dict[str, Any] = json.loads((bundle / "verdict.json").read_text())
    return run.returncode, document


def ids(document: dict[str, Any], verdict: str) -> set[str]:
    return {check["id"] for check in document["checks"] if check["verdict"] == verdict}


@pytest.mark.parametrize("phase", ["before", "after"])
def test_the_healthy_lab_raises_nothing(tmp_path: Path, phase: str) -> None:
    code, document = judge_lab(tmp_path / "b", f"--phase={phase}")
    assert (code, document["verdict"], ids(document, "fail"), ids(document, "invalid")) == (0, "pass", set(), set())
    # Silence is not blindness: every check of the phase gave a verdict on some target.
    judged = ids(document, "pass")
    expected = {info.id for info in all_checks().values() if info.phase in (phase, "any") and not info.id.startswith("recovery.")}
    assert judged == expected


@pytest.mark.parametrize("experiment", sorted({defect.run for defect in DEFECTS.values()} - {GENTLE, ("suites",)}), ids=lambda run: run[-1])
def test_the_healthy_lab_recovers_as_it_should(tmp_path: Path, experiment: tuple[str, ...]) -> None:
    code, document = judge_lab(tmp_path / "b", *experiment)
    assert (code, document["verdict"]) == (0, "pass")


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=list(DEFECTS))
def test_a_defect_trips_what_it_names_and_nothing_else(tmp_path: Path, defect: Defect) -> None:
    code, document = judge_lab(tmp_path / "b", f"--lab-defect={defect.name}", f"--phase={defect.phase}", *defect.run)
    assert (ids(document, "fail"), ids(document, "invalid")) == (set(defect.trips), set(defect.invalid))
    assert code == 1 and document["verdict"] == ("fail" if defect.trips else "invalid")


def test_several_defects_add_up(tmp_path: Path) -> None:
    names = ["flapping-device", "engine-logs-in-utc"]
    _, document = judge_lab(tmp_path / "b", *(f"--lab-defect={name}" for name in names))
    assert ids(document, "fail") == {"links.flaps", "clocks.log-zone"}


def test_every_check_has_a_defect_that_fails_exactly_it() -> None:
    alone = {next(iter(defect.trips)) for defect in DEFECTS.values() if len(defect.trips) == 1 and not defect.invalid}
    # Without root most other checks cannot be judged: no defect can make this one fail and leave those alone.
    assert set(all_checks()) - alone == {"hosts.permission"}
    assert any(defect.trips == {"hosts.permission"} for defect in DEFECTS.values())


def test_defects_name_real_checks() -> None:
    assert {name for defect in DEFECTS.values() for name in defect.trips | defect.invalid} <= set(all_checks())
