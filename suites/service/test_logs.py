"""What engines and proxies logged while the load ran: known errors with their first cause, unknown ones, storms, leaks."""

from pdgate.plugin import check
from pdgate.rules import logs
from pdgate.rules.finding import NotRun

R2 = "field report R2"


@check("logs.errors", severity="major", reference=R2)
def test_no_known_error_is_in_the_logs_of_a_healthy_load(steady, judge):
    judge(logs.of_all_units(logs.known_errors, steady.logs))


@check("logs.unknown", severity="minor")
def test_no_error_line_is_unknown(steady, judge):
    judge(logs.of_all_units(logs.unknown_errors, steady.logs))


@check("logs.storm", severity="critical", reference=R2)
def test_no_storm_of_failures_with_several_peers(steady, judge):
    judge(logs.of_all_units(logs.no_storm, steady.logs))


@check("logs.communicators", severity="major", reference=R2)
def test_communicators_are_destroyed_as_often_as_needed(steady, pd_host, deployment, judge):
    if pd_host.plog is None:
        raise NotRun("no pd_plog in the inventory")
    before, after = steady.communicators
    judge(logs.no_communicator_leak(deployment, pd_host.name, before.get(pd_host.name, {}), after.get(pd_host.name, {})))
