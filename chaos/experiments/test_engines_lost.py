"""An engine, one process of it, or the proxy is killed or stalled under load: what do clients see, and does it come back?"""

import pytest

from chaos.experiment import identify_pids, killing, run, stalling
from chaos.faults.processes import Kill
from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Expectation

DOWN_S, AFTER_S = 2.0, 6.0
STALL_S = 3.0


@pytest.fixture
def lose(stage, judged_by):
    """Kill a part of an engine under load and judge what became of the deployment."""

    def go(name, engine, part):
        outcome = run(stage, name, killing(stage, engine, part), hurt_s=DOWN_S, after_s=AFTER_S + stage.wish.restart_s)
        judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s))

    return go


@pytest.fixture
def stall(stage, judged_by):
    def go(name, engine):
        outcome = run(stage, name, stalling(stage, engine), hurt_s=STALL_S, after_s=AFTER_S)
        judged_by(outcome, Expectation(stage.wish.recovery_s))

    return go


@check("recovery.prefill-lost", severity="critical", reference="field report R3; vllm-ascend#17044", waivable=False)
def test_a_prefill_engine_is_killed_under_load_and_comes_back(prefills, lose):
    lose("recovery.prefill-lost", prefills[0], "engine")


@check("recovery.decode-lost", severity="critical", reference="field report R3; vllm-ascend#7514", waivable=False)
def test_a_decode_engine_is_killed_under_load_and_comes_back(decoders, lose):
    lose("recovery.decode-lost", decoders[0], "engine")


@check("recovery.worker-lost", severity="critical", reference="real-engines: killing only Worker takes the engine down", waivable=False)
def test_one_worker_of_a_decode_engine_is_killed_under_load(decoders, lose):
    lose("recovery.worker-lost", decoders[0], "worker")


@check("recovery.core-lost", severity="critical", reference="real-engines: killing only EngineCore takes the engine down", waivable=False)
def test_the_engine_core_of_a_prefill_engine_is_killed_under_load(prefills, lose):
    lose("recovery.core-lost", prefills[0], "core")


@check("recovery.api-lost", severity="critical", reference="real-engines: kill -9 of the API server alone leaves orphans", waivable=False)
def test_the_api_server_of_a_prefill_engine_is_killed_and_its_orphans_do_not_keep_it_down(prefills, lose):
    lose("recovery.api-lost", prefills[0], "api")


@check("recovery.proxy-lost", severity="critical", waivable=False)
def test_the_proxy_is_killed_and_serves_again_once_it_is_started(stage, deployment, judged_by):
    proxy = stage.proxy
    if len(deployment.proxies) == 1 and not stage.allow_outage:
        raise NotRun(f"{proxy.name} is the only proxy: the deployment would serve nobody (--allow-outage agrees to that)")

    def make(facts, tag):
        machine = facts[deployment.host_of(proxy).machine]
        pids = sorted({listener.pid for listener in machine.listeners.get() if listener.port == proxy.port and listener.pid is not None})
        if not pids:
            raise UnknownFact(f"nobody listens on {proxy.name}, or who it is cannot be seen")
        every = sorted({child for pid in pids for child in machine.descendants(pid)})
        victims = identify_pids(stage.hand(proxy.host), every, f"proxy {proxy.name}")
        return Kill(proxy.name, proxy.host, "proxy", victims, proxy.restart or "", proxy.port)

    outcome = run(stage, "recovery.proxy-lost", make, hurt_s=DOWN_S, after_s=AFTER_S + stage.wish.restart_s)
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s))


@check("recovery.decode-stalled", severity="critical", reference="vllm#45526", waivable=False)
def test_a_stalled_decode_engine_goes_on_where_it_was(decoders, stall):
    stall("recovery.decode-stalled", decoders[0])


@check("recovery.prefill-stalled", severity="critical", reference="vllm#45526", waivable=False)
def test_a_stalled_prefill_engine_goes_on_where_it_was(prefills, stall):
    stall("recovery.prefill-stalled", prefills[0])
