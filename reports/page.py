"""The bundle's page: one HTML file, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
)
ORDER = ("fail", "invalid", "waived", "not-run", "pass")


def render_page(document: dict[str, Any], experiments: Sequence[dict[str, Any]] = ()) -> str:
    """HTML of a verdict document: what is wrong first, then what could not be judged, the experiments, every check and target."""
    checks = document["checks"]
    subjects: dict[str, dict[str, Any]] = {}
    for check in checks:
        subject = subjects.setdefault(check["id"], {"title": check["title"], "severity": check["severity"], "targets": []})
        subject["targets"].append(check)
    for subject in subjects.values():
        # What -k or -m left out says nothing about the rest.
        chosen = [c for c in subject["targets"] if c.get("reason") != "deselected"] or subject["targets"]
        subject["worst"] = next(verdict for verdict in ORDER if any(c["verdict"] == verdict for c in chosen))
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check["verdict"] == "not-run":
            name = check["id"]
            if name not in reasons.setdefault(check["reason"], []):
                reasons[check["reason"]].append(name)
    return TEMPLATES.get_template("page.html").render(
        document=document, subjects=subjects, not_run=reasons, experiments=experiments,
        bad=[check for verdict in ("fail", "invalid", "waived") for check in checks if check["verdict"] == verdict],
        notes=[(check, finding) for check in checks for finding in check["findings"] if finding["severity"] == "note"],
    )  # fmt: skip
