"""What a deployment does wrong when P is lost: seen with the experiments below chaos/."""

from __future__ import annotations

from lab.defects.registry import defect
from lab.plan import LabPlan

EXPERIMENT = "chaos/experiments/test_lost_prefill.py"


def _run(which: str) -> tuple[str, ...]:
    return (EXPERIMENT, "--chaos", "-k", which)


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
