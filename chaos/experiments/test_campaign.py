"""A random campaign: schedules nobody thought of, replayed from their seed, reduced to few events when they fail."""

import random

import pytest

from chaos.campaign import draw, keep_schedule, reduce
from chaos.experiment import aftermath, killing, run, stalling
from chaos.faults.host import FewDescriptors
from chaos.faults.network import Toxic
from chaos.paths import side_channel
from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules import recovery
from pdgate.rules.finding import NotRun, note
from pdgate.rules.recovery import Expectation

AFTER_S = 6.0
TOXICS = {"latency": {"latency": 100}, "reset_peer": {"timeout": 20}, "slicer": {"average_size": 64, "size_variation": 32, "delay": 500}}


def maker(stage, event):
    """How the fault of an event is made from fresh facts."""
    engine = stage.deployment.engine(event.engine)
    path, _, toxic = event.kind.rpartition("-")
    if path == "kill" or event.kind == "kill":
        return killing(stage, engine, toxic if path else "engine")
    if event.kind == "stall":
        return stalling(stage, engine)
    if event.kind == "no-descriptors":
        return lambda facts, tag: FewDescriptors(engine.name, engine.host, stage.victims(engine, "api", facts), tag)
    ports = (engine.http_port,) if path == "http" else tuple(side_channel(engine))
    # In a random moment nobody may come that way; a campaign is judged by what clients see.
    return lambda facts, tag: Toxic(
        engine.host, str(engine.address), ports, tag, toxic, TOXICS[toxic], path, stage.deployment.host_of(engine).toxiproxy, must_meet=False
    )


@pytest.fixture
def findings_of(stage):
    """Run events one after the other, each a whole experiment, and say what was not as expected."""
    tries = iter(range(10**6))

    def play(events):
        found = []
        for event in events:
            again = stage.wish.restart_s if event.kind.startswith("kill") else 0.0
            try:
                outcome = run(stage, f"campaign-{next(tries)}", maker(stage, event), hurt_s=event.hurt_s, after_s=AFTER_S + again)
            except UnknownFact:
                if not found:
                    raise
                break  # the deployment has not come back from what was found already
            expected = Expectation(again + stage.wish.recovery_s)
            found += [finding for finding in recovery.behaved(f"{event}", outcome.measures, expected, outcome.records) if finding.severity != "note"]
            found += aftermath(stage, outcome)
        return found

    return play


def _fails(findings_of, events) -> bool:
    """Whether they fail for certain; on a deployment that has not come back nothing can be told."""
    try:
        return bool(findings_of(events))
    except (UnknownFact, NotRun):
        return False


@check("recovery.campaign", severity="critical", waivable=False)
def test_a_random_campaign_is_survived(pytestconfig, stage, findings_of, judge, pdgate_run):
    count = pytestconfig.getoption("campaign")
    if not count:
        raise NotRun("no campaign asked for (--campaign=N)")
    seed = pytestconfig.getoption("chaos_seed")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    events = draw(stage.deployment, seed, count)
    if not events:
        raise NotRun("nothing can be drawn: every engine is the last of its role, and none has a port group")
    keep_schedule(pdgate_run.bundle, "campaign", seed, events)
    drawn = f"--campaign={count} --chaos-seed={seed} draws: {'; '.join(map(str, events))}"
    print(drawn)  # at once: a campaign lasts
    found = findings_of(events)
    if found and len(events) > 1:
        fewer = reduce(events, lambda some: _fails(findings_of, some))
        keep_schedule(pdgate_run.bundle, "campaign-reduced", seed, fewer)
        found = [finding.model_copy(update={"remedy": f"{finding.remedy}; reduced to: {'; '.join(map(str, fewer))} (campaign-reduced.json); "
                 f"the whole again: --campaign={count} --chaos-seed={seed}"}) for finding in found]  # fmt: skip
    judge(iter([note("deployment", drawn), *found]))
