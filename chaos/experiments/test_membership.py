"""Instances leave and come back under load: taken out of the proxy, restarted one after the other, silent for longer than anybody should wait."""

from chaos.experiment import killing, run
from chaos.faults.instances import RemoveInstance
from pdgate.plugin import check
from pdgate.rules import recovery
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Expectation

HURT_S, AFTER_S = 3.0, 5.0
BEYOND_S = 3.0  # watched behind the moment by which a silent engine must be left out


@check("recovery.instance-removed", severity="critical", waivable=False)
def test_an_instance_taken_out_of_the_proxy_drains_and_comes_back(stage, deployment, decoders, judged_by):
    d, proxy = decoders[0], stage.proxy
    url = deployment.url_of(proxy)
    if url is None or d.http_port is None:
        raise NotRun("the inventory gives no address for the proxy or the engine")

    def make(facts, tag):
        place = f"{d.address or deployment.host_of(d).address}:{d.http_port}"
        return RemoveInstance(proxy.host, url, proxy.kind, "decode", place, d.name)

    outcome = run(stage, "recovery.instance-removed", make, hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=False, why="what is on its way is drained, and the others take the rest"))


@check("recovery.rolling-restart", severity="critical", reference="smg-project/smg#2491", waivable=False)
def test_prefill_engines_restarted_one_after_the_other_are_all_back_in_time(stage, prefills, judged_by):
    outcome = run(stage, "recovery.rolling-restart", *(killing(stage, p) for p in prefills), hurt_s=0.5, after_s=AFTER_S + stage.wish.restart_s, in_turn=True)
    judged_by(outcome, Expectation(stage.wish.recovery_s), recovery.each_in_time(outcome.returns, stage.wish.restart_s))


@check("recovery.failover", severity="critical", reference="field report R3", waivable=False)
def test_nobody_is_sent_to_a_silent_engine_for_longer_than_was_promised(stage, deployment, decoders, judged_by):
    promised = deployment.front_host.expect.failover_s
    if promised is None:
        raise NotRun("no promise declared (pd_expect.failover_s): the proxy may go on asking an engine that is gone")
    outcome = run(
        stage, "recovery.failover", killing(stage, decoders[0]), hurt_s=promised + BEYOND_S, after_s=AFTER_S + stage.wish.restart_s,
    )  # fmt: skip
    judged_by(
        outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s),
        recovery.left_out_in_time(f"proxy {stage.proxy.name}", outcome.records, outcome.applied[0].injected, outcome.applied[0].healed, promised),
    )  # fmt: skip
