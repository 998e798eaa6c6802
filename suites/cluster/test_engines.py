"""The engines that run are those that are declared, started in order, with an environment somebody meant."""

from pdgate.plugin import check
from pdgate.rules import engines, environment

R1, R2 = "field report R1", "field report R2"


@check("engines.running", severity="critical", reference=R1)
def test_the_engine_runs(engine, deployment, facts, judge):
    judge(engines.is_running(engine, deployment, facts))


@check("engines.orphans", severity="major", reference="real-engines", phase="any")
def test_no_engine_process_outlived_its_api_server(pd_host, facts, judge):
    judge(engines.has_no_orphans(pd_host, facts))


@check("engines.as-declared", severity="major", reference=R1)
def test_the_engine_runs_as_declared(engine, facts, judge):
    judge(engines.runs_as_declared(engine, facts))


@check("engines.start-order", severity="minor", reference=R1)
def test_prefill_was_complete_before_decode_started(deployment, all_facts, judge):
    judge(engines.prefill_was_complete_first(deployment, all_facts))


@check("environment.policy", severity="minor", reference=R2)
def test_the_environment_follows_documented_defaults(engine, deployment, facts, judge):
    judge(environment.follows_the_policy(engine, deployment, facts))


@check("environment.names", severity="minor", reference=R2)
def test_every_vllm_variable_is_known_to_the_installed_version(engine, facts, judge):
    judge(environment.names_are_known(engine, facts))


@check("environment.timers", severity="major", reference="ascend-pd-facts 3.4")
def test_the_timers_are_in_order(engine, facts, judge):
    judge(environment.timers_are_in_order(engine, facts))
