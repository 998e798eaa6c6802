"""pdgate as a pytest plugin: `--hosts`, fixtures, checks and their verdicts. The only room that knows pytest.

@check("ports.group.owned", severity="critical", reference="field report R1")
def test_every_port_of_the_group_is_owned_by_its_worker(engine, facts, judge):
    judge(ports.owned_by_their_workers(engine, facts))
"""

from pdgate.plugin.check import check

__all__ = ["check"]
