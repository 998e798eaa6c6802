"""Clocks, links, environment, engines, leftovers, scripts: each rule on small facts, silent and tripped."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from lab.tools import DeviceState
from pdgate.connectors import CONNECTORS
from pdgate.facts.model import Clock, Device, HostFacts, Interval, LogFacts, UnknownFact
from pdgate.rules import clocks, engines, environment, hosts, links
from pdgate.rules.finding import Finding, NotRun
from tests.build import NOW, deployment, engine, facts, host, process, running_prefill, serve


def clock(low: float, high: float, zone: str = "+0800") -> HostFacts:
    return running_prefill(clock=Clock(offset_s=Interval(low=low, high=high), utc_offset=zone, localtime="x"))


@pytest.mark.parametrize("bounds", [(-0.002, 0.002), (0.3, 0.4), (-0.49, -0.48)])
def test_a_small_clock_offset_passes(bounds: tuple[float, float]) -> None:
    assert list(clocks.offset_is_small(host(), clock(*bounds))) == []


@pytest.mark.parametrize("bounds", [(0.6, 0.61), (-28800, -28799), (0.45, 0.55)])
def test_a_clock_that_may_be_off_fails(bounds: tuple[float, float]) -> None:
    assert len(list(clocks.offset_is_small(host(), clock(*bounds)))) == 1


def test_a_measurement_too_uncertain_to_judge_is_unknown() -> None:
    with pytest.raises(UnknownFact, match="too uncertain"):
        list(clocks.offset_is_small(host(), clock(-0.4, 0.7)))


def log(last: str, modified: datetime, more: list[str] | None = None) -> LogFacts:
    return LogFacts(size=1, inode=1, modified=modified.timestamp(), tail=[f"(APIServer pid=1) INFO {last} [x.py:1] hello", *(more or [])])


WRITTEN = datetime.fromisoformat("2026-03-01T12:00:05+08:00")


def judged_zone(found: LogFacts) -> list[Finding]:
    return list(clocks.log_zone_agrees(engine(), running_prefill(logs={"/var/log/e.log": {"value": found.model_dump()}})))


def test_a_log_in_the_hosts_zone_passes_also_when_it_is_old() -> None:
    assert judged_zone(log("03-01 12:00:05", WRITTEN)) == []
    assert judged_zone(log("03-01 11:58:00", WRITTEN)) == []


def test_a_log_in_utc_on_a_host_in_china_is_eight_hours_behind() -> None:
    (finding,) = judged_zone(log("03-01 04:00:05", WRITTEN))
    assert "8.00 h behind" in finding.seen


def test_a_log_that_went_on_without_stamps_cannot_be_judged() -> None:
    with pytest.raises(UnknownFact, match="idle, or another zone"):
        judged_zone(log("03-01 11:00:00", WRITTEN, ["(APIServer pid=1) INFO:     10.0.0.1:1 - access line"]))


def test_the_year_a_log_line_lacks_is_that_of_the_file() -> None:
    new_year = datetime.fromisoformat("2026-01-01T00:00:01+00:00")
    stamp = engines.naive_log_time("INFO 12-31 23:59:59 [x] y", new_year.timestamp())
    assert stamp is not None and stamp.year == 2025


def test_a_container_in_utc_is_named() -> None:
    own = running_prefill(roots={"m1": {"utc_offset": "+0000", "packages": {}}})
    (finding,) = clocks.zones_agree(deployment([engine()]), "p0", {"p0": own})
    assert "+0000" in finding.seen


def devices(**changed: Any) -> list[Device]:
    """Eight quiet siblings; `changed` goes to number 6."""
    rows = []
    for number in range(8):
        state = DeviceState.healthy(number, 1)
        row = {"id": number, "link": "UP", "net_health": "Success", "netdetect": "1.1.1.1", "tls_switch": 0, "link_up": state.link_up,
               "link_down": state.link_down, "counters": dict(state.counters)}  # fmt: skip
        if number == 6:
            row["counters"] |= changed.pop("counters", {})
            row |= changed
        rows.append(Device.model_validate(row))
    return rows


def test_quiet_siblings_raise_nothing() -> None:
    own = facts(devices=devices())
    for rule in (links.are_up, links.are_healthy, links.have_no_error_outlier, links.have_no_flap_outlier):
        assert list(rule(host(), own)) == []


def test_device_six_of_report_r2_is_named_and_its_siblings_are_not() -> None:
    own = facts(devices=devices(link_up=40643, link_down=40642, counters={"mac_rx_bad_pkt_num": 27114}))
    flaps, errors = list(links.have_no_flap_outlier(host(), own)), list(links.have_no_error_outlier(host(), own))
    assert [finding.target for finding in flaps + errors] == ["p0/npu6", "p0/npu6"]


def test_an_absent_counter_is_unknown_not_zero() -> None:
    quiet = devices()
    quiet[2] = quiet[2].model_copy(update={"counters": {}, "failed": {"stat": "exit code 1"}})
    with pytest.raises(UnknownFact, match="npu2"):
        list(links.have_no_error_outlier(host(), facts(devices=quiet)))


def test_init_is_fine_on_a_direct_link_without_detect_address_only() -> None:
    assert not list(links.are_healthy(host(), facts(devices=devices(net_health="Init", netdetect=None))))
    assert list(links.are_healthy(host(), facts(devices=devices(net_health="Init"))))


def test_links_of_a_gpu_host_are_not_run() -> None:
    with pytest.raises(NotRun):
        list(links.are_up(host(platform="gpu"), facts()))


def with_environment(**variables: str) -> HostFacts:
    row = {"pid": 10, "mntns": "m1", "netns": "n", "exe": "x", "cgroup": "", "environment": variables}
    return running_prefill(engine_processes=[row])


R2 = {"HCCL_BUFFSIZE": "1024", "HCCL_EXEC_TIMEOUT": "204", "HCCL_CONNECT_TIMEOUT": "1200"}


def test_the_three_variables_of_report_r2_are_notes_where_the_vendors_template_sets_them() -> None:
    for model, severities in (("dsv4", {"note"}), ("Qwen3-32B", {"minor"})):
        one = engine(model=model)
        found = list(environment.follows_the_policy(one, deployment([one]), with_environment(**R2)))
        assert len(found) == 3 and {finding.severity for finding in found} == severities


def test_what_the_operator_declares_overrides_the_default() -> None:
    one, declared = engine(), host(env={"HCCL_BUFFSIZE": "1024"})
    plan = deployment([one], [declared])
    assert not list(environment.follows_the_policy(one, plan, with_environment(HCCL_BUFFSIZE="1024")))
    (finding,) = environment.follows_the_policy(one, plan, with_environment())
    assert finding.severity == "major" and "HCCL_BUFFSIZE is not set" in finding.seen


def test_names_are_judged_by_the_installed_version() -> None:
    found = list(environment.names_are_known(engine(), with_environment(VLLM_RPC_TIMEOUT="1", VLLM_HOST_IP="x", VLLM_ASCEND_ENABLE_NZ="1")))
    assert ["VLLM_RPC_TIMEOUT" in finding.seen for finding in found] == [True]
    assert "vllm 0.18.0" in found[0].seen  # the versions that did know it


def test_without_a_version_the_names_are_unknown() -> None:
    bare = running_prefill(roots={"m1": {"packages": {}}})
    with pytest.raises(UnknownFact, match="version is unknown"):
        list(environment.names_are_known(engine(versions={}), bare))


def test_a_transfer_timeout_below_the_rdma_retries_is_out_of_order() -> None:
    assert not list(environment.timers_are_in_order(engine(), with_environment()))
    (finding,) = environment.timers_are_in_order(engine(), with_environment(ASCEND_TRANSFER_TIMEOUT="10000"))
    assert "10.0 s" in finding.seen and "30.1 s" in finding.expected
    (finding,) = environment.timers_are_in_order(engine(), with_environment(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="10"))
    assert "15420" in finding.why


def test_the_abort_variable_follows_the_version() -> None:
    v1, hybrid = CONNECTORS["MooncakeConnectorV1"], CONNECTORS["MooncakeHybridConnector"]
    for connector, version, variable in (
        (v1, "0.13.0", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"), (v1, "0.18.0", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"),
        (hybrid, "0.20.2rc1", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"), (hybrid, "0.23.0", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"),
    ):  # fmt: skip
        timer = connector.timer("abort", engine(versions={"vllm_ascend": version}))
        assert timer is not None and timer.variable == variable


def test_only_v1_from_0_20_on_reports_load_failures() -> None:
    v1, hybrid = CONNECTORS["MooncakeConnectorV1"], CONNECTORS["MooncakeHybridConnector"]
    assert [v1.load_failures_reported(engine(versions={"vllm_ascend": version})) for version in ("0.18.0", "0.20.2rc1", "0.23.0")] == [
        False,
        True,
        True,
    ]
    assert not hybrid.load_failures_reported(engine())
    assert not v1.load_failures_reported(engine(versions={}))


def test_an_engine_that_is_not_the_declared_one_is_described() -> None:
    own = running_prefill(processes=[process(10, argv=serve("kv_both"))])
    (finding,) = engines.runs_as_declared(engine(), own)
    assert "kv_role is kv_producer" in finding.expected and finding.seen == "kv_both"


def test_nobody_on_the_http_port_is_not_running() -> None:
    one = engine()
    (finding,) = engines.is_running(one, deployment([one]), facts(listeners=[]))
    assert "7000" in finding.expected


def test_leftovers_older_than_the_engines_are_stale() -> None:
    files = [{"path": "/dev/shm/mooncake_1", "kind": "regular file", "size": 1, "modified": NOW - 4000},
             {"path": "/tmp/mooncake_2", "kind": "regular file", "size": 1, "modified": NOW - 10}]  # fmt: skip
    found = list(hosts.has_no_stale_leftovers(deployment([engine()]), host(), running_prefill(leftovers=files)))
    assert ["/dev/shm/mooncake_1" in finding.seen for finding in found] == [True]


@pytest.mark.parametrize(
    ("line", "harmful"),
    [
        ("rm -rf ~/ascend/log", True), ("rm -fr /root/ascend/log/debug/plog/*", True), ("rm -f /var/log/e.log", True),
        ("vllm serve m > /var/log/e.log 2>&1 &", True), ("find /root/ascend/log -mtime +1 -delete", True), (": > /var/log/e.log", True),
        ("# rm -rf ~/ascend/log", False), ("vllm serve m >> /var/log/e.log 2>&1 &", False), ("mkdir -p /var/log", False),
        ("mv /var/log/e.log /var/log/e.log.$(date +%s)", False), ("rm -f /tmp/ready", False), ("vllm serve m 2>&1 | tee -a /var/log/e.log", False),
        ("export LOG_LEVEL=info", False), ("rm -rf /root/catalog", False),
    ],
)  # fmt: skip
def test_lines_that_destroy_logs_are_named_with_their_number(line: str, harmful: bool) -> None:
    own = facts(launch={"/s.sh": {"value": f"#!/bin/bash\n{line}\n"}})
    one = host(launch="/s.sh")
    found = list(hosts.launch_script_keeps_the_logs(deployment([engine()], [one]), one, own))
    assert bool(found) == harmful
    assert not found or "line 2" in found[0].seen
