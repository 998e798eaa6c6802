"""An engine, or one process of it, is killed or stalled under load: what do clients see, and does it come back?"""

import pytest

from chaos.experiment import run
from chaos.faults.processes import Kill, Stall
from pdgate.plugin import check
from pdgate.rules.recovery import Expectation

DOWN_S, AFTER_S = 2.0, 6.0
STALL_S = 3.0


def killing(stage, engine, part):
    def make(facts, tag):
        return Kill(engine.name, engine.host, part, stage.victims(engine, part, facts), engine.restart or "", engine.http_port)

    return make


def stalling(stage, engine, part):
    def make(facts, tag):
        return Stall(engine.name, engine.host, part, stage.victims(engine, part, facts))

    return make


@pytest.mark.smoke
@check("recovery.prefill-lost", severity="critical", reference="field report R3; vllm-ascend#17044", waivable=False)
def test_a_prefill_engine_is_killed_under_load_and_comes_back(stage, prefills, judged_by):
    outcome = run(stage, "recovery.prefill-lost", killing(stage, prefills[0], "engine"), hurt_s=DOWN_S, after_s=AFTER_S + stage.wish.restart_s)
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s))


@check("recovery.decode-lost", severity="critical", reference="field report R3; vllm-ascend#7514", waivable=False)
def test_a_decode_engine_is_killed_under_load_and_comes_back(stage, decoders, judged_by):
    outcome = run(stage, "recovery.decode-lost", killing(stage, decoders[0], "engine"), hurt_s=DOWN_S, after_s=AFTER_S + stage.wish.restart_s)
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s))


@check("recovery.worker-lost", severity="critical", reference="real-engines: killing only Worker takes the engine down", waivable=False)
def test_one_worker_of_a_decode_engine_is_killed_under_load(stage, decoders, judged_by):
    outcome = run(stage, "recovery.worker-lost", killing(stage, decoders[-1], "worker"), hurt_s=DOWN_S, after_s=AFTER_S + stage.wish.restart_s)
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s))


@check("recovery.decode-stalled", severity="critical", reference="vllm#45526", waivable=False)
def test_a_stalled_decode_engine_goes_on_where_it_was(stage, decoders, judged_by):
    outcome = run(stage, "recovery.decode-stalled", stalling(stage, decoders[0], "engine"), hurt_s=STALL_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s))
