"""`--hosts=lab`: starts the embedded lab (or uses the kept one), enters its network, and hands its inventory on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.control import Lab, LabUnavailable, kept, start

ROOT = Path(__file__).resolve().parent.parent
LAB_KEY = pytest.StashKey[Lab]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdgate lab")
    group.addoption("--lab-defect", action="append", default=[], metavar="NAME", help="plant a defect in the lab (repeatable)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    defects = config.getoption("lab_defect")
    if hasattr(config, "workerinput"):
        return
    if config.getoption("hosts") != "lab":
        if defects:
            raise pytest.UsageError("--lab-defect plants a defect in the embedded lab; it needs --hosts=lab")
        return
    inventory = ROOT / "inventories" / "lab.yaml"
    if config.getoption("collectonly"):
        config.option.hosts = str(inventory)
        return
    try:
        lab = None if defects or config.getoption("phase") == "before" else kept()
        if lab is None:
            lab = start(inventory, defects, phase=config.getoption("phase"))
            config.add_cleanup(lab.stop)
        lab.join()
    except LabUnavailable as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[LAB_KEY] = lab
    config.option.hosts = lab.inventory


def pytest_report_header(config: pytest.Config) -> str | None:
    lab = config.stash.get(LAB_KEY, None)
    if lab is None:
        return None
    defects = f", defects: {', '.join(lab.defects)}" if lab.defects else ""
    return f"lab: {', '.join(lab.hosts)} up in {lab.seconds:.1f} s{defects}"
