"""The house stays in order: imports run downward, files stay small, the lock holds no address."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# A room may import those named here, and itself.
ALLOWED = {
    "pdgate/inventory": {"pdgate.inventory"},
    "pdgate/connectors": {"pdgate.connectors", "pdgate.inventory"},
    "pdgate/facts": {"pdgate.facts", "pdgate.inventory"},
    "pdgate/serving": {"pdgate.serving", "pdgate.facts", "pdgate.inventory"},
    "pdgate/rules": {"pdgate.rules", "pdgate.facts", "pdgate.connectors", "pdgate.inventory", "pdgate.serving"},
    "pdgate/plugin": {"pdgate"},
    "suites": {"suites", "chaos", "pdgate"},
    "chaos": {"chaos", "pdgate"},
    "real": {"real", "lab", "pdgate"},
    "reports": {"reports", "pdgate"},
    "lab": {"lab", "pdgate"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if re.match(r"(pdgate|suites|chaos|reports|lab|tests)(\.|$)", name)}


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def test_imports_run_downward() -> None:
    for room, allowed in ALLOWED.items():
        for path in (ROOT / room).rglob("*.py"):
            wrong = {name for name in imports(path) if not any(name == top or name.startswith(f"{top}.") for top in allowed)}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; {room} may import {allowed}"


def test_only_the_plugin_room_knows_pytest() -> None:
    for path in (ROOT / "pdgate").rglob("*.py"):
        if "plugin" not in path.parts:
            assert "pytest" not in {node.names[0].name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)}, (
                path
            )


def test_files_stay_under_400_lines() -> None:
    assert not {str(path): count for path in sources() if (count := len(path.read_text().splitlines())) > 400}


def test_the_lock_pins_everything_and_names_no_host() -> None:
    lock = (ROOT / "setup" / "requirements.lock").read_text()
    assert "://" not in lock
    assert all("==" in line for line in lock.splitlines() if re.match(r"^[a-zA-Z]", line))
