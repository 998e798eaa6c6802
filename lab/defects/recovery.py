"""What a deployment does wrong when P is lost: seen with the experiments below chaos/."""

from __future__ import annotations

from lab.defects.registry import defect
from lab.plan import LabPlan

EXPERIMENT = "chaos/experiments/test_lost_prefill.py"


def _run(which: str) -> tuple[str, ...]:
    return (EXPERIMENT, "--chaos", "-k", which)


def _under_load(which: str) -> tuple[str, ...]:
    return ("chaos", "--chaos", "-k", which)


def _decoders(plan: LabPlan, name: str) -> None:
    for port in range(7000, 7004):
        plan.host_of("d0").misbehave(f"engine:{port}", name)


@defect("failed-pull-swallowed", trips={"recovery.prefill-killed.known-peer"}, reference="vllm-ascend#17044", run=_run("that_knew_it"))
def decode_answers_after_a_failed_pull(plan: LabPlan) -> None:
    """D logs the failed pull, marks the request received, and decodes over unwritten KV."""
    plan.host_of("d0").misbehave("engine:7000", "swallow_failed_pulls")


@defect("first-contact-hangs", trips={"recovery.prefill-killed.first-contact"}, reference="docs/track-record.md", run=_run("never_met_it"))
def decode_hangs_on_a_dead_peer_it_never_met(plan: LabPlan) -> None:
    """D's first handshake with a dead P never returns; a D that knew P is fine."""
    plan.host_of("d0").misbehave("engine:7000", "hang_on_first_contact")


@defect("proxy-keeps-engine-id", trips={"recovery.prefill-restarted"}, reference="smg-project/smg#2491", run=_run("restarted"))
def the_proxy_keeps_the_old_engine_id(plan: LabPlan) -> None:
    """After P came back with a new engine id, the proxy goes on sending the old one, and requests get nothing."""
    plan.host_of("p0").misbehave("proxy", "keeps_old_engine_id")


@defect("stale-engine-id-under-load", trips={"recovery.prefill-lost"}, reference="smg-project/smg#2491", run=_under_load("recovery.prefill-lost"))
def the_proxy_keeps_a_stale_engine_id_under_load(plan: LabPlan) -> None:
    """After a P engine came back with a new id, the proxy goes on sending the old one: its requests never recover."""
    plan.host_of("p0").misbehave("proxy", "keeps_old_engine_id")


@defect("prefill-dies-with-decode", trips={"recovery.decode-lost"}, reference="vllm-ascend#13628, #7514", run=_under_load("recovery.decode-lost"))
def prefill_dies_when_a_decoder_was_lost(plan: LabPlan) -> None:
    """A P engine dies when it gives up KV that nobody fetched: killing D takes P engines with it."""
    for port in range(7000, 7004):
        plan.host_of("p0").misbehave(f"engine:{port}", "dies_on_forced_free")


@defect("worker-death-unnoticed", trips={"recovery.worker-lost"}, run=_under_load("recovery.worker-lost"))
def nobody_notices_that_a_worker_died(plan: LabPlan) -> None:
    """The engine core waits for its dead worker for ever: the engine stays up, and its requests hang."""
    _decoders(plan, "survives_worker_death")


@defect("deadlock-after-a-stall", trips={"recovery.decode-stalled"}, reference="vllm#45526", run=_under_load("recovery.decode-stalled"))
def a_stalled_engine_never_goes_on(plan: LabPlan) -> None:
    """A decode engine that stood still for a while brings no token ever again, and says that it is healthy."""
    _decoders(plan, "deadlocks_after_a_stall")


@defect("impatient-handshake", trips={"recovery.side-channel-slow"}, run=_under_load("recovery.side-channel-slow"))
def decode_gives_up_on_a_slow_handshake(plan: LabPlan) -> None:
    """D asks P anew for each request and gives up after 50 ms."""
    _decoders(plan, "impatient_handshake")


@defect("proxy-hangs-on-reset", trips={"recovery.http-reset"}, reference="vllm-ascend#13140", run=_under_load("recovery.http-reset"))
def the_proxy_hangs_when_a_decoder_resets(plan: LabPlan) -> None:
    """The proxy never answers a client whose decoder reset the connection."""
    plan.host_of("p0").misbehave("proxy", "hangs_on_reset")


@defect("lost-ack-is-fatal", trips={"recovery.partition"}, reference="vllm-ascend#5431, #5871", run=_under_load("recovery.partition"))
def a_lost_acknowledgement_kills_the_worker(plan: LabPlan) -> None:
    """A D worker dies when P does not acknowledge: a short cut of the side channel takes the engine down."""
    _decoders(plan, "ack_failure_is_fatal")


@defect("prefilled-lost-answered-wrong", trips={"recovery.hit.prefilled"}, reference="vllm-ascend#17044", run=_under_load("recovery.hit.prefilled"))
def a_prefill_lost_before_its_pull_is_answered_wrong(plan: LabPlan) -> None:
    """Every D swallows failed pulls: the request whose P died the moment it had prefilled gets a wrong answer."""
    _decoders(plan, "swallow_failed_pulls")


@defect("campaign-meets-a-dead-worker", trips={"recovery.campaign"}, run=("chaos", "--chaos", "-k", "recovery.campaign", "--campaign=2", "--chaos-seed=124"))
def a_campaign_meets_a_worker_whose_death_nobody_notices(plan: LabPlan) -> None:
    """Engine cores wait for dead workers for ever; the schedule of this seed kills one."""
    _decoders(plan, "survives_worker_death")
