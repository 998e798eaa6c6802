"""`--hosts=lab` (or real, real-hybrid …): starts the embedded lab or uses the kept one, enters its network, hands its inventory on."""

from __future__ import annotations

import pytest

from lab.control import Lab, LabUnavailable, embedded, inventory_of, kept, start

LAB_KEY = pytest.StashKey[Lab]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdgate lab")
    group.addoption("--lab-defect", action="append", default=[], metavar="NAME", help="plant a defect in the lab (repeatable)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    defects = config.getoption("lab_defect")
    if hasattr(config, "workerinput"):
        return
    name = config.getoption("hosts")
    if name not in embedded():
        if defects:
            raise pytest.UsageError("--lab-defect plants a defect in the embedded lab; it needs --hosts=lab")
        return
    if config.getoption("collectonly"):
        config.option.hosts = str(inventory_of(name))
        return
    try:
        lab = None if defects or config.getoption("phase") == "before" else kept(name)
        if lab is None:
            lab = start(name, defects, phase=config.getoption("phase"))
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
    came = "kept by pdgate lab up" if lab == kept(lab.inventory.rpartition("/")[2].removesuffix(".yaml")) else f"up in {lab.seconds:.1f} s"
    return f"lab: {', '.join(lab.hosts)} {came}{defects}"
