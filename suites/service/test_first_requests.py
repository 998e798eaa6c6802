"""Health, and one short request with its golden answer."""

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
