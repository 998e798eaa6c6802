"""The page draws what an experiment left: requests by second, the span of the fault, and what the logs said when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reports.experiments import experiments_of

FAULT = {"fault": "kill-engine", "does": "SIGKILL engine of p0", "hits": "processes", "evidence": "gone", "injected": [102.0, 102.1], "healed": [103.0, 103.1], "steps": []}
MEASURES = {
    "start": 100.0, "timeline": [{"second": n, "good": 4.0, "bad": 1.0 if n == 2 else 0.0} for n in range(6)], "during": {"ok": 4, "error": 1}, "after": {"ok": 12},
    "detected_s": 0.2, "first_good_s": 0.1, "steady_s": 1.0, "uncertainty_s": 0.1,
}  # fmt: skip


def row(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "experiments").mkdir()
    (folder / "experiments" / "recovery.prefill-lost.json").write_text(json.dumps({"faults": [FAULT], "measures": MEASURES, "kv_back_s": 0.5, **more}))
    [one] = experiments_of(folder)
    return one


def test_a_bad_second_stands_out_and_the_fault_is_underlined(tmp_path: Path) -> None:
    drawn = row(tmp_path)["picture"]
    assert [bar["bad"] > 0 for bar in drawn["bars"]] == [False, False, True, False, False, False]
    [span] = drawn["spans"]
    second = drawn["width"] / drawn["seconds"]
    assert abs(span["x"] - 2 * second) < 1 and abs(span["w"] - 1.1 * second) < 1


def test_what_the_logs_said_is_told_from_the_fault_on_with_its_doubt(tmp_path: Path) -> None:
    said = {"unit": "d0/dp1", "said": "ERROR Mooncake transfer failed", "lines": 3, "at": [102.2, 102.6], "doubt": ""}
    silent = {**said, "unit": "p1", "at": None, "doubt": "the line bears no time"}
    one = row(tmp_path, logs=[said, silent], logs_unknown={"p0": "was truncated"})
    assert [entry["after"] for entry in one["logs"]] == ["+0.30 s ± 0.20", "when is unknown: the line bears no time"]
    assert one["logs_unknown"] == {"p0": "was truncated"}
