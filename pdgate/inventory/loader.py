"""An inventory source becomes a Deployment; every complaint names file, host and key."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pdgate.inventory.ansible import members, read_inventory
from pdgate.inventory.connection import Connection, connection_from_vars
from pdgate.inventory.model import Deployment, Engine, Host, InventoryError, Proxy, Role
from pdgate.inventory.variables import Expect, HostVars, Load

GROUPS: tuple[Role, ...] = ("prefill", "decode", "both")


def find_source(name: str, folders: Iterable[Path]) -> Path:
    """`--hosts` value to an inventory path: a path as it stands, or a name found in one of `folders`.

    Raises InventoryError naming the near misses.
    """
    direct = Path(name)
    # A bare word is a name first: a folder of the same name in the current directory is no inventory.
    bare = direct.name == name and not direct.suffix
    if direct.exists() and not bare:
        return direct
    known: dict[str, Path] = {}
    for folder in folders:
        for entry in sorted(folder.glob("*")) if folder.is_dir() else []:
            if entry.suffix in (".yaml", ".yml", ".ini", "") and entry.name != "README.md":
                known.setdefault(entry.stem, entry)
    if name in known:
        return known[name]
    if direct.exists():
        return direct
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; known names: {', '.join(sorted(known)) or 'none'}"
    raise InventoryError(f"--hosts={name}: no such inventory file, directory or name{hint}")


def load_deployment(source: Path) -> Deployment:
    """Read and validate `source`.

    Raises InventoryError; nothing is guessed where the inventory is wrong.
    """
    inventory = read_inventory(source)
    hostvars: dict[str, dict[str, Any]] = inventory["_meta"]["hostvars"]
    groups: dict[str, list[str]] = {group: members(inventory, group) for group in (*GROUPS, "proxy")}
    ours = list(dict.fromkeys(host for group in groups.values() for host in group))
    if not hostvars:
        raise InventoryError(f"{source}: no host in it; put hosts into the groups prefill, decode and proxy")
    for group in ("prefill", "decode"):
        if not groups[group] and not groups["both"]:
            state = "is empty" if group in inventory else "is missing"
            near = difflib.get_close_matches(group, [g for g in inventory if g != "_meta"], n=1)
            hint = f"; did you mean group '{near[0]}'?" if near and group not in inventory else ""
            raise InventoryError(f"{source}: group '{group}' {state}; a PD deployment needs at least one host in it{hint}")
    variables = {name: _host_vars(source, name, hostvars[name]) for name in ours}
    hosts = {name: _host(source, name, hostvars[name], variables[name]) for name in ours}
    engines: list[Engine] = []
    for role in GROUPS:
        for name in groups[role]:
            taken = next((engine.role for engine in engines if engine.host == name), None)
            if taken:
                raise InventoryError(
                    f"{source}: host '{name}' is in the groups '{taken}' and '{role}'; give each role an inventory name "
                    "of its own with the same ansible_host"
                )
            engines += _engines(source, role, hosts[name], variables[name])
    proxies = [_proxy(source, hosts[name], variables[name]) for name in groups["proxy"]]
    deployment = Deployment(name=source.stem, source=str(source), hosts=hosts, engines=engines, proxies=proxies)
    _refuse_overlaps(deployment)
    _refuse_broken_dp_groups(deployment)
    return deployment


def _host_vars(source: Path, name: str, variables: dict[str, Any]) -> HostVars:
    given: dict[str, Any] = {}
    known = [f"pd_{field}" for field in HostVars.model_fields]
    for key, value in variables.items():
        if not key.startswith("pd_"):
            continue
        where = f"{_file_of(source, key)}: host '{name}': key '{key}'"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "inventories/README.md lists the known keys"
            raise InventoryError(f"{where} is unknown; {hint}")
        if isinstance(value, dict) and "__ansible_vault" in value:
            raise InventoryError(f"{where} is vaulted and cannot be read; give the vault password (ANSIBLE_VAULT_PASSWORD_FILE=…)")
        given[key.removeprefix("pd_")] = value
    try:
        ours = HostVars.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = "pd_" + ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        hint = ""
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(first["loc"][-1]), _fields_below(first["loc"]), n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise InventoryError(
            f"{_file_of(source, key.partition('.')[0])}: host '{name}': key '{key}': {first['msg'].lower()}{hint}, got {first['input']!r}"
        ) from None
    return ours


def _fields_below(loc: tuple[int | str, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {"expect": Expect, "load": Load}
    return list(models.get(str(loc[0]), HostVars).model_fields)


def _host(source: Path, name: str, raw: dict[str, Any], ours: HostVars) -> Host:
    try:
        connection = connection_from_vars(name, raw)
    except ValueError as error:
        raise InventoryError(f"{source}: host '{name}': {error}") from None
    target = str(raw.get("ansible_host", name))
    return Host(
        name=name,
        connection=connection,
        machine=ours.machine or _machine(connection, target),
        address=ours.address or _as_ip(target) or (target if connection.kind == "ssh" and "ansible_host" in raw else None),
        **{key: getattr(ours, key) for key in ("platform", "rack", "zone", "launch", "container", "env", "expect", "load", "plog", "toxiproxy", "kv_transport", "chaos")},
    )


def _machine(connection: Connection, target: str) -> str:
    if connection.kind == "ssh":
        port = dict(connection.ssh_options).get("Port")
        return f"{target}:{port}" if port else target
    if connection.kind == "local":
        return "localhost"
    return ":".join(part for part in (connection.kind, connection.context, connection.namespace, connection.name) if part)


def _as_ip(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _engines(source: Path, role: Role, host: Host, ours: HostVars) -> list[Engine]:
    def need(key: str, value: int | None, why: str) -> int:
        if value is None:
            raise InventoryError(f"{source}: host '{host.name}': key 'pd_{key}' is missing; {why}")
        return value

    http_port = need("http_port", ours.http_port, "it is the HTTP port of the host's first engine")
    per_rank = ours.tp * ours.pp * ours.pcp
    devices = ours.devices
    if devices is None and ours.platform.startswith("ascend"):
        devices = list(range(ours.dp_local * per_rank))
    if devices and len(devices) != ours.dp_local * per_rank:
        raise InventoryError(
            f"{_file_of(source, 'pd_devices')}: host '{host.name}': key 'pd_devices' names {len(devices)} devices, but "
            f"pd_dp_local {ours.dp_local} x tp*pp*pcp {per_rank} needs {ours.dp_local * per_rank}"
        )
    dp_size = ours.dp_size or ours.dp_rank_start + ours.dp_local
    ranks = range(ours.dp_rank_start, ours.dp_rank_start + ours.dp_local)
    if ranks.stop > dp_size:
        raise InventoryError(
            f"{_file_of(source, 'pd_dp_size')}: host '{host.name}': key 'pd_dp_size' is {dp_size}, but the host holds "
            f"the ranks {ranks.start}..{ranks.stop - 1}"
        )
    shared = {key: getattr(ours, key) for key in ("connector", "versions", "model", "api_key_env", "kv_port", "tp", "pp", "pcp")}
    shared |= {"dp_mode": ours.dp_mode, "dp_rpc_port": ours.dp_rpc_port, "scheme": ours.api_scheme}
    instances = [tuple(ranks)] if ours.dp_mode == "internal" else [(rank,) for rank in ranks]
    if ours.restart and len(instances) > 1 and "{rank}" not in ours.restart:
        raise InventoryError(
            f"{_file_of(source, 'pd_restart')}: host '{host.name}': key 'pd_restart' is '{ours.restart}', which starts the same for each of "
            f"{len(instances)} engines; {{rank}} in it becomes the engine's first DP rank"
        )
    engines = []
    for index, dp_ranks in enumerate(instances):
        share = len(dp_ranks) * per_rank
        log = ours.log.replace("{rank}", str(dp_ranks[0])) if ours.log else None
        engines.append(
            Engine(
                name=f"{host.name}/dp{dp_ranks[0]}" if len(instances) > 1 or dp_size > 1 else host.name,
                host=host.name,
                role=role,
                http_port=http_port + index,
                dp_size=dp_size,
                dp_ranks=dp_ranks,
                devices=tuple((devices or [])[index * share : (index + 1) * share]),
                address=host.address,
                log=log,
                restart=ours.restart.replace("{rank}", str(dp_ranks[0])) if ours.restart else None,
                **shared,
            )
        )
    return engines


def _proxy(source: Path, host: Host, ours: HostVars) -> Proxy:
    if ours.proxy_port is None:
        raise InventoryError(f"{source}: host '{host.name}': key 'pd_proxy_port' is missing; a host of group 'proxy' needs it")
    return Proxy(
        name=f"{host.name}:{ours.proxy_port}", host=host.name, address=host.address, port=ours.proxy_port,
        scheme=ours.api_scheme, kind=ours.proxy_kind, path=ours.proxy_path, api_key_env=ours.api_key_env, log=ours.proxy_log,
        restart=ours.proxy_restart,
    )  # fmt: skip


def _refuse_overlaps(deployment: Deployment) -> None:
    """Two engines of one machine must not be declared on the same HTTP port or device."""
    for machine in deployment.machines:
        taken: dict[tuple[str, int], str] = {}
        for engine in deployment.engines_on(machine):
            claims = [("HTTP port", engine.http_port)] + [("device", device) for device in engine.devices]
            for what, value in claims:
                if value is None:
                    continue
                other = taken.setdefault((what, value), engine.name)
                if other != engine.name:
                    key = "pd_http_port" if what == "HTTP port" else "pd_devices"
                    raise InventoryError(
                        f"{_file_of(Path(deployment.source), key)}: host '{engine.host}': key '{key}': engines '{other}' and "
                        f"'{engine.name}' overlap on machine {machine}: both use {what} {value}"
                    )

    urls: dict[str, str] = {}
    for engine in deployment.engines:
        url = deployment.url_of(engine)
        other = urls.setdefault(url, engine.name) if url else engine.name
        if other != engine.name:
            raise InventoryError(
                f"{_file_of(Path(deployment.source), 'pd_http_port')}: host '{engine.host}': key 'pd_http_port': engines '{other}' and "
                f"'{engine.name}' overlap: both are {url}"
            )


def _refuse_broken_dp_groups(deployment: Deployment) -> None:
    """A DP group spread over hosts must hold each global rank once."""
    for role in GROUPS:
        spread = [e for e in deployment.engines if e.role == role and e.dp_size > _local_ranks(deployment, e.host)]
        held: dict[int, str] = {}
        for engine in spread:
            for rank in engine.dp_ranks:
                other = held.setdefault(rank, engine.host)
                if other != engine.host:
                    raise InventoryError(
                        f"{_file_of(Path(deployment.source), 'pd_dp_rank_start')}: host '{engine.host}': key "
                        f"'pd_dp_rank_start': hosts '{other}' and '{engine.host}' overlap: both hold global DP rank {rank}"
                    )


def _local_ranks(deployment: Deployment, host: str) -> int:
    return sum(len(engine.dp_ranks) for engine in deployment.engines if engine.host == host)


def _file_of(source: Path, key: str) -> str:
    """The file below `source` that most likely holds `key`, for the error message."""
    candidates = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    folder = source.parent if source.is_file() else source
    for vars_dir in ("group_vars", "host_vars"):
        candidates += sorted(path for path in (folder / vars_dir).rglob("*") if path.is_file())
    for path in candidates:
        try:
            if key in path.read_text(errors="replace"):
                return str(path)
        except OSError:
            continue
    return str(source)


assert set(GROUPS) == set(get_args(Role))
