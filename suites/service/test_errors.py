"""Each kind of bad request, through the proxy and directly: a clear 4xx, in time, and nothing left behind."""

import json

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules import service
from pdgate.rules.running import need_running
from pdgate.serving.exchange import endpoint_of

FACTS = "ascend-pd-facts 6.1"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def bad(model, context_length):
    """Bad requests by name: (path, body)."""
    return {
        "malformed JSON": (COMPLETIONS, '{"model": "x", "prompt": '),
        "an unknown model": (COMPLETIONS, json.dumps({"model": "no-such-model", "prompt": "hello", "max_tokens": 4})),
        # One word is one token or more in every tokenizer.
        "an over-long prompt": (COMPLETIONS, json.dumps({"model": model, "prompt": "over long " * context_length, "max_tokens": 4})),
        "a negative max_tokens": (COMPLETIONS, json.dumps({"model": model, "prompt": "hello", "max_tokens": -1})),
        "a prompt that is missing": (COMPLETIONS, json.dumps({"model": model, "max_tokens": 4})),
        "a temperature that is no number": (COMPLETIONS, json.dumps({"model": model, "prompt": "hello", "temperature": "hot"})),
        "a path that is not served": ("/v1/no-such-path", json.dumps({"model": model, "prompt": "hello"})),
    }


@pytest.fixture
def is_refused(refused, bad, front, judge):
    """Send it through the proxy and judge the answer and what it left."""

    def run(what):
        path, body = bad[what]
        record, settling = refused(what, body, path)
        judge(service.is_a_clear_client_error(f"proxy {front.name}", what, record))
        judge(service.leaves_nothing_behind(what, settling))

    return run


@check("service.errors.malformed-json", severity="major", reference=FACTS)
def test_malformed_json_gets_a_clear_error_and_hangs_nothing(is_refused):
    is_refused("malformed JSON")


@check("service.errors.unknown-model", severity="major", reference=FACTS)
def test_an_unknown_model_gets_a_clear_error_and_hangs_nothing(is_refused):
    is_refused("an unknown model")


@check("service.errors.overlong-prompt", severity="major", reference=f"{FACTS}; vllm-ascend#13929")
def test_an_overlong_prompt_gets_a_clear_error_and_hangs_nothing(is_refused):
    is_refused("an over-long prompt")


@check("service.errors.bad-parameter", severity="major", reference=FACTS)
def test_a_bad_parameter_gets_a_clear_error_and_hangs_nothing(is_refused):
    for what in ("a negative max_tokens", "a prompt that is missing", "a temperature that is no number"):
        is_refused(what)


@check("service.errors.unknown-path", severity="minor")
def test_a_path_that_is_not_served_gets_a_clear_error(is_refused):
    is_refused("a path that is not served")


@check("service.errors.direct", severity="major", reference="vllm-ascend#13929")
def test_the_engine_itself_refuses_every_bad_request_clearly(engine, facts, deployment, bad, refused, judge):
    need_running(engine, facts)
    endpoint = endpoint_of(deployment, engine)
    if endpoint is None:
        raise UnknownFact(f"{engine.name}: the inventory gives no address for its HTTP")
    for what, (path, body) in bad.items():
        record, settling = refused(what, body, path, to=endpoint)
        judge(service.is_a_clear_client_error(engine.name, what, record))
        judge(service.leaves_nothing_behind(what, settling))
