"""The KV port group of every engine (field report R1)."""

from pdgate.plugin import check
from pdgate.rules import ports

R1 = "field report R1"


@check("ports.group.free", severity="critical", reference=R1, phase="before")
def test_every_port_of_the_group_is_free_before_start(engine, facts, judge):
    judge(ports.is_free(engine, facts))


@check("ports.group.owned", severity="critical", reference=R1)
def test_every_port_of_the_group_is_owned_by_its_worker(engine, facts, judge):
    judge(ports.owned_by_their_workers(engine, facts))


@check("ports.group.address", severity="critical", reference="ascend-pd-facts 1.1")
def test_the_port_group_listens_on_the_address_peers_use(engine, facts, judge):
    judge(ports.on_the_right_address(engine, facts))


@check("ports.group.overlap", severity="critical", reference="ascend-pd-facts 2.4", phase="any")
def test_no_two_engines_of_a_machine_share_a_port_of_their_groups(pd_host, deployment, facts, judge):
    judge(ports.overlapping(deployment, pd_host.machine, facts))


@check("ports.group.reserved", severity="major", reference=R1, phase="any")
def test_the_port_group_is_outside_the_ranges_mooncake_draws_from(engine, deployment, facts, judge):
    judge(ports.outside_reserved_ranges(engine, deployment, facts))


@check("ports.group.ephemeral", severity="minor", reference="ip_local_port_range(7)", phase="any")
def test_the_port_group_is_outside_the_ephemeral_range_or_reserved(engine, facts, judge):
    judge(ports.outside_the_ephemeral_range(engine, facts))


@check("ports.group.collision", severity="critical", reference=R1, phase="any")
def test_the_port_group_meets_no_http_rpc_or_proxy_port(engine, deployment, judge):
    judge(ports.apart_from_other_ports(engine, deployment))


@check("ports.group.mapping", severity="critical", reference=R1, phase="any")
def test_no_container_publishes_a_port_of_the_group(engine, facts, judge):
    judge(ports.apart_from_container_mappings(engine, facts))
