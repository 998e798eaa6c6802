"""An operator's inventory is read through Ansible; bad input gets one clear error with file, host and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdgate.connectors import CONNECTORS
from pdgate.deployment import open_deployment
from pdgate.inventory.connection import connection_from_vars, ssh_args_to_options, ssh_config_text
from pdgate.inventory.docs import inventory_readme
from pdgate.inventory.model import InventoryError

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = """
all:
  vars: {pd_kv_port: 28000, pd_http_port: 7000, pd_tp: 2}
  children:
    prefill: {hosts: {p0: {ansible_host: 10.0.0.1}}}
    decode: {hosts: {d0: {ansible_host: 10.0.0.2}}}
"""


def write(tmp_path: Path, text: str, name: str = "site.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_group_and_host_variables_make_one_model(tmp_path: Path) -> None:
    deployment = open_deployment(write(tmp_path, GOOD))
    assert [(engine.name, engine.role, engine.tp, engine.devices) for engine in deployment.engines] == [
        ("p0", "prefill", 2, (0, 1)), ("d0", "decode", 2, (0, 1)),
    ]  # fmt: skip


# A change of GOOD, and what the one-line error must hold.
BAD = {
    "a misspelt key": ("pd_tp: 2", "pd_tq: 2", ["site.yaml", "'p0'", "'pd_tq'", "did you mean 'pd_tp'?"]),
    "a wrong type": ("pd_tp: 2", "pd_tp: two", ["site.yaml", "'p0'", "'pd_tp'", "'two'"]),
    "a port out of range": ("pd_http_port: 7000", "pd_http_port: 70000", ["'pd_http_port'", "70000"]),
    "a missing role": ("decode:", "other:", ["group 'decode' is missing"]),
    "an empty group": ("{hosts: {d0: {ansible_host: 10.0.0.2}}}", "{hosts: {}}", ["group 'decode'"]),
    "a misspelt group": ("decode:", "decod:", ["group 'decode' is missing", "did you mean group 'decod'?"]),
    "an unknown connector": ("pd_tp: 2", "pd_tp: 2, pd_connector: MooncakeConectorV1", ["'pd_connector'", "did you mean 'MooncakeConnectorV1'?"]),
    "a missing port": ("pd_kv_port: 28000, ", "", ["'p0'", "'pd_kv_port' is missing"]),
    "engines that overlap": ("ansible_host: 10.0.0.2", "ansible_host: 10.0.0.1", ["overlap", "HTTP port 7000", "'pd_http_port'"]),
    "engines on one URL": ("ansible_host: 10.0.0.2", "ansible_host: 10.0.0.1, ansible_port: 23", ["overlap", "http://10.0.0.1:7000"]),
    "an unknown expectation": ("pd_tp: 2", "pd_tp: 2, pd_expect: {deadline: 3}", ["'pd_expect.deadline'"]),
    "devices that do not fit": ("pd_tp: 2", "pd_tp: 2, pd_devices: 0-6", ["'pd_devices' names 7 devices", "needs 2"]),
    "one restart for two engines": ("pd_tp: 2", "pd_tp: 2, pd_dp_local: 2, pd_restart: bash r.sh", ["site.yaml", "'p0'", "'pd_restart'", "{rank}"]),
    "a name that is no range": ("pd_tp: 2", "pd_tp: 2, pd_devices: 0..7", ["'pd_devices'", "0-7"]),
    "an unsupported connection": ("ansible_host: 10.0.0.1", "ansible_connection: winrm", ["'p0'", "winrm", "not supported"]),
    "a vaulted key": ("pd_tp: 2", 'pd_tp: 2, pd_model: !vault "$ANSIBLE_VAULT;1.1;AES256\\n3131"', ["'pd_model'", "vault password"]),
    "a host with two roles": ("{d0: {ansible_host: 10.0.0.2}}", "{p0: {}}", ["'p0' is in the groups", "same ansible_host"]),
    "broken YAML": ("children:", "children: [", ["site.yaml"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(tmp_path: Path, case: str) -> None:
    old, new, expected = BAD[case]
    assert old in GOOD
    with pytest.raises(InventoryError) as error:
        open_deployment(write(tmp_path, GOOD.replace(old, new)))
    message = str(error.value)
    assert all(part in message for part in expected), message
    assert "\n" not in message


def test_a_wrong_name_is_answered_with_the_near_miss() -> None:
    with pytest.raises(InventoryError, match="did you mean 'lab'"):
        open_deployment("lap")


def test_unicode_names_are_taken(tmp_path: Path) -> None:
    deployment = open_deployment(write(tmp_path, GOOD.replace("p0", "präfill-一")))
    assert deployment.engines[0].host == "präfill-一"
    assert deployment.hosts["präfill-一"].connection.testinfra_spec("/c").startswith("ssh://pr%C3%A4fill-")


def test_templated_values_are_rendered(tmp_path: Path) -> None:
    text = GOOD.replace("ansible_host: 10.0.0.1", 'ansible_host: "10.0.0.{{ 4 + 5 }}"')
    assert open_deployment(write(tmp_path, text)).hosts["p0"].address == "10.0.0.9"


def test_ini_and_group_vars_are_read(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("pd_kv_port: 28000\npd_http_port: 7000\n")
    write(tmp_path, "[prefill]\np[0:1] ansible_host=10.0.0.1\n[prefill:vars]\npd_machine=\n", "x.txt")
    write(tmp_path, "[prefill]\np0 ansible_host=10.0.0.1\n[decode]\nd[0:1]\n", "hosts.ini")
    deployment = open_deployment(str(tmp_path / "hosts.ini"))
    assert [engine.name for engine in deployment.engines] == ["p0", "d0", "d1"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("a2-1p1d", [(30000, 30007)]),
        ("a3-2p1d", [(36100, 36115), (36200, 36215)]),
        ("one-host", [(28100, 28103)]),
        ("gpu-nixl", [(5600, 5600), (5600, 5600)]),
        ("kubernetes", [(36000, 36007)]),
        ("lab", [(28000, 28007)]),
    ],
)
def test_every_shipped_inventory_is_valid_as_it_stands(name: str, groups: list[tuple[int, int]]) -> None:
    deployment = open_deployment(name)
    found: dict[str, list[int]] = {}
    for engine in deployment.engines:
        for claim in CONNECTORS[engine.connector].port_group(engine):
            found.setdefault(engine.host, []).append(claim.port)
    assert [(min(ports), max(ports)) for ports in found.values()] == groups


def test_a_decode_group_over_two_hosts_counts_its_ranks_globally() -> None:
    deployment = open_deployment("a3-2p1d")
    ranks = {engine.host: engine.dp_ranks for engine in deployment.engines if engine.role == "decode"}
    assert [first for first, *_ in ranks.values()] != [0, 0]
    assert len({rank for engine in deployment.engines if engine.role == "decode" for rank in engine.dp_ranks}) == 32


def test_the_documentation_is_generated_from_the_model() -> None:
    assert (ROOT / "inventories" / "README.md").read_text().rstrip() == inventory_readme().rstrip()


def test_jump_hosts_ports_users_and_keys_reach_ssh() -> None:
    connection = connection_from_vars("p0", {
        "ansible_host": "10.0.0.1", "ansible_port": 2222, "ansible_user": "ops", "ansible_ssh_private_key_file": "/k",
        "ansible_ssh_common_args": "-J bastion -o ServerAliveInterval=30", "ansible_become": True, "ansible_become_user": "root",
    })  # fmt: skip
    text = ssh_config_text([connection], "/cm")
    for line in (
        "HostName 10.0.0.1",
        "Port 2222",
        "User ops",
        "IdentityFile /k",
        "ProxyJump bastion",
        "ServerAliveInterval 30",
        "ControlPath /cm/%C",
    ):
        assert f"  {line}\n" in text
    assert text.count("ServerAliveInterval") == 1
    assert connection.testinfra_spec("/c") == "ssh://p0?sudo=true&sudo_user=root&ssh_config=/c&controlpersist=0"
    assert connection.shell_argv("/c") == ["ssh", "-F", "/c", "-T", "p0", "sudo -n -u root sh -s"]


def test_an_ssh_argument_that_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="-W"):
        ssh_args_to_options("-W host:22")


@pytest.mark.parametrize(
    ("variables", "argv"),
    [
        ({"ansible_connection": "docker", "ansible_host": "vllm", "ansible_user": "root"}, "docker exec -i -u root vllm sh -s"),
        ({"ansible_connection": "containers.podman.podman", "ansible_host": "vllm"}, "podman exec -i vllm sh -s"),
        (
            {"ansible_connection": "kubernetes.core.kubectl", "ansible_kubectl_pod": "p-0", "ansible_kubectl_namespace": "pd", "ansible_kubectl_container": "vllm"},
            "kubectl -n pd exec -i p-0 -c vllm -- sh -s",
        ),
        ({"ansible_connection": "local", "ansible_become": "yes"}, "sudo -n sh -s"),
    ],
)  # fmt: skip
def test_other_connections_are_honoured(variables: dict[str, str], argv: str) -> None:
    assert " ".join(connection_from_vars("x", variables).shell_argv("/c")) == argv
