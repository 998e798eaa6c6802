"""Answers that are wrong, late, missing, or right for the wrong reason."""

from __future__ import annotations

from lab.defects.registry import defect
from lab.plan import LabPlan

FIRST_DECODER = "engine:7000"


@defect("wrong-kv", trips={"service.request.golden"}, reference="vllm-ascend#17044")
def decode_answers_over_unwritten_kv(plan: LabPlan) -> None:
    """D marks a pull as received that it never wrote: fluent wrong text with status 200, metric and log line included."""
    plan.host_of("d0").misbehave(FIRST_DECODER, "drop_pulled_kv", {"from": 1})


@defect("kv-params-dropped", trips={"service.request.kv-moved"}, alone=True)
def the_proxy_drops_the_transfer_parameters(plan: LabPlan) -> None:
    """The proxy forgets kv_transfer_params: D prefills everything itself, and all answers are right."""
    plan.host_of("p0").misbehave("proxy", "kv_params_dropped")


@defect("ghost-waiting", trips={"service.request.generated"})
def a_request_never_leaves_the_waiting_queue(plan: LabPlan) -> None:
    """D answers, but one entry stays in WAITING_FOR_REMOTE_KVS for ever."""
    plan.host_of("d0").misbehave(FIRST_DECODER, "ghost_waiting")


@defect(
    "decode-hangs", trips={"service.request.golden", "service.request.generated"},
    invalid={"service.request.kv-moved", "service.cancel.baseline"}, reference="vllm#35943",
)  # fmt: skip
def decode_waits_for_kv_for_ever(plan: LabPlan) -> None:
    """D sits in WAITING_FOR_REMOTE_KVS for ever; clients see silence."""
    plan.host_of("d0").misbehave(FIRST_DECODER, "hang_waiting_for_kv", {"from": 1})


@defect("decode-keeps-blocks", trips={"service.cancel.baseline"}, reference="vllm-ascend#12383")
def decode_keeps_the_blocks_of_aborted_requests(plan: LabPlan) -> None:
    """D never frees the KV blocks of a request whose client went away."""
    plan.host_of("d0").misbehave(FIRST_DECODER, "leak_on_abort", {"state": "running"})


@defect("health-503", trips={"service.health"})
def an_engine_says_it_is_ill(plan: LabPlan) -> None:
    """The last decode engine answers /health with 503."""
    plan.host_of("d0").misbehave("engine:7003", "health_503")


@defect("lists-another-model", trips={"service.models"})
def an_engine_lists_another_model(plan: LabPlan) -> None:
    """The last decode engine lists another model name in /v1/models."""
    plan.host_of("d0").misbehave("engine:7003", "models_lists", "Qwen3-8B")


@defect("malformed-json-500", trips={"service.errors.malformed-json"}, reference="vllm-ascend v0.23.0 proxy")
def malformed_json_gets_500(plan: LabPlan) -> None:
    """The proxy answers malformed JSON with 500, as vllm-ascend's v0.23.0 example does."""
    plan.host_of("p0").misbehave("proxy", "malformed_json_500")


@defect("unknown-model-500", trips={"service.errors.unknown-model"}, reference="vllm-ascend v0.23.0 proxy")
def an_unknown_model_gets_500(plan: LabPlan) -> None:
    """The proxy turns P's 404 into 500."""
    plan.host_of("p0").misbehave("proxy", "client_errors_become_500", {"status": 404})


@defect("overlong-prompt-500", trips={"service.errors.overlong-prompt"}, reference="vllm-ascend v0.23.0 proxy")
def an_overlong_prompt_gets_500(plan: LabPlan) -> None:
    """The proxy turns P's 400 into 500."""
    plan.host_of("p0").misbehave("proxy", "client_errors_become_500", {"status": 400, "saying": "maximum context length"})
