"""The service suite in front of a real router, with load workers, seeds and golden files, and A/B on a running lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.control import Lab, start
from tests.lab.test_selfcheck import ids

pytestmark = pytest.mark.lab
ROOT = Path(__file__).resolve().parent.parent.parent


def judged(bundle: Path, *options: str) -> dict:
    argv = [sys.executable, "-m", "pytest", f"--bundle={bundle}", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (bundle / "verdict.json").exists(), done.stdout + done.stderr
    return json.loads((bundle / "verdict.json").read_text())


ROUTER = pytest.mark.skipif(not Path(sys.executable).with_name("vllm-router").exists(), reason="vllm-router is not installed (x86_64 only)")


@ROUTER
def test_a_router_that_asks_how_its_engines_are_leaves_a_silent_one_out_in_time(tmp_path: Path) -> None:
    document = judged(tmp_path / "b", "--hosts=lab-router", "chaos", "--chaos", "-k", "recovery.failover", "--load-rate=12")
    assert ids(document, "pass") == {"recovery.failover"}, [check for check in document["checks"] if check["verdict"] != "not-run"]


@ROUTER
def test_the_suite_runs_with_a_real_vllm_router_in_front(tmp_path: Path) -> None:
    document = judged(tmp_path / "b", "--hosts=lab-router", "suites/service")
    # What the router itself does otherwise than a healthy deployment should is on record, nothing else may fail.
    assert ids(document, "invalid") == set() and ids(document, "fail") <= ROUTER_FINDINGS, ids(document, "fail")
    assert {"service.load.wrong", "service.load.answered", "service.cancel.storm", "logs.errors"} <= ids(document, "pass")


ROUTER_FINDINGS: set[str] = set()


def test_two_load_workers_leave_the_records_one_process_leaves(tmp_path: Path) -> None:
    common = ("--hosts=lab", "suites/service/test_load.py", "--load-seconds=3", "--load-seed=7")
    one = judged(tmp_path / "one", *common)
    two = judged(tmp_path / "two", *common, "--load-workers=2", f"--golden={tmp_path / 'one' / 'golden.json'}")
    assert one["verdict"] == two["verdict"] == "pass"
    first, second = (
        [json.loads(line)["prompt_id"] for line in (tmp_path / name / "load" / "records.jsonl").read_text().splitlines() if '"outcome"' in line]
        for name in ("one", "two")
    )
    assert sorted(first) == sorted(second) and len(first) > 30
    assert json.loads((tmp_path / "two" / "golden.json").read_text())["learned_from"].endswith("golden.json")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    running = start("lab", [])
    yield running
    running.stop()


IN_LAB = "import sys; from lab.control import Lab; Lab({pid}, {ticks!r}, '', [], [], 0).join(); from pdgate.cli import main; sys.exit(main(sys.argv[1:]))"
MATRIX = """
load: {{rate: 15, seconds: 3, abort_share: 0}}
variants:
  - name: decode-on-a-busy-host
    change: {{neighbour: on}}
    host: d0
    apply: "mkdir /tmp/applied && for core in $(ls /proc/[0-9]*/comm | cut -d/ -f3); do [ \\"$(cat /proc/$core/comm 2>/dev/null)\\" = VLLM::EngineCor ] && renice 19 $core; done; true"
    undo: "rmdir /tmp/applied"
"""


def ab(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", IN_LAB.format(pid=lab.pid, ticks=lab.started), "ab", f"--hosts={lab.inventory}", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_variant_is_applied_measured_and_undone_on_a_host(lab: Lab, tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(MATRIX.format())
    done = ab(lab, str(matrix), f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode-on-a-busy-host: neighbour=True" in done.stdout and "failure rate" in done.stdout and "ttft p50" in done.stdout
    [row] = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert row["against"]["failure rate"]["value"] == 0
    assert not (lab.upper("d0") / "tmp" / "applied").exists()


def test_a_killed_comparison_leaves_a_note_and_undo_takes_the_variant_back(lab: Lab, tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.yaml"
    here = tmp_path / "here"
    matrix.write_text(f"load: {{rate: 5, seconds: 2}}\nvariants:\n  - {{name: a, change: {{x: 1}}, apply: 'touch {here}', undo: 'rm {here}'}}\n")
    argv = [sys.executable, "-c", IN_LAB.format(pid=lab.pid, ticks=lab.started), "ab", f"--hosts={lab.inventory}", str(matrix), f"--out={tmp_path / 'o'}"]
    for _ in range(3):  # on a busy machine the load may be late, and the comparison then refuses to go on
        running = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
        deadline = time.monotonic() + 90
        while not here.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if here.exists():
            break
    assert here.exists()
    running.kill()
    running.wait()
    refused = ab(lab, str(matrix))
    assert refused.returncode == 4 and "variant 'a' was applied to this deployment and never undone" in refused.stderr
    undone = ab(lab, str(matrix), "--undo")
    assert (undone.returncode, undone.stdout) == (0, "undone: a\n") and not here.exists()
