"""NPU links: R2's device 6 and its relatives."""

from __future__ import annotations

from lab.defects.registry import defect
from lab.plan import LabPlan

R2 = "field report R2"


@defect("flapping-device", trips={"links.flaps"}, reference=R2)
def device_six_flaps(plan: LabPlan) -> None:
    """Device 6 of p0 went up 40643 and down 40642 times; its siblings 15 to 19."""
    device = plan.host_of("p0").devices[6]
    device.link_up, device.link_down = 40643, 40642


@defect("bit-errors", trips={"links.errors"}, reference=R2)
def device_six_has_bit_errors(plan: LabPlan) -> None:
    """Device 6 of p0 is the only one with real bit errors."""
    plan.host_of("p0").devices[6].counters.update(mac_rx_bad_pkt_num=27114, roce_out_of_order_num=1893)


@defect("link-down", trips={"links.state"})
def a_link_is_down(plan: LabPlan) -> None:
    """The link of device 3 of d0 is down."""
    plan.host_of("d0").devices[3].link = "DOWN"


@defect("net-health-fault", trips={"links.net-health"})
def a_device_does_not_reach_its_detect_address(plan: LabPlan) -> None:
    """Device 2 of d0 says 'Unreachable' in net_health."""
    plan.host_of("d0").devices[2].net_health = "Unreachable"


@defect("tls-switch-differs", trips={"links.tls"}, reference="HCCL EI0016")
def one_device_has_tls_on(plan: LabPlan) -> None:
    """Device 1 of d0 has its TLS switch on; all others have it off."""
    plan.host_of("d0").devices[1].tls_switch = 1


@defect("hccn-tool-missing", invalid={"links.state", "links.net-health", "links.tls", "links.errors", "links.flaps"})
def hccn_tool_is_not_installed(plan: LabPlan) -> None:
    """p0 has no hccn_tool: the links are unknown, not fine."""
    plan.host_of("p0").missing_tools.add("hccn_tool")
