"""The environment of the running engines against documented defaults, the operator's wishes and the installed version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from pdgate.connectors import connector_of, parse_version
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import Finding, NotRun, Severity
from pdgate.rules.running import need_running

DATA = Path(__file__).with_name("data")


class Default(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    default: str
    also: list[str] = Field(default_factory=list)
    severity: Severity
    why: str
    source: str


class Template(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: str
    source: str
    values: dict[str, list[str]]


class Policy(BaseModel):
    model_config = ConfigDict(extra="forbid")

    defaults: list[Default]
    templates: list[Template]


@cache
def policy() -> Policy:
    return Policy.model_validate(yaml.safe_load((DATA / "environment.yaml").read_text()))


def follows_the_policy(engine: Engine, deployment: Deployment, facts: HostFacts) -> Iterator[Finding]:
    """Each variable has its documented default or the value the operator declares; deviations are worded with reason."""
    running = need_running(engine, facts)
    environment = running.environment
    wanted = deployment.host_of(engine).env
    for name, declared in wanted.items():
        if environment.get(name) != declared:
            yield Finding(
                target=engine.name, expected=f"{name}={declared} (pd_env)", seen=_setting(name, environment.get(name)),
                why="the operator declared this value for a reason, and the running process does not have it",
                remedy="correct the launch script and restart the engine, or correct pd_env", severity="major",
            )  # fmt: skip
    for entry in policy().defaults:
        value = environment.get(entry.name)
        if entry.name in wanted or value is None or value in (entry.default, *entry.also):
            continue
        template = _vendor_template(engine.model or running.args.get("model", ""), entry.name, value)
        yield Finding(
            target=engine.name,
            expected=f"{entry.name}={entry.default} (default, {entry.source})",
            seen=_setting(entry.name, value) + (f", which is the vendor's own template: {template}" if template else ""),
            why=entry.why,
            remedy=f"unset {entry.name}, or declare it in pd_env with the reason as a comment",
            severity="note" if template else entry.severity,
        )


def _vendor_template(model: str, name: str, value: str) -> str | None:
    for template in policy().templates:
        if re.search(template.models, model) and value in template.values.get(name, []):
            return template.source
    return None


def names_are_known(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """Every VLLM_* name the engine was started with is one its installed version reads."""
    running = need_running(engine, facts)
    vllm = _known_names("vllm", running.versions.get("vllm"))
    if vllm is None:
        raise UnknownFact(f"{engine.name}: the vLLM version is unknown (no dist-info seen, no pd_versions.vllm in the inventory)")
    known, origin = vllm
    ascend = _known_names("vllm-ascend", running.versions.get("vllm_ascend"))
    if ascend:
        known, origin = known | ascend[0], f"{origin}, {ascend[1]}"
    for name in sorted(running.environment):
        if not name.startswith("VLLM_") or name in known:
            continue
        if name.startswith("VLLM_ASCEND_") and ascend is None:
            continue  # belongs to a plugin whose version, and so whose names, are not known here
        elsewhere = _versions_knowing(name)
        yield Finding(
            target=engine.name,
            expected=f"only VLLM_* names that {origin} reads",
            seen=f"{_setting(name, running.environment[name])}; " + (f"known to {elsewhere}" if elsewhere else "known to no version"),
            why="the setting has no effect: whoever wrote it believes in a timeout or a patch that is not there",
            remedy=f"remove {name} from the launch script, or use its successor in this version",
        )


@cache
def _known_names(project: str, installed: str | None) -> tuple[frozenset[str], str] | None:
    """Names of the nearest version at or below the installed one (else the oldest), and how to word that."""
    version = parse_version(installed)
    if version is None:
        return None
    tables = _tables(project)
    at_or_below = [known for known in tables if known <= version]
    chosen = max(at_or_below, default=min(tables))
    wording = f"{project} {installed}" if chosen == version else f"{project} {installed} (by the names of {chosen})"
    return tables[chosen], wording


@cache
def _tables(project: str) -> dict[Version, frozenset[str]]:
    tables = {}
    for path in (DATA / "names").glob(f"{project}-[0-9]*.txt"):
        names = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        tables[Version(path.stem.removeprefix(f"{project}-"))] = frozenset(names)
    return tables


def _versions_knowing(name: str) -> str:
    return ", ".join(
        f"{project} {version}" for project in ("vllm", "vllm-ascend") for version in sorted(_tables(project))
        if name in _tables(project)[version]
    )  # fmt: skip


def timers_are_in_order(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """RDMA retry < transfer timeout < abort timeout: a timer that is cut short by a lower one reports the wrong thing."""
    connector = connector_of(engine.connector)
    abort, transfer = connector.timer("abort", engine), connector.timer("transfer", engine)
    if transfer is None:
        raise NotRun(f"{engine.connector} has no transfer timeout of its own")
    environment = need_running(engine, facts).environment
    try:
        retry_s = 4.096e-6 * 2 ** float(environment.get("HCCL_RDMA_TIMEOUT", "20")) * float(environment.get("HCCL_RDMA_RETRY_CNT", "7"))
        # The connector derives its default from the two variables, so only an explicit value can be too short.
        transfer_s = transfer.seconds(environment) if transfer.variable in environment else retry_s + 3
        abort_s = abort.seconds(environment) if abort else None
    except ValueError as error:
        raise UnknownFact(f"{engine.name}: {error}") from None
    if transfer_s <= retry_s:
        yield Finding(
            target=engine.name,
            expected=f"{transfer.variable} above the RDMA retry time of {retry_s:.1f} s",
            seen=f"{transfer_s:.1f} s ({_setting(transfer.variable, environment.get(transfer.variable))})",
            why="transfers are given up while RDMA still retries: 'stream sync timeout' 507046 instead of the real cause",
            remedy=f"unset {transfer.variable}, or set it above 4.096 us x 2^HCCL_RDMA_TIMEOUT x HCCL_RDMA_RETRY_CNT",
            reference="HIXL FAQ; vllm-ascend kv_transfer/utils/utils.py",
        )
    declared = abort is not None and abort.variable in environment and engine.serves_prefill
    if abort is not None and abort_s is not None and declared and abort_s <= transfer_s:
        yield Finding(
            target=engine.name,
            expected=f"{abort.variable} above the transfer timeout of {transfer_s:.1f} s",
            seen=_setting(abort.variable, environment.get(abort.variable)),
            why="P recycles the blocks while D may still read them: wrong text with status 200 (vllm-ascend#15420)",
            remedy=f"set {abort.variable} well above the transfer timeout plus D's queue time; 480 is the default",
        )


def _setting(name: str, value: str | None) -> str:
    return f"{name} is not set" if value is None else f"{name}={value}"
