"""inventories/README.md, made from the model so that it cannot lag behind."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pdgate.inventory.variables import Expect, HostVars, Load

HEAD = """# Inventories

pdgate reads an **Ansible inventory** (YAML, INI, a directory with `group_vars/`, ranges, vault) through ansible-core.
The groups `prefill`, `decode` (or `both`) and `proxy` say what a host does; plain Ansible variables say how to reach it
(`ansible_host`, `ansible_port`, `ansible_user`, `ansible_ssh_private_key_file`, `ansible_ssh_common_args` with jump hosts,
`ansible_become`, `ansible_connection`: ssh, local, docker, podman, kubectl). Everything else is a flat `pd_` variable, so that
group and host precedence work. P and D on one machine are two inventory names with the same `ansible_host`.

`pdgate inventory FILE` validates one and shows the engines and port groups it describes. An unknown key, a wrong type or an
overlap is an error that names file, host and key. This page is generated: `pdgate inventory keys > inventories/README.md`.

| file | what it shows |
| --- | --- |
| lab.yaml, lab-router.yaml | the embedded lab; its engines behind a real vllm-router |
| a2-1p1d.yaml | Atlas A2, one prefill and one decode host, DP4 x TP2 a node, HTTP 7000-7003, proxy 1999 |
| a3-2p1d.yaml | Atlas A3, two prefill hosts, one decode DP group over two hosts |
| one-host.ini | P and D on one host, in INI |
| gpu-nixl.yaml | GPU hosts with NixlConnector |
| kubernetes/ | pods reached through kubectl, as a directory with group_vars |
"""


def inventory_readme() -> str:
    """The whole page."""
    parts = [HEAD, "\n## Keys\n", _table(HostVars, "pd_"), "\n## Keys of `pd_expect`\n", _table(Expect, ""),
             "\n## Keys of `pd_load`\n", _table(Load, "")]  # fmt: skip
    return "\n".join(parts).rstrip()


def _table(model: type[BaseModel], prefix: str) -> str:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        rows.append(f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {field.description} |")
    return "\n".join(rows)


def _type(field: FieldInfo) -> str:
    return _words(field.annotation)


def _words(kind: Any) -> str:
    options = get_args(kind)
    if get_origin(kind) is not None and str(get_origin(kind)) == "typing.Literal":
        return " / ".join(f"`{option}`" for option in options)
    named = {int: "number", float: "number", str: "text", bool: "true / false", Expect: "mapping", Load: "mapping"}
    if kind in named:
        return named[kind]
    if options and get_origin(kind) is dict:
        return "mapping"
    if options and get_origin(kind) is list:
        return "list or range"
    inner = [option for option in options if option is not type(None) and not isinstance(option, FieldInfo)]
    return _words(inner[0]) if inner else "text"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined or value in ({}, []) or isinstance(value, BaseModel):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
