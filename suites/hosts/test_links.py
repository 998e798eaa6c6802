"""NPU links, all devices of a machine side by side (field report R2). Not proven on hardware."""

from pdgate.plugin import check
from pdgate.rules import links

R2 = "field report R2"


@check("links.state", severity="critical", reference=links.HARDWARE, phase="any")
def test_every_npu_link_is_up(pd_host, facts, judge):
    judge(links.are_up(pd_host, facts))


@check("links.net-health", severity="major", reference=links.HARDWARE, phase="any")
def test_every_npu_reaches_its_detect_address(pd_host, facts, judge):
    judge(links.are_healthy(pd_host, facts))


@check("links.tls", severity="critical", reference="HCCL EI0016; " + links.HARDWARE, phase="any")
def test_all_npus_have_the_same_tls_switch(pd_host, deployment, all_facts, judge):
    judge(links.tls_switches_agree(deployment, pd_host.machine, all_facts))


@check("links.errors", severity="major", reference=R2, phase="any")
def test_no_npu_counts_more_errors_than_its_siblings(pd_host, facts, judge):
    judge(links.have_no_error_outlier(pd_host, facts))


@check("links.flaps", severity="minor", reference=R2, phase="any")
def test_no_npu_link_flapped_more_than_its_siblings(pd_host, facts, judge):
    judge(links.have_no_flap_outlier(pd_host, facts))
