"""One probe per machine, all machines at once, each bounded: facts out, nothing changed."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pdgate.facts.model import Clock, HostFacts, Section, unknown_host
from pdgate.facts.parse import ParseError
from pdgate.facts.parse.hccn import parse_hccn
from pdgate.facts.parse.host import parse_containers, parse_leftovers, parse_log, parse_zone
from pdgate.facts.parse.npu_smi import parse_npu_smi
from pdgate.facts.parse.procfs import (
    parse_addresses,
    parse_engines,
    parse_identity,
    parse_owners,
    parse_port_settings,
    parse_processes,
    parse_tcp,
)  # fmt: skip
from pdgate.facts.parse.sections import RawSection, split_sections
from pdgate.facts.shell import HostUnreachable, Shells
from pdgate.inventory.model import Deployment, Host

PROBE = Path(__file__).with_name("probe.sh").read_text()
AT_ONCE = 32
TOOL_TIMEOUT_S = 8
T = TypeVar("T")


def collect(deployment: Deployment, shells: Shells, quick: bool = False) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """Probe every machine of the deployment: (facts, raw output) by machine name. Never raises for a bad host.

    `quick`: processes and sockets only; devices, containers, files and logs are then unknown.
    """
    machines = deployment.machines
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(machines))) as pool:
        results = list(pool.map(lambda name: _probe(deployment, machines[name], shells, quick), machines))
    return (
        dict(zip(machines, (facts for facts, _ in results), strict=True)),
        dict(zip(machines, (raw for _, raw in results), strict=True)),
    )


def _probe(deployment: Deployment, hosts: list[Host], shells: Shells, quick: bool) -> tuple[HostFacts, str]:
    host, nonce = hosts[0], secrets.token_hex(6)
    collected = time.time()
    try:
        result, offset = shells.run_timed(host.connection, _script(deployment, hosts, nonce, quick))
    except HostUnreachable as error:
        return unknown_host(host.machine, host.name, collected, f"host unreachable: {error}"), str(error)
    sections, complete = split_sections(result.stdout, nonce)
    facts = parse_facts(host, collected, time.time() - collected, sections, offset=offset, complete=complete)
    return facts, result.stdout + (f"\n--- stderr\n{result.stderr}" if result.stderr else "")


def _script(deployment: Deployment, hosts: list[Host], nonce: str, quick: bool) -> str:
    machine = hosts[0].machine
    engines = deployment.engines_on(machine)
    devices = sorted({device for engine in engines for device in engine.devices})
    launch = list(dict.fromkeys(host.launch for host in hosts if host.launch))
    declared = [unit.log for unit in engines] + [proxy.log for proxy in deployment.proxies_on(machine)]
    logs = list(dict.fromkeys(path for path in declared if path))
    parameters = {
        "NONCE": nonce, "DEVICES": " ".join(map(str, devices)), "LAUNCH": "\n".join(launch), "LOGS": "\n".join(logs),
        "TOOL_TIMEOUT": str(TOOL_TIMEOUT_S), "QUICK": "yes" if quick else "",
    }  # fmt: skip
    return "\n".join(f"{key}={shlex.quote(value)}" for key, value in parameters.items()) + "\n" + PROBE


def parse_facts(host: Host, collected: float, duration: float, raw: dict[str, RawSection], *, offset: Any, complete: bool) -> HostFacts:
    """Sections to facts. A section that failed, is missing or cannot be parsed is unknown with its reason."""
    missing = "the probe never got to this section" if not complete else "not looked at"

    def section(name: str, parse: Callable[[str], T]) -> Section[T]:
        found = raw.get(name)
        reason = found.unknown() if found else missing
        if reason or found is None:
            return Section[T](unknown=reason)
        try:
            return Section[T](value=parse(found.text))
        except (ParseError, ValueError, KeyError, IndexError) as error:
            return Section[T](unknown=f"section '{name}' was not understood: {error}")

    identity = section("identity", parse_identity)
    engines = section("engines", parse_engines)
    owners = section("owners", parse_owners)

    def listeners(text: str) -> list[Any]:
        found = parse_tcp(text, owners.get(), identity.value.netns if identity.value else None)
        for netns, table in (engines.value[2] if engines.value else {}).items():
            found += parse_tcp(table, owners.get(), netns)
        return found

    def named(prefix: str, parse: Callable[[str], T]) -> dict[str, Section[T]]:
        paths = [name.removeprefix(f"{prefix}:") for name in raw if name.startswith(f"{prefix}:")]
        return {path: _unreadable(section(f"{prefix}:{path}", parse), path) for path in paths}

    sockets = section("sockets", listeners) if owners.known else Section[list[Any]](unknown=f"socket owners: {owners.unknown}")
    values: dict[str, Any] = {
        "machine": host.machine, "host": host.name, "collected": collected, "duration_s": round(duration, 3),
        "identity": identity,
        "clock": section("zone", lambda text: Clock.model_validate({"offset_s": offset, **parse_zone(text)})),
        "ports": section("ports", parse_port_settings),
        "addresses": section("addresses", parse_addresses),
        "listeners": sockets,
        "processes": section("stats", lambda text: parse_processes(text, raw["cmdlines"].text, identity.get())),
        "engine_processes": _part(engines, 0),
        "roots": _part(engines, 1),
        "containers": section("containers", parse_containers),
        "leftovers": section("leftovers", parse_leftovers),
        "devices": section("hccn", parse_hccn),
        "npu": section("npu", parse_npu_smi),
        "cann": section("cann", str),
        "launch": named("launch", str),
        "logs": named("log", parse_log),
    }  # fmt: skip
    return HostFacts.model_validate({key: _plain(value) for key, value in values.items()})


def _unreadable(section: Section[T], path: str) -> Section[T]:
    if section.unknown and "@unreadable" in section.unknown:
        return Section[T](unknown=f"{path} is missing or not readable on the host")
    return section


def _part(section: Section[Any], index: int) -> Section[Any]:
    return Section[Any](value=section.value[index]) if section.value else Section[Any](unknown=section.unknown)


def _plain(value: Any) -> Any:
    """Generic sections as plain data, so that validation gives them their declared type."""
    if isinstance(value, Section):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
