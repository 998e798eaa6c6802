"""A host runs out of something, loses a link, or has stale files lying about: does what runs there live through it?"""

from chaos.experiment import comes_back, killing, run, start_by_hand
from chaos.faults.host import FewDescriptors, FillDisk, LinkDown, PlantLeftovers
from pdgate.plugin import check
from pdgate.rules import recovery
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Expectation

HURT_S, AFTER_S = 2.0, 5.0
STALE = ("/tmp/mooncake_pdgate_chaos", "/dev/shm/mooncake_pdgate_chaos")


@check("recovery.leftovers", severity="major", reference="field report R1")
def test_an_engine_starts_though_stale_files_of_a_dead_one_lie_about(stage, prefills, judged_by):
    p = prefills[0]

    def stale(facts, tag):
        return PlantLeftovers(p.host, STALE)

    returns = {}

    def started_among_them():
        start_by_hand(stage, p)
        returns[p.name] = comes_back(stage.deployment, p.name, stage.wish.restart_s)

    outcome = run(
        stage, "recovery.leftovers", killing(stage, p), stale, hurt_s=HURT_S, after_s=AFTER_S + stage.wish.restart_s, meanwhile=started_among_them,
        meanwhile_s=stage.wish.restart_s,
    )  # fmt: skip
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s), recovery.each_in_time(returns, stage.wish.restart_s))


@check("recovery.descriptors", severity="critical", waivable=False)
def test_a_decode_engine_without_file_descriptors_refuses_and_accepts_again(stage, decoders, judged_by):
    d = decoders[0]

    def make(facts, tag):
        return FewDescriptors(d.name, d.host, stage.victims(d, "api", facts), tag)

    outcome = run(stage, "recovery.descriptors", make, hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s))


@check("recovery.log-disk-full", severity="critical", waivable=False)
def test_a_full_log_disk_costs_log_lines_and_no_request(stage, decoders, judged_by):
    d = decoders[0]
    if d.log is None:
        raise NotRun(f"{d.name}: no pd_log in the inventory")
    folder = d.log.rpartition("/")[0] or "/"

    def make(facts, tag):
        return FillDisk(d.host, folder)

    outcome = run(stage, "recovery.log-disk-full", make, hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=False, why="a log that cannot be written is no reason to fail a request"))


@check("recovery.link-down", severity="critical", reference="Mooncake#3596; field report R2", waivable=False)
def test_the_link_of_one_npu_goes_down_and_up_and_its_transfers_go_on(stage, deployment, prefills, judged_by):
    p = prefills[0]
    if not deployment.host_of(p).platform.startswith("ascend") or not p.devices:
        raise NotRun(f"{p.name}: no NPU with a link of its own")

    def make(facts, tag):
        return LinkDown(p.host, p.devices[0])

    outcome = run(stage, "recovery.link-down", make, hurt_s=HURT_S, after_s=AFTER_S + stage.kv_bound_s)
    judged_by(outcome, Expectation(stage.wish.recovery_s))
