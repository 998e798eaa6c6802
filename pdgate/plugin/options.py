"""`--hosts` and the other options: resolved early, so that testinfra and its `host` fixture see plain host specs."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

from pdgate.deployment import open_deployment
from pdgate.inventory.model import InventoryError
from pdgate.plugin.run import RUN_KEY, SAVED_VERDICT, Run, is_bundle, load_bundle_deployment, load_run
from pdgate.serving.golden import GoldenError, load_golden
from pdgate.verdict import WaiverError, load_waivers

ROOT = Path(__file__).resolve().parent.parent.parent
HELP = (
    "pdgate judges a prefill/decode deployment: pytest --hosts=inventory.yaml (changes nothing on any host).\n"
    "Without a cluster: pytest --hosts=lab starts an embedded one; pytest tests runs pdgate's own tests."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdgate", "pdgate (with --hosts=INVENTORY, a name in inventories/, or a saved bundle)")
    group.addoption("--phase", choices=["before", "after"], default="after", help="before the engines start, or after (default)")
    group.addoption("--bundle", metavar="DIR", help="where the run's bundle goes (default: reports/out/<time>)")
    group.addoption("--waivers", metavar="FILE", help="YAML list of accepted findings: check, target, reason, approver, expires")
    group.addoption("--host-timeout", type=float, default=30.0, metavar="S", help="deadline of every remote call, seconds (30)")
    group.addoption(
        "--chaos", action="store_true", help="second half of the consent to faults (pytest chaos …); the first is pd_chaos in the inventory"
    )
    group.addoption("--gentle", action="store_true", help="single requests only: no load, no sweep, no cancellation but one")
    group.addoption("--golden", metavar="FILE", help="golden answers an earlier run has kept (golden.json), instead of learning them")
    load = parser.getgroup("pdgate load", "pdgate load (instead of pd_load in the inventory; chaos takes rate and seed)")
    load.addoption("--load-rate", type=float, metavar="N", help="requests per second; 0: no load")
    load.addoption("--load-seconds", type=float, metavar="S", help="how long; 0: no load")
    load.addoption("--load-seed", type=int, metavar="N", help="the same seed, the same schedule")
    load.addoption("--load-workers", type=int, default=0, metavar="N", help="load processes here beside a master (0: one process, no master)")
    load.addoption(
        "--load-remote-workers", type=int, default=0, metavar="N", help="wait for N workers of other machines: pdgate load-worker HOST:PORT"
    )
    load.addoption("--load-master", default="127.0.0.1:0", metavar="ADDR:PORT", help="where the master listens for workers (a free port of 127.0.0.1)")
    group.addoption("--cleanup", action="store_true", help="pytest chaos --cleanup: undo what an earlier chaos run has left, run nothing; needs no --chaos")
    group.addoption("--break-lock", action="store_true", help="with --cleanup: the chaos run of another machine that holds the hosts is dead, you know it")
    group.addoption("--chaos-budget", type=float, default=3600.0, metavar="S", help="no experiment begins after so many seconds (3600)")
    group.addoption(
        "--allow-outage", action="store_true", help="experiments may take the last healthy P or D: the deployment then serves nobody for a while"
    )
    group.addoption("--campaign", type=int, default=0, metavar="N", help="pytest chaos --chaos: a random campaign of N faults")
    group.addoption("--chaos-seed", type=int, metavar="N", help="of the campaign: the same seed, the same faults (--load-seed is the load's)")
    group.addoption("--allow-unreachable", action="store_true", help="judge the rest when a host cannot be reached")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pdgate_check(info): a check of the gate; made by pdgate.plugin.check")
    if hasattr(config, "workerinput"):
        bundle = config.workerinput.get("pdgate_bundle")
        if bundle:
            config.stash[RUN_KEY] = load_run(Path(bundle))
        return
    hosts = config.getoption("hosts")
    if hosts is None:
        if config.args and all(_is_ours(config, arg) for arg in config.args) and not _only_informs(config):
            raise pytest.UsageError(HELP)
        return
    if "://" in hosts or ("," in hosts and not Path(hosts).exists()):
        return  # testinfra's own host specs
    _check_numbers(config)
    try:
        config.stash[RUN_KEY] = run = _open_run(config, hosts)
    except (InventoryError, WaiverError) as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("collectonly"):
        return  # nothing is contacted and nothing is kept
    run.save()
    # pytest's own reporters write into the bundle, unless they were pointed elsewhere.
    config.option.xmlpath = config.getoption("xmlpath") or str(run.bundle / "junit.xml")
    if config.pluginmanager.hasplugin("allure_pytest"):
        config.option.allure_report_dir = config.getoption("allure_report_dir") or str(run.bundle / "allure-results")
    specs = [host.connection.testinfra_spec(run.ssh_config) for host in run.deployment.hosts.values()]
    config.option.hosts = ",".join(dict.fromkeys(specs))
    if config.getoption("dist", "no") == "load":
        # Service checks share the deployment and its counters: they stay together, in order, on one worker.
        config.option.dist = "loadgroup"


def _check_numbers(config: pytest.Config) -> None:
    """Raises UsageError for a number that cannot be meant."""
    for option in ("--load-rate", "--load-seconds", "--load-seed", "--load-workers", "--load-remote-workers", "--campaign", "--chaos-budget", "--host-timeout"):
        value = config.getoption(option.removeprefix("--").replace("-", "_"))
        if value is not None and not 0 <= value < float("inf"):
            raise pytest.UsageError(f"{option}={value:g}: a number from 0 on is expected")
    if config.getoption("golden"):
        try:
            load_golden(Path(config.getoption("golden")))
        except GoldenError as error:
            raise pytest.UsageError(f"--golden: {error}") from None


def _open_run(config: pytest.Config, hosts: str) -> Run:
    source = Path(hosts)
    offline = source.is_dir() and is_bundle(source)
    deployment = load_bundle_deployment(source) if offline else open_deployment(hosts)
    waivers = load_waivers(Path(config.getoption("waivers"))) if config.getoption("waivers") else []
    bundle = _new_bundle(config)
    run = Run(
        deployment, bundle, phase=config.getoption("phase"), offline=offline, timeout_s=config.getoption("host_timeout"),
        waivers=waivers,
    )  # fmt: skip
    if offline:
        for folder in ("facts", "raw"):
            if (source / folder).is_dir():
                shutil.copytree(source / folder, bundle / folder, dirs_exist_ok=True)
        if (source / "verdict.json").is_file():
            shutil.copy(source / "verdict.json", bundle / SAVED_VERDICT)
    return run


def _new_bundle(config: pytest.Config) -> Path:
    given = config.getoption("bundle")
    if config.getoption("collectonly"):
        return Path("nowhere")
    if given:
        bundle = Path(given).absolute()
        if bundle.is_dir() and any(bundle.iterdir()):
            raise InventoryError(f"--bundle={given}: the folder is not empty; a bundle is never overwritten")
    else:
        out = ROOT / "reports" / "out"
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        bundle = next(path for n in range(1000) if not (path := out / (f"{stamp}-{n}" if n else stamp)).exists())
    bundle.mkdir(parents=True, exist_ok=True)
    return bundle


def _is_ours(config: pytest.Config, arg: str) -> bool:
    path = Path(config.invocation_params.dir, arg.split("::")[0]).resolve()
    return any(path.is_relative_to(ROOT / name) for name in ("suites", "chaos"))


def _only_informs(config: pytest.Config) -> bool:
    return any(config.getoption(name, False) for name in ("help", "version", "markers", "showfixtures", "collectonly"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    run = node.config.stash.get(RUN_KEY, None)  # type: ignore[attr-defined]
    if run is not None:
        node.workerinput["pdgate_bundle"] = str(run.bundle)  # type: ignore[attr-defined]


def pytest_sessionstart(session: pytest.Session) -> None:
    """One probe per machine, before any check; an unreachable host is bad input unless it is allowed."""
    config = session.config
    run = config.stash.get(RUN_KEY, None)
    if run is None or run.offline or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    unreachable = [
        f"host '{facts.host}': {facts.identity.unknown}"
        for facts in run.collect().values()
        if (facts.identity.unknown or "").startswith("host unreachable")
    ]
    if unreachable and not config.getoption("allow_unreachable"):
        raise pytest.UsageError(
            f"{run.deployment.source}: {'; '.join(unreachable)}; check ansible_host and its key, or judge the rest with --allow-unreachable"
        )


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = config.stash.get(RUN_KEY, None)
    if run is None:
        return []
    deployment = run.deployment
    roles = ", ".join(
        f"{sum(engine.role == role for engine in deployment.engines)} {role}"
        for role in ("prefill", "decode", "both")
        if any(engine.role == role for engine in deployment.engines)
    )
    saved = " (saved facts, nothing is contacted)" if run.offline else ""
    return [
        f"pdgate: {deployment.name}: {len(deployment.machines)} machines, engines: {roles}; phase {run.phase}{saved}",
        f"bundle: {run.bundle}",
    ]
