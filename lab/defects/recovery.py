"""What a deployment does wrong when something is taken from it: seen with the experiments below chaos/.

Every class of bad recovery is here: hangs for ever, late, wrong afterwards, KV lost, others dragged along, D in need of a restart after
P died, orphans that hold ports, clients lied to.
"""

from __future__ import annotations

from lab.defects.misbehaving import decoders, engines, proxy
from lab.defects.registry import Inventory, defect
from lab.plan import LabPlan

RATE = "--load-rate=12"  # two labs on two cores keep their times
EXPERIMENT = "chaos/experiments/test_lost_prefill.py"


def _run(which: str) -> tuple[str, ...]:
    return (EXPERIMENT, "--chaos", "--allow-outage", "-k", which)


def under_load(which: str, *options: str) -> tuple[str, ...]:
    return ("chaos", "--chaos", RATE, "-k", which, *options)


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
    """After P came back with a new engine id, the proxy goes on sending the old one, and requests fail."""
    proxy(plan, "keeps_old_engine_id")


@defect("stale-engine-id-under-load", trips={"recovery.prefill-lost"}, reference="smg-project/smg#2491", run=under_load("recovery.prefill-lost"), nightly=True)
def the_proxy_keeps_a_stale_engine_id_under_load(plan: LabPlan) -> None:
    """After a P engine came back with a new id, the proxy goes on sending the old one: its requests never recover."""
    proxy(plan, "keeps_old_engine_id")


@defect("prefill-dies-with-decode", trips={"recovery.decode-lost"}, reference="vllm-ascend#13628, #7514", run=under_load("recovery.decode-lost"), nightly=True)
def prefill_dies_when_a_decoder_was_lost(plan: LabPlan) -> None:
    """A P engine dies when it gives up KV that nobody fetched: killing D takes P engines with it."""
    engines(plan, "p0", "dies_on_forced_free")


@defect("worker-death-unnoticed", trips={"recovery.worker-lost"}, run=under_load("recovery.worker-lost"), nightly=True)
def nobody_notices_that_a_worker_died(plan: LabPlan) -> None:
    """The engine core waits for its dead worker for ever: the engine stays up, and its requests hang."""
    decoders(plan, "survives_worker_death")


@defect("deadlock-after-a-stall", trips={"recovery.decode-stalled"}, reference="vllm#45526", run=under_load("recovery.decode-stalled"), nightly=True)
def a_stalled_engine_never_goes_on(plan: LabPlan) -> None:
    """A decode engine that stood still for a while brings no token ever again, and says that it is healthy."""
    decoders(plan, "deadlocks_after_a_stall")


@defect("impatient-handshake", trips={"recovery.side-channel-slow"}, run=under_load("recovery.side-channel-slow"))
def decode_gives_up_on_a_slow_handshake(plan: LabPlan) -> None:
    """D asks P anew for each request and gives up after 50 ms."""
    decoders(plan, "impatient_handshake")


@defect("proxy-hangs-on-reset", trips={"recovery.http-cut"}, reference="vllm-ascend#13140", run=under_load("recovery.http-cut"), nightly=True)
def the_proxy_hangs_when_a_decoder_resets(plan: LabPlan) -> None:
    """The proxy never answers a client whose decoder reset the connection."""
    proxy(plan, "hangs_on_reset")


@defect("lost-ack-is-fatal", trips={"recovery.partition"}, reference="vllm-ascend#5431, #5871", run=under_load("recovery.partition"), nightly=True)
def a_lost_acknowledgement_kills_the_worker(plan: LabPlan) -> None:
    """A D worker dies when P does not acknowledge: a short cut of the side channel takes the engine down."""
    decoders(plan, "ack_failure_is_fatal")


@defect("campaign-meets-a-dead-worker", trips={"recovery.campaign"}, run=under_load("recovery.campaign", "--campaign=2", "--chaos-seed=12"), nightly=True)
def a_campaign_meets_a_worker_whose_death_nobody_notices(plan: LabPlan) -> None:
    """Engine cores wait for dead workers for ever; the schedule of this seed kills one."""
    decoders(plan, "survives_worker_death")


@defect("core-death-unnoticed", trips={"recovery.core-lost"}, run=under_load("recovery.core-lost"), nightly=True)
def nobody_notices_that_the_engine_core_died(plan: LabPlan) -> None:
    """P's API server stays up without its engine core: requests to it hang, and it is never started again."""
    engines(plan, "p0", "survives_core_death")


@defect("orphan-keeps-the-port", trips={"recovery.api-lost"}, reference="real-engines: kill -9 of the API server alone", run=under_load("recovery.api-lost"), nightly=True)
def an_orphan_takes_the_port_of_the_group(plan: LabPlan) -> None:
    """A daemon the worker left behind takes its port once it is free: the engine cannot start again."""
    engines(plan, "p0", "daemon_keeps_port", ports=[7000])


@defect("proxy-keeps-a-lock", trips={"recovery.proxy-lost"}, run=under_load("recovery.proxy-lost", "--allow-outage"), nightly=True)
def the_proxy_does_not_start_over_its_own_lock(plan: LabPlan) -> None:
    """A proxy that was killed leaves a lock, and the next one refuses to start."""
    proxy(plan, "keeps_a_lock")


@defect("prefill-deadlock-after-a-stall", trips={"recovery.prefill-stalled"}, reference="vllm#45526", run=under_load("recovery.prefill-stalled"), nightly=True)
def a_stalled_prefill_engine_never_goes_on(plan: LabPlan) -> None:
    """A prefill engine that stood still for a while computes nothing ever again, and says that it is healthy."""
    engines(plan, "p0", "deadlocks_after_a_stall")


@defect("stolen-port-ignored", trips={"recovery.port-stolen"}, reference="field report R1", run=under_load("recovery.port-stolen and one"))
def an_engine_serves_without_the_port_that_was_stolen(plan: LabPlan) -> None:
    """An engine that cannot bind a port of its group says nothing and serves all the same: D gets nothing from it."""
    engines(plan, "p0", "ignores_taken_port")


@defect("impatient-proxy", trips={"recovery.http-slow"}, run=under_load("recovery.http-slow"), nightly=True)
def the_proxy_gives_up_on_a_slow_decoder(plan: LabPlan) -> None:
    """The proxy gives a decoder 0.4 s for the next bytes."""
    proxy(plan, "gives_up_after_s", 0.4)


@defect("cut-side-channel-is-fatal", trips={"recovery.side-channel-cut"}, reference="vllm-ascend#5431", run=under_load("recovery.side-channel-cut"), nightly=True)
def a_broken_side_channel_kills_the_worker(plan: LabPlan) -> None:
    """A D worker dies when its acknowledgement does not get through."""
    decoders(plan, "ack_failure_is_fatal")


@defect("impatient-transfer", trips={"recovery.data-slow"}, run=under_load("recovery.data-slow"), nightly=True)
def decode_gives_up_on_a_slow_transfer(plan: LabPlan) -> None:
    """D gives a transfer a tenth of a second."""
    decoders(plan, "impatient_transfer_s", 0.12)


@defect("wrong-after-a-failed-pull", trips={"recovery.data-cut"}, reference="vllm-ascend#5660, #8427", run=under_load("recovery.data-cut"), nightly=True)
def answers_are_wrong_after_a_failed_transfer(plan: LabPlan) -> None:
    """Once a transfer has failed, later ones say that they succeeded and bring nothing."""
    decoders(plan, "wrong_after_a_failed_pull")


@defect("failed-transfer-hangs", trips={"recovery.transfer-fails"}, reference="vllm#35943", run=under_load("recovery.transfer-fails"), nightly=True)
def a_request_hangs_once_its_transfer_was_refused(plan: LabPlan) -> None:
    """D waits for ever for KV whose transfer was refused, and tells nobody."""
    decoders(plan, "hangs_on_a_refused_pull")


@defect("stumbles-over-leftovers", trips={"recovery.leftovers"}, reference="field report R1", run=under_load("recovery.leftovers"), nightly=True)
def an_engine_does_not_start_among_stale_files(plan: LabPlan) -> None:
    """P does not start where a dead engine has left shared memory behind."""
    engines(plan, "p0", "stumbles_over_leftovers")


@defect("deaf-without-descriptors", trips={"recovery.descriptors"}, run=under_load("recovery.descriptors"), nightly=True)
def a_server_that_ran_out_of_descriptors_never_accepts_again(plan: LabPlan) -> None:
    """The accept loop of D's API server dies of EMFILE."""
    decoders(plan, "deaf_without_descriptors")


@defect("full-disk-is-fatal", trips={"recovery.log-disk-full"}, run=under_load("recovery.log-disk-full"), nightly=True)
def an_engine_dies_when_it_cannot_log(plan: LabPlan) -> None:
    """A decode engine dies on the first line its full log disk does not take."""
    decoders(plan, "dies_on_full_disk")


@defect("link-flap-is-forever", trips={"recovery.link-down"}, reference="Mooncake#3596", run=under_load("recovery.link-down"), nightly=True)
def transfers_never_come_back_after_a_link_flap(plan: LabPlan) -> None:
    """The queue pairs of an NPU whose link was down are never rebuilt."""
    engines(plan, "p0", "link_flap_is_forever")


@defect("few-connections", trips={"recovery.connection-storm"}, run=under_load("recovery.connection-storm"), nightly=True)
def idle_connections_use_up_the_proxys_descriptors(plan: LabPlan) -> None:
    """The proxy may open 150 files and no more."""
    proxy(plan, "few_descriptors", 150)


@defect("abort-storm-strands-kv", trips={"recovery.abort-storm"}, reference="vllm#50425", run=under_load("recovery.abort-storm"), nightly=True)
def a_storm_of_aborts_strands_kv(plan: LabPlan) -> None:
    """With many aborts in one second D forgets to give blocks back."""
    decoders(plan, "leak_on_abort", {"storm": 5})


@defect("removal-cuts-answers", trips={"recovery.instance-removed"}, run=under_load("recovery.instance-removed"), nightly=True)
def removing_an_instance_cuts_what_it_answers(plan: LabPlan) -> None:
    """The proxy drops the clients of an instance that is taken out, instead of draining it."""
    proxy(plan, "drops_what_it_removes")


@defect("slow-second-start", trips={"recovery.rolling-restart"}, run=under_load("recovery.rolling-restart"), nightly=True)
def an_engine_starts_again_late(plan: LabPlan) -> None:
    """One P engine needs 7 s for every start but its first."""
    engines(plan, "p0", "starts_again_slowly_s", 7, ports=[7002])


def _promise_failover(inventory: Inventory) -> None:
    inventory["all"]["vars"]["pd_expect"]["failover_s"] = 3


@defect("no-failover", trips={"recovery.failover"}, edit=_promise_failover, reference="field report R3; vllm-ascend#13165", run=under_load("recovery.failover"), nightly=True)
def the_proxy_goes_on_asking_an_engine_that_is_gone(plan: LabPlan) -> None:
    """Failover within 3 s is promised, and the proxy, which asks nobody how they are, knows nothing of it."""
