"""Reading an Ansible inventory through ansible-core's own commands: never a parser of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pdgate.inventory.model import InventoryError

TIMEOUT_S = 60
# The only variables pdgate reads, so the only ones that need their templates rendered.
READ = re.compile(r"^(pd_|ansible_)")


def read_inventory(source: Path) -> dict[str, Any]:
    """`ansible-inventory --list` as a dict, with templated `pd_*` and `ansible_*` values rendered.

    Raises InventoryError with ansible's own reason when the source cannot be read or matches no host.
    """
    listing = _run(["ansible-inventory", "-i", str(source), "--list"], source)
    inventory: dict[str, Any] = json.loads(listing)
    hostvars: dict[str, dict[str, Any]] = inventory.get("_meta", {}).get("hostvars", {})
    for host in _hosts(inventory):
        hostvars.setdefault(host, {})
    templated = {
        host: {key: value for key, value in variables.items() if READ.match(key) and "{{" in json.dumps(value)}
        for host, variables in hostvars.items()
    }
    if any(templated.values()):
        _render(source, hostvars, templated)
    inventory["_meta"] = {"hostvars": hostvars}
    return inventory


def members(inventory: dict[str, Any], group: str) -> list[str]:
    """Hosts of a group and its children, in inventory order."""
    entry = inventory.get(group, {})
    found = list(entry.get("hosts", []))
    for child in entry.get("children", []):
        found += [host for host in members(inventory, child) if host not in found]
    return found


def _hosts(inventory: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(host for group in inventory if group != "_meta" for host in members(inventory, group)))


def _render(source: Path, hostvars: dict[str, dict[str, Any]], templated: dict[str, dict[str, Any]]) -> None:
    names = sorted({key for variables in templated.values() for key in variables})
    message = "{{ {" + ", ".join(f"'{name}': {name} | default(None)" for name in names) + "} }}"
    output = _run(
        # Nothing is contacted, and connection plugins the controller lacks are not needed.
        [
            "ansible",
            "all",
            "-i",
            str(source),
            "-e",
            "ansible_connection=local ansible_become=false",
            "-m",
            "ansible.builtin.debug",
            "-a",
            f"msg={message}",
        ],
        source,
    )
    for host, answer in _answers(output).items():
        for key in templated.get(host, {}):
            hostvars[host][key] = answer["msg"][key]


def _answers(output: str) -> dict[str, dict[str, Any]]:
    """`host | SUCCESS => {…}` of ansible's minimal callback."""
    answers = {}
    for match in re.finditer(r"^(\S+) \| SUCCESS => (?=\{)", output, re.MULTILINE):
        answers[match[1]], _ = json.JSONDecoder().raw_decode(output, match.end())
    return answers


def _run(argv: list[str], source: Path) -> str:
    program = _program(argv[0])
    env = os.environ | {
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
        "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true",
        "ANSIBLE_STDOUT_CALLBACK": "minimal",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_VERBOSITY": "0",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "false",
        # Group names with dashes are the operator's business, not worth a warning on every run.
        "ANSIBLE_TRANSFORM_INVALID_GROUP_CHARS": "ignore",
    }
    try:
        done = subprocess.run([program, *argv[1:]], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise InventoryError(f"{source}: {argv[0]} did not answer within {TIMEOUT_S} s; is a dynamic source hanging?") from None
    if done.returncode != 0:
        raise InventoryError(f"{source}: {_reason(done.stderr or done.stdout)}")
    return done.stdout


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise InventoryError(f"'{name}' is not installed; install ansible-core (pip install ansible-core)")
    return found


def _reason(stderr: str) -> str:
    """The telling line of ansible's error output."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if "vault" in stderr.lower() and "secret" in stderr.lower():
        return "a vaulted file cannot be read; give the vault password (ANSIBLE_VAULT_PASSWORD_FILE=…)"
    for marker in ("YAML parsing failed", "Failed to parse inventory:", "Unable to parse", "[ERROR]", "ERROR!"):
        for number, line in enumerate(lines):
            if marker in line:
                text = line.partition("]: ")[2] or line
                origin = next((found for found in lines[number:] if found.startswith("Origin:")), "")
                return f"{text} ({origin})" if origin else text
    return lines[-1] if lines else "ansible-inventory failed without a word"
