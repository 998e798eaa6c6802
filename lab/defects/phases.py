"""What becomes of a request that is hit in a phase of its life, and of the deployment after it, done wrong."""

from __future__ import annotations

from lab.defects.misbehaving import decoders, engines, proxy
from lab.defects.recovery import under_load
from lab.defects.registry import defect
from lab.plan import LabPlan


@defect("lost-prefill-hangs", trips={"recovery.hit.prefilling"}, reference="field report R3", run=under_load("recovery.hit.prefilling"), nightly=True)
def the_proxy_never_answers_a_client_whose_prefill_was_lost(plan: LabPlan) -> None:
    """The proxy waits for ever for a P that died while it computed."""
    proxy(plan, "hangs_on_a_lost_prefill")


@defect("prefilled-lost-answered-wrong", trips={"recovery.hit.prefilled"}, reference="vllm-ascend#17044", run=under_load("recovery.hit.prefilled"))
def a_prefill_lost_before_its_pull_is_answered_wrong(plan: LabPlan) -> None:
    """Every D swallows failed pulls: the request whose P died the moment it had prefilled gets a wrong answer."""
    decoders(plan, "swallow_failed_pulls")


@defect("failed-handshake-hangs", trips={"recovery.hit.handshake"}, reference="docs/track-record.md", run=under_load("recovery.hit.handshake"), nightly=True)
def decode_hangs_after_a_failed_handshake(plan: LabPlan) -> None:
    """D's handshake with a P that dies in it fails, and the thread that cleans up never ends."""
    decoders(plan, "hangs_on_a_failed_handshake")


@defect("dead-peer-kept", trips={"recovery.hit.transferring"}, reference="vllm-ascend#5660", run=under_load("recovery.hit.transferring"))
def decode_keeps_a_dead_peer_until_it_is_restarted(plan: LabPlan) -> None:
    """D goes on pulling from where P's old process was, until D itself is restarted."""
    decoders(plan, "keeps_dead_peer")


@defect("unacknowledged-kv-is-lost", trips={"recovery.hit.received"}, reference="vllm-ascend#13240", run=under_load("recovery.hit.received"), nightly=True)
def prefill_never_gives_up_kv_that_nobody_acknowledged(plan: LabPlan) -> None:
    """P has no abort timeout: the KV of a request whose D died is lost until P is restarted."""
    engines(plan, "p0", "never_expires", {"least": 1})


@defect("cut-answer-looks-whole", trips={"recovery.hit.decoding"}, reference="vllm-ascend#13140", run=under_load("recovery.hit.decoding"), nightly=True)
def the_proxy_ends_a_cut_answer_politely(plan: LabPlan) -> None:
    """A stream whose decoder died ends as if it were whole."""
    proxy(plan, "ends_politely")


@defect("cancelled-while-waiting-leaks", trips={"recovery.cancel-while-waiting"}, reference="vllm-ascend#13240; field report R1", run=under_load("cancel-while-waiting"), nightly=True)
def decode_keeps_the_kv_of_a_request_cancelled_while_it_waited(plan: LabPlan) -> None:
    """The blocks of a request whose client left while D waited for KV never come back."""
    decoders(plan, "leak_on_abort", {"state": "deferred"})
