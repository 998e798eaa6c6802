"""What the chaos experiments of a run left in `experiments/`, as rows and pictures for the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 300, 46


def experiments_of(bundle: Path) -> list[dict[str, Any]]:
    """One row an experiment, in the order in which they began."""
    documents = [(path.stem, json.loads(path.read_text())) for path in sorted((bundle / "experiments").glob("*.json"))]
    documents.sort(key=lambda one: one[1]["faults"][0]["injected"][0] if one[1]["faults"] else 0)
    return [_row(name, document) for name, document in documents]


def _row(name: str, document: dict[str, Any]) -> dict[str, Any]:
    measures = document.get("measures")
    row = {"name": name, "faults": document["faults"], "kv_back_s": document.get("kv_back_s"), "hit": document.get("hit"),
           "outcome": document.get("outcome"), "good_s": document.get("good_s"), "measures": measures, "picture": None,
           "logs": [_said(one, document["faults"]) for one in document.get("logs", [])], "logs_unknown": document.get("logs_unknown", {})}  # fmt: skip
    if measures and measures.get("timeline"):
        row["picture"] = picture(measures["timeline"], measures["start"], document["faults"])
        row["counts"] = {when: ", ".join(f"{count} {kind}" for kind, count in sorted(measures[when].items())) for when in ("during", "after")}
    return row


def _said(told: dict[str, Any], faults: list[dict[str, Any]]) -> dict[str, Any]:
    """An error of a log, with its seconds from the first fault and their doubt."""
    after = None
    if told["at"] and faults:
        low, high = (moment - faults[0]["injected"][1] for moment in told["at"])
        after = f"{(low + high) / 2:+.2f} s ± {(high - low) / 2:.2f}"
    return {**told, "after": after or f"when is unknown: {told['doubt']}"}


def picture(timeline: list[dict[str, float]], start: float, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Bars by second (good below, bad above) and the spans in which a fault lasted, in pixels."""
    seconds = max(1, len(timeline))
    step = WIDTH / seconds
    most = max((moment["good"] + moment["bad"] for moment in timeline), default=1) or 1
    bars = []
    for moment in timeline:
        good, bad = (moment[kind] / most * HEIGHT for kind in ("good", "bad"))
        bars.append({"x": moment["second"] * step, "w": max(step - 1, 0.5), "good": good, "bad": bad, "top": HEIGHT - good - bad})
    spans = []
    for fault in faults:
        low, high = ((moment - start) * step for moment in (fault["injected"][0], fault["healed"][1]))
        spans.append({"x": max(0.0, low), "w": max(1.0, min(WIDTH, high) - max(0.0, low)), "what": fault["does"]})
    return {"bars": bars, "spans": spans, "width": WIDTH, "height": HEIGHT, "seconds": seconds}
