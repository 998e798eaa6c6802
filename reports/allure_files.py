"""Allure's environment and categories files (docs: allure-framework, `environment.properties`, `categories.json`)."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from pdgate import __version__
from pdgate.plugin.run import Run

CATEGORIES = [
    {"name": "fail: the deployment is not as it must be", "matchedStatuses": ["failed"], "messageRegex": "(?s)(?!.*cannot be judged).*"},
    {"name": "invalid: the check could not establish its premises", "matchedStatuses": ["failed", "broken"],
     "messageRegex": "(?s).*cannot be judged.*"},
    {"name": "not run", "matchedStatuses": ["skipped"]},
]  # fmt: skip


def write_environment(folder: Path, run: Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    deployment = run.deployment
    values = {
        "pdgate": __version__, "python": platform.python_version(), "deployment": deployment.name, "inventory": deployment.source,
        "phase": run.phase, "machines": len(deployment.machines), "engines": len(deployment.engines),
        "connectors": ", ".join(sorted({engine.connector for engine in deployment.engines})),
    }  # fmt: skip
    (folder / "environment.properties").write_text("".join(f"{key} = {value}\n" for key, value in values.items()))


def write_categories(folder: Path) -> None:
    (folder / "categories.json").write_text(json.dumps(CATEGORIES, indent=1))
