"""What pdgate has said about real engines, said again: each row is an entry of docs/track-record.md or a clean run.

pytest real -m smoke     # make real-smoke: the acceptance runs of two connectors and the first entry
pytest real              # make real: everything
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.control import embedded

ROOT = Path(__file__).resolve().parent.parent
LOST = ("chaos/experiments/test_lost_prefill.py", "--chaos", "--allow-outage", "-k")


@dataclass(frozen=True)
class Row:
    """A run on a fresh real deployment: its verdict, and words that must stand in the findings."""

    hosts: str
    args: tuple[str, ...]
    verdict: str
    says: tuple[str, ...] = ()
    smoke: bool = False
    model: str = "tiny"  # bigkv: transfers that last


HIT = ("chaos", "--chaos", "--allow-outage", "--load-rate=1", "-k")
CUT = "recovery.data-cut or recovery.partition or recovery.side-channel-cut or recovery.transfer-fails"
ROWS = {
    "v1 passes acceptance, TP2": Row("real", (), "pass", smoke=True),
    "hybrid passes acceptance": Row("real-hybrid", (), "pass", smoke=True),
    "nixl passes acceptance": Row("real-nixl", (), "pass"),
    "upstream mooncake passes acceptance": Row("real-mooncake", (), "pass"),
    "hybrid answers wrong with 200 after P was killed": Row(
        "real-hybrid", (*LOST, "that_knew_it"), "fail", ("wrong, HTTP 200", "Mooncake transfer failed", "vllm-ascend#17044"), smoke=True
    ),
    "v1 fails cleanly after P was killed": Row("real", (*LOST, "that_knew_it"), "pass", smoke=True),
    "hybrid hangs on a dead P it never met": Row("real-hybrid", (*LOST, "never_met_it"), "fail", ("hang",)),
    "orphans keep the ports of a killed API server": Row(
        "real", ("--lab-defect=api-server-killed", "-k", "outlived or owned or engine_runs"), "fail", ("orphaned", "28000")
    ),
    "the router keeps the old engine id": Row("real-mooncake", (*LOST, "restarted"), "fail", ("hang",)),
    "a stolen port keeps P down": Row(
        "real", ("--lab-defect=engine-lost-its-port", "-k", "owned or engine_runs"), "fail", ("'grafana server", "nobody listens there")
    ),
    "hybrid answers wrong with 200 once prefilled": Row("real-hybrid", (*HIT, "recovery.hit.prefilled"), "fail", ("wrong, HTTP 200",), model="bigkv"),
    "hybrid answers wrong with 200 after a cut handshake": Row("real-hybrid", (*HIT, "recovery.hit.handshake"), "fail", ("wrong, HTTP 200",), model="bigkv"),
    "hybrid answers wrong with 200 after a cut transfer": Row("real-hybrid", (*HIT, "recovery.hit.transferring"), "fail", ("wrong, HTTP 200",), model="bigkv"),
    "upstream mooncake hangs after a cut transfer": Row("real-mooncake", (*HIT, "recovery.hit.transferring"), "fail", ("hang",), model="bigkv"),
    "hybrid goes on after a stall of D": Row("real-hybrid", (*HIT, "recovery.decode-stalled"), "pass"),
    "hybrid answers wrong with 200 whatever cuts its transfers": Row("real-hybrid", (*HIT, CUT), "fail", ("wrong answers", "vllm-ascend#17044")),
    "v1 fails cleanly after a cut transfer": Row("real", (*HIT, "recovery.hit.transferring"), "pass", model="bigkv"),
    "v1 comes back from every loss": Row("real", (*HIT, "recovery.worker-lost or recovery.decode-lost or recovery.prefill-lost or recovery.decode-stalled"), "pass"),
    "v1 bears cut paths": Row("real", (*HIT, "recovery.data-cut or recovery.side-channel-cut or recovery.partition"), "pass"),
    "v1 hangs while orphans hold the port of a killed API server": Row("real", (*HIT, "recovery.api-lost"), "fail", ("hang",)),
    "upstream mooncake keeps KV for requests that hang": Row("real-mooncake", (*HIT, "recovery.prefill-lost"), "fail", ("hang", "KV usage")),
    "upstream mooncake bears cut paths": Row("real-mooncake", (*HIT, "recovery.data-slow or recovery.data-cut or recovery.side-channel-cut or recovery.partition"), "pass"),
    "nixl goes on after a stall of D": Row("real-nixl", ("chaos", "--chaos", "--load-rate=0.5", "--allow-outage", "-k", "recovery.decode-stalled"), "pass"),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=name, marks=[pytest.mark.smoke] if row.smoke else []) for name, row in ROWS.items()])
def test_the_track_record_holds(tmp_path: Path, row: Row) -> None:
    assert row.hosts in embedded()
    command = [sys.executable, "-m", "pytest", f"--hosts={row.hosts}", f"--bundle={tmp_path}/b", "-q", "-p", "no:cacheprovider", *row.args]
    environment = os.environ | {"PDGATE_REAL_MODEL": row.model}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment)
    assert (tmp_path / "b" / "verdict.json").exists(), run.stdout + run.stderr
    document: dict[str, Any] = json.loads((tmp_path / "b" / "verdict.json").read_text())
    seen = "\n".join(f"{f['seen']} {f['remedy']}" for check in document["checks"] for f in check["findings"])
    assert document["verdict"] == row.verdict, run.stdout
    assert all(words in seen for words in row.says), seen
