"""Parsers take the formats that exist, and say so when they meet another."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tools import DeviceState, npu_smi_head
from pdgate.facts.parse import ParseError
from pdgate.facts.parse.hccn import parse_hccn
from pdgate.facts.parse.host import parse_containers, parse_leftovers, parse_zone
from pdgate.facts.parse.npu_smi import parse_npu_smi
from pdgate.facts.parse.procfs import parse_owners, parse_port_settings, parse_tcp
from pdgate.facts.parse.sections import split_sections
from pdgate.facts.parse.vllm_args import kv_transfer_config, parse_serve_args


def probe_lines(device: int, answers: dict[str, str], code: int = 0) -> str:
    lines = [f"@line {device} {query} {line}" for query, text in answers.items() for line in text.split("\n")]
    return "\n".join([*lines, *(f"@code {device} {query} {code}" for query in answers)])


def test_hccn_answers_of_a_device_become_one_device() -> None:
    (device,) = parse_hccn(probe_lines(3, DeviceState.healthy(3, 11).answers()))
    assert (device.link, device.net_health, device.tls_switch, device.netdetect) == ("UP", "Success", 0, "10.20.0.1")
    assert device.link_down is not None and device.counters["mac_rx_bad_pkt_num"] == 0
    assert device.counters["rx_full_drop_cnt"] == 0 and not device.failed


@pytest.mark.parametrize(("tag", "down"), [("devid 2", 7), ("device 2", None)])
def test_both_generations_of_link_stat_are_read(tag: str, down: int | None) -> None:
    lines = [f"[{tag}]current time        : Thu Jan  1 10:00:00 2026", f"[{tag}]link up count       : 8"]
    lines += [f"[{tag}]link down count     : {down}"] if down else []
    lines += [f"[{tag}]link change records :", f"[{tag}]    Thu Jan  1 09:00:00 2026    LINK UP"]
    (device,) = parse_hccn(probe_lines(2, {"link_stat": "\n".join(lines)}))
    assert (device.link_up, device.link_down) == (8, down)
    assert device.last_changes == ["Thu Jan  1 09:00:00 2026    LINK UP"]


@pytest.mark.parametrize("text", ["dev_id:0, tls switch[1](0:disable, 1:enable)", "device 0, tls switch[1], tls alarm [60]days"])
def test_the_tls_switch_is_read_from_both_wordings(text: str) -> None:
    (device,) = parse_hccn(probe_lines(0, {"tls": text}))
    assert device.tls_switch == 1


def test_a_refused_query_is_unknown_with_what_the_tool_said() -> None:
    (device,) = parse_hccn(probe_lines(0, {"stat": "This device does not support this cmd."}))
    assert device.counters == {} and "does not support" in device.failed["stat"]
    (device,) = parse_hccn(probe_lines(0, {"link": "Cmd failed"}, code=1))
    assert device.link is None and "exit code 1" in device.failed["link"]


def test_lines_of_devices_that_ran_side_by_side_may_be_mixed() -> None:
    first, second = (probe_lines(n, DeviceState.healthy(n, 1).answers()).split("\n") for n in (0, 1))
    mixed = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert [device.ip for device in parse_hccn(mixed)] == ["10.20.1.1", "10.20.1.2"]


def test_npu_smi_of_a2_has_one_chip_a_row_pair() -> None:
    text = npu_smi_head([0, 1]) + "| 1       0                 | 4242          | VLLM::Worker             | 3512                    |\n"
    table = parse_npu_smi(text)
    assert [(chip.npu, chip.phy_id, chip.health, chip.hbm_total_mb) for chip in table.chips] == [
        (0, None, "OK", 65536),
        (1, None, "OK", 65536),
    ]
    assert [(process.npu, process.pid) for process in table.processes] == [(1, 4242)]


def test_npu_smi_of_a3_has_two_chips_and_physical_ids(fixtures: Path) -> None:
    table = parse_npu_smi((fixtures / "npu_smi_a3.txt").read_text())
    assert [(chip.npu, chip.chip, chip.phy_id) for chip in table.chips] == [(4, 0, 8), (4, 1, 9)]
    assert [(process.npu, process.chip, process.pid) for process in table.processes] == [(4, 1, 777)]


def test_what_is_not_npu_smi_is_an_error() -> None:
    with pytest.raises(ParseError):
        parse_npu_smi("command not found")


def test_listening_sockets_of_both_families_get_their_owners() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0B004D0A:6D60 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0 100 0 0 10 0\n"
        "   1: 0B004D0A:9999 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 112 1 0 100 0 0 10 0\n"
        "   2: 00000000000000000000000000000000:1B58 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 113 1 0 100 0 0 10 0\n"
    )
    owners = parse_owners("/proc/7/fd:\nlrwx------ 1 root root 64 Jan 1 10:00 3 -> socket:[111]\n/proc/9/fd:\nl 3 -> socket:[113]\n")
    found = {(one.address, one.port): one.pid for one in parse_tcp(table, owners)}
    assert found == {("10.77.0.11", 28000): 7, ("::", 7000): 9}


def test_sections_keep_exit_codes_and_say_when_the_probe_stopped() -> None:
    output = "noise\n@@n begin a\nx\n\n@@n end a 0\n@@n begin b\n@absent tool\n\n@@n end b 127\n@@n begin c\nhalf"
    sections, complete = split_sections(output, "n")
    assert not complete
    assert sections["a"].text == "x" and sections["a"].unknown() is None
    assert sections["b"].unknown() == "tool is not installed on the host"
    assert sections["c"].unknown() == "the probe ended inside this section"


def test_container_ports_come_from_the_mapping_not_from_a_name() -> None:
    line = 'abc|/grafana|42|bridge|{"3000/tcp": [{"HostIp": "0.0.0.0", "HostPort": "28004"}], "9/udp": null}|[{"Destination": "/d"}]|grafana:12'
    (container,) = parse_containers(line)
    assert (container.name, container.pid, container.published, container.mounts) == ("grafana", 42, [("0.0.0.0", 28004)], ["/d"])
    with pytest.raises(ParseError):
        parse_containers("garbage")


def test_one_leftover_seen_through_two_roots_counts_once() -> None:
    lines = "8:1|100|5|regular file|/tmp/mooncake_x\n8:1|100|5|regular file|/proc/12/root/tmp/mooncake_x\n"
    assert [leftover.path for leftover in parse_leftovers(lines)] == ["/tmp/mooncake_x"]


def test_reserved_ports_are_read_as_ranges() -> None:
    settings = parse_port_settings("ephemeral 32768\t60999\nreserved 36000-36007,40000")
    assert settings.reserved == [(36000, 36007), (40000, 40000)]


def test_a_zone_that_is_none_is_an_error() -> None:
    with pytest.raises(ParseError):
        parse_zone("offset \nlocaltime /x")


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "/x/vllm", "serve", "/m", "--port", "7001", "--kv-transfer-config", '{"kv_port": "28000"}'],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--port=7001", "--kv-transfer-config.kv_port", "28000"],
    ],
)
def test_serve_arguments_are_read_in_every_spelling(argv: list[str]) -> None:
    args = parse_serve_args(argv)
    assert args is not None and args["port"] == "7001"
    assert kv_transfer_config(args)["kv_port"] == "28000"


def test_another_program_is_no_vllm() -> None:
    assert parse_serve_args(["grafana", "serve", "--port", "3000"]) is None
