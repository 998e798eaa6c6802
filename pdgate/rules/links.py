"""NPU links, all devices of a machine side by side: the odd one among its siblings is what matters (field report R2)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TypeVar

from pdgate.facts.model import Device, HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Host
from pdgate.rules.finding import Finding, NotRun

# Counters of the -stat and -stat_extra answers that count trouble. Absent ones (older drivers) are unknown.
ERROR_COUNTERS = (
    "mac_tx_bad_pkt_num", "mac_rx_bad_pkt_num", "mac_rx_fcs_err_pkt_num", "roce_rx_err_pkt_num", "roce_tx_err_pkt_num",
    "roce_out_of_order_num", "roce_new_pkt_rty_num", "roce_verification_err_num", "roce_qp_status_err_num",
    "rx_full_drop_cnt", "cw_uncorrect_cnt", "cw_bad_cnt", "pcs_err_cnt",
)  # fmt: skip
# What every driver generation seen has: without these nothing can be said about errors.
ALWAYS_THERE = ("mac_rx_bad_pkt_num", "roce_rx_err_pkt_num")
# An outlier is ten times its siblings' median and at least a hundred above it.
FACTOR, ABOVE = 10, 100
# Codes of net_health that do not speak against the link where no detect address is configured (direct P-D links).
NOT_CONFIGURED = ("Init", "Detect ip set")
HARDWARE = "ascend-pd-facts 4; not proven on hardware"


def devices_of(host: Host, facts: HostFacts) -> list[Device]:
    """The machine's devices; raises NotRun off Ascend and UnknownFact where hccn_tool gave nothing."""
    if not host.platform.startswith("ascend"):
        raise NotRun(f"{host.name}: platform {host.platform} has no NPU links")
    devices = facts.devices.get()
    if not devices:
        raise UnknownFact(f"{host.name}: no device was asked; pd_devices is empty")
    return devices


def are_up(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """Every device's link is UP."""
    for device in devices_of(host, facts):
        state = _answer(host, device, "link", device.link)
        if state != "UP":
            yield Finding(
                target=_name(host, device), expected="link status: UP", seen=f"link status: {state}",
                why="KV of this device's rank cannot be pulled: each attempt costs the connect timeout",
                remedy=f"hccn_tool -i {device.id} -link_stat -g for its history; check cable and optics; "
                f"restore with hccn_tool -i {device.id} -cfg recovery",
            )  # fmt: skip


def are_healthy(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """net_health says Success; Init counts only where a detect address is configured."""
    for device in devices_of(host, facts):
        health = _answer(host, device, "net_health", device.net_health)
        unconfigured = device.netdetect is None and health.startswith(NOT_CONFIGURED)
        if not health.startswith("Success") and not unconfigured:
            yield Finding(
                target=_name(host, device), expected="net health status: Success", seen=f"net health status: {health}",
                why="the device cannot reach its detect address: gateway, switch port or address is wrong",
                remedy=f"hccn_tool -i {device.id} -netdetect -g and -gateway -g; compare with /etc/hccn.conf",
            )  # fmt: skip


def tls_switches_agree(deployment: Deployment, machine: str, facts: dict[str, HostFacts]) -> Iterator[Finding]:
    """Every device of the deployment has the same TLS switch: that of the first device, or the declared one."""
    host = deployment.machines[machine][0]
    own = devices_of(host, facts[machine])
    wanted = host.expect.tls_switch
    origin = "pd_expect.tls_switch"
    if wanted is None:
        # The majority of the whole deployment, so that the odd one is named and not its siblings.
        seen = [device.tls_switch for entry in facts.values() if entry.devices.known for device in entry.devices.get()]
        known = [switch for switch in seen if switch is not None]
        wanted = int(sum(known) * 2 > len(known)) if known else None
        origin = "most devices"
    for device in own:
        switch = _answer(host, device, "tls", device.tls_switch)
        if switch != wanted:
            yield Finding(
                target=_name(host, device), expected=f"tls switch {wanted}, as {origin}", seen=f"tls switch {switch}",
                why="links between devices whose TLS switches differ are refused (HCCL EI0016)",
                remedy=f"hccn_tool -i {device.id} -tls -s enable {wanted}",
            )  # fmt: skip


def have_no_error_outlier(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """No device counts far more errors than its siblings. Absolute numbers grow since boot and say little alone."""
    devices = devices_of(host, facts)
    for name in ALWAYS_THERE:
        for device in devices:
            if name not in device.counters:
                raise UnknownFact(f"{_name(host, device)}: counter {name} is unknown: {device.failed.get('stat', 'not in the answer')}")
    for name in ERROR_COUNTERS:
        values = {device.id: device.counters[name] for device in devices if name in device.counters}
        for device_id, others in _outliers(values):
            yield Finding(
                target=f"{host.name}/npu{device_id}",
                expected=f"{name} near that of its siblings (median {others:.0f})",
                seen=f"{name} = {values[device_id]}; siblings: {_siblings(values, device_id)}",
                why="real bit errors or drops on this link: retransmits slow every transfer of its rank",
                remedy=f"watch the delta (hccn_tool -i {device_id} -stat -g twice); compare optics with -optical -g; reseat or swap",
            )


def have_no_flap_outlier(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """No link went down far more often than its siblings'."""
    devices = devices_of(host, facts)
    values: dict[int, int] = {}
    for device in devices:
        count = device.link_down if device.link_down is not None else device.link_up
        values[device.id] = _answer(host, device, "link_stat", count)
    for device_id, others in _outliers(values):
        device = next(device for device in devices if device.id == device_id)
        last = device.last_changes[0] if device.last_changes else "no record"
        yield Finding(
            target=f"{host.name}/npu{device_id}",
            expected=f"link changes near those of its siblings (median {others:.0f})",
            seen=f"link up {device.link_up} / down {device.link_down}; siblings: {_siblings(values, device_id)}; last: {last}",
            why="this link has a history of its own; it may or may not be today's fault",
            remedy=f"track device {device_id} on its own: both ends' optics, cable, switch port; hccn_tool -i {device_id} -link_stat -g",
        )


def _outliers(values: dict[int, int]) -> Iterator[tuple[int, float]]:
    """Ids whose value stands far above the median of the others; needs two siblings to compare with."""
    for key, value in values.items():
        others = [other for other_key, other in values.items() if other_key != key]
        if len(others) < 2:
            continue
        middle = median(others)
        if value >= middle * FACTOR and value >= middle + ABOVE:
            yield key, middle


def _siblings(values: dict[int, int], device_id: int) -> str:
    return ", ".join(f"npu{key} {value}" for key, value in sorted(values.items()) if key != device_id)


def _name(host: Host, device: Device) -> str:
    return f"{host.name}/npu{device.id}"


T = TypeVar("T")


def _answer(host: Host, device: Device, query: str, value: T | None) -> T:
    if value is None:
        said = device.failed.get(query, "not in the answer")
        raise UnknownFact(f"{_name(host, device)}: hccn_tool -i {device.id} -{query} -g: {said}")
    return value
