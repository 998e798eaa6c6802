"""What may stand in the way on a host: sight, clocks, leftovers, destroyed evidence."""

from pdgate.plugin import check
from pdgate.rules import clocks, hosts

R1, R2 = "field report R1", "field report R2"


@check("hosts.permission", severity="major", reference="DESIGN 5", phase="any")
def test_the_probe_sees_everything_on_the_host(pd_host, facts, judge):
    judge(hosts.probe_sees_everything(pd_host, facts))


@check("clocks.offset", severity="major", reference=R2, phase="any")
def test_the_host_clock_agrees_with_ours(pd_host, facts, judge):
    judge(clocks.offset_is_small(pd_host, facts))


@check("clocks.zone", severity="major", reference=R2, phase="any")
def test_hosts_and_containers_are_in_one_time_zone(pd_host, deployment, all_facts, judge):
    judge(clocks.zones_agree(deployment, pd_host.machine, all_facts))


@check("clocks.log-zone", severity="major", reference=R2)
def test_engines_log_in_the_zone_of_their_host(engine, facts, judge):
    judge(clocks.log_zone_agrees(engine, facts))


@check("clocks.timezone-mount", severity="minor", reference=R2, phase="any")
def test_etc_timezone_is_not_a_directory(pd_host, facts, judge):
    judge(clocks.timezone_is_a_file(pd_host, facts))


@check("leftovers.stale", severity="major", reference=R1, phase="any")
def test_no_leftovers_of_dead_engines_lie_about(pd_host, deployment, facts, judge):
    judge(hosts.has_no_stale_leftovers(deployment, pd_host, facts))


@check("evidence.launch-script", severity="major", reference=R2, phase="any")
def test_the_launch_script_keeps_earlier_logs(pd_host, deployment, facts, judge):
    judge(hosts.launch_script_keeps_the_logs(deployment, pd_host, facts))
