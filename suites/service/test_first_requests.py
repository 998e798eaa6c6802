"""Health, one short request with its golden answer, one cancelled request, three bad ones."""

import json

import requests

from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules import service
from pdgate.rules.running import need_running
from pdgate.serving.exchange import endpoint_of, served_models

R1 = "field report R1"


@check("service.health", severity="critical", reference="vllm /health")
def test_the_engine_says_it_is_healthy(engine, deployment, facts, judge):
    need_running(engine, facts)
    endpoint = endpoint_of(deployment, engine)
    if endpoint is None:
        raise UnknownFact(f"{engine.name}: the inventory gives no address for its HTTP")
    status, detail = None, ""
    try:
        status = requests.get(f"{endpoint.url}/health", headers=endpoint.headers(), timeout=5).status_code
        detail = f"HTTP {status}"
    except requests.exceptions.RequestException as error:
        detail = str(error)
    judge(service.answers_health(engine.name, status, detail))


@check("service.models", severity="critical", reference="vllm /v1/models")
def test_the_engine_serves_the_declared_model(engine, deployment, facts, judge):
    need_running(engine, facts)
    endpoint = endpoint_of(deployment, engine)
    if endpoint is None:
        raise UnknownFact(f"{engine.name}: the inventory gives no address for its HTTP")
    try:
        models = served_models(endpoint)
    except ValueError as error:
        raise UnknownFact(str(error)) from None
    judge(service.serves_the_model(engine, models))


@check("service.request.golden", severity="critical", reference=R1, waivable=False)
def test_a_request_through_the_proxy_gets_its_golden_answer(request_made, front, judge):
    judge(service.answer_is_golden(f"proxy {front.name}", request_made.record, request_made.golden))


@check("service.request.kv-moved", severity="critical", reference=R1)
def test_the_kv_of_the_request_moved_from_prefill_to_decode(request_made, deployment, judge):
    judge(service.kv_moved(deployment, request_made))


@check("service.request.generated", severity="critical", reference=R1)
def test_decode_went_from_waiting_to_generating(request_made, deployment, judge):
    judge(service.decode_went_from_waiting_to_generating(deployment, request_made))


@check("service.cancel.baseline", severity="critical", reference=R1)
def test_a_cancelled_request_leaves_nothing_on_prefill_and_decode(cancelled, bound, front, judge):
    record, settling = cancelled
    judge(service.came_back_to_baseline(f"proxy {front.name}", record, settling, bound[1]))


@check("service.errors.malformed-json", severity="major", reference="ascend-pd-facts 6.1")
def test_malformed_json_gets_a_clear_error_and_hangs_nothing(refused, front, judge):
    record, settling = refused("malformed-json", '{"model": "x", "prompt": ')
    judge(service.is_a_clear_client_error(f"proxy {front.name}", "malformed JSON", record))
    judge(service.leaves_nothing_behind("malformed JSON", settling))


@check("service.errors.unknown-model", severity="major", reference="ascend-pd-facts 6.1")
def test_an_unknown_model_gets_a_clear_error_and_hangs_nothing(refused, front, judge):
    body = json.dumps({"model": "no-such-model", "prompt": "hello", "max_tokens": 4})
    record, settling = refused("unknown-model", body)
    judge(service.is_a_clear_client_error(f"proxy {front.name}", "an unknown model", record))
    judge(service.leaves_nothing_behind("an unknown model", settling))


@check("service.errors.overlong-prompt", severity="major", reference="ascend-pd-facts 6.1; vllm-ascend#13929")
def test_an_overlong_prompt_gets_a_clear_error_and_hangs_nothing(refused, front, deployment, model, judge):
    limits = []
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        try:
            limits.append(served_models(endpoint).get(model) if endpoint else None)
        except ValueError:
            continue
    known = [limit for limit in limits if limit]
    if not known:
        raise UnknownFact("no engine tells its max_model_len in /v1/models")
    # One word is one token or more in every tokenizer.
    body = json.dumps({"model": model, "prompt": "over long " * max(known), "max_tokens": 4})
    record, settling = refused("overlong-prompt", body)
    judge(service.is_a_clear_client_error(f"proxy {front.name}", "an over-long prompt", record))
    judge(service.leaves_nothing_behind("an over-long prompt", settling))
