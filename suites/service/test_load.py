"""A steady load with aborts: what clients got, whether the sums agree, and what it left on the engines."""

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules import balance, health, load, service
from pdgate.rules.finding import NotRun
from pdgate.rules.logs import no_forced_frees


@pytest.fixture
def proxy_name(front):
    return f"proxy {front.name}"


@check("service.load.wrong", severity="critical", reference="vllm-ascend#17044, #15420", waivable=False)
def test_no_answer_under_load_is_wrong(steady, proxy_name, judge):
    judge(load.no_wrong_answers(proxy_name, steady.records, steady.book))


@check("service.load.answered", severity="critical", reference="vllm-ascend#13140")
def test_every_request_under_load_is_answered(steady, proxy_name, judge):
    judge(load.everything_answered(proxy_name, steady.records))


@check("service.stream.integrity", severity="critical", reference="vllm-ascend#13140, #12166")
def test_every_stream_under_load_is_whole(steady, golden, proxy_name, judge):
    asked = {name: known.prompt.max_tokens for name, known in golden.answers.items()}
    judge(load.streams_are_whole(proxy_name, steady.records, asked))


@check("service.load.conservation", severity="major", reference="field report R2")
def test_sent_is_what_was_finished_and_counted(steady, deployment, judge):
    judge(load.sums_agree(deployment, steady.load, steady.before, steady.after))


@check("service.load.kv", severity="critical", reference="vllm-ascend#12383, #13240")
def test_the_load_leaves_no_kv_on_prefill_and_decode(steady, bound, judge):
    aborted = sum(record.outcome == "aborted" for record in steady.records)
    judge(service.kv_is_free_again(f"{len(steady.records)} requests, {aborted} aborted", steady.settling, bound[1]))


@check("service.load.no-forced-frees", severity="major", reference="vllm-ascend#13240, #15420")
def test_prefill_gives_up_no_kv_in_steady_state(steady, engine, judge):
    if not engine.serves_prefill:
        raise NotRun(f"{engine.connector} holds KV for others on prefill engines only")
    judge(no_forced_frees(engine, steady.logs, steady.records))


@check("service.health.honest", severity="major", reference="vllm#45526")
def test_health_says_what_the_tokens_say(steady, deployment, golden, judge):
    moments = {engine.name: steady.of(engine.name) for engine in deployment.engines}
    judge(health.health_is_honest(deployment, moments, health.silence_allowed(golden.slowest_s)))


@check("service.proxy.drained", severity="major", reference="vllm-ascend#13214, #16517")
def test_the_proxy_counts_what_is_in_flight(steady, proxy, judge):
    if proxy.name not in steady.drained:
        raise UnknownFact(f"proxy {proxy.name} was not looked at")
    judge(health.proxy_counters_are_sane(proxy, steady.of(f"proxy {proxy.name}"), steady.drained[proxy.name]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@check("service.balance", severity="major", reference="field report R2; vllm-ascend#13214")
def test_each_engine_gets_its_share(sweep, steady, deployment, role, judge):
    burst = len(sweep.levels[max(sweep.levels)])
    judge(balance.shares_are_fair(deployment, role, sweep.before, sweep.after, steady.timeline(), burst))
