"""Many at once, under load: connections that say nothing, requests whose clients leave."""

import json

from chaos.experiment import run
from chaos.faults.storms import Storm
from pdgate.plugin import check
from pdgate.rules.recovery import Expectation
from pdgate.serving.golden import prompt_with_salt

HURT_S, AFTER_S = 3.0, 5.0
CONNECTIONS, LEAVES_PER_S = 300, 40


def storm(stage, tag, count, body=""):
    """From the machine of the last host of the inventory onto the proxy."""
    proxy = stage.proxy
    host = list(stage.deployment.hosts)[-1]
    address = proxy.address or stage.deployment.host_of(proxy).address
    return Storm(host, str(address), proxy.port, count, tag, body)


@check("recovery.connection-storm", severity="critical", waivable=False)
def test_hundreds_of_idle_connections_hurt_nobody(stage, judged_by):
    outcome = run(stage, "recovery.connection-storm", lambda facts, tag: storm(stage, tag, CONNECTIONS), hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=False, why=f"{CONNECTIONS} idle connections are no load"))


@check("recovery.abort-storm", severity="critical", reference="vllm-ascend#8761; vllm#50425", waivable=False)
def test_clients_that_leave_in_a_storm_strand_nothing_and_hurt_nobody(stage, judged_by):
    shortest = min((known.prompt for known in stage.book.answers.values() if known.prompt.api == "completions"), key=lambda prompt: len(prompt.text))
    body = json.dumps({**prompt_with_salt(shortest, stage.book.model).body(stream=True), "max_tokens": 64})
    rate = max(1, min(LEAVES_PER_S, int(stage.wish.rate * 1.6)))
    outcome = run(stage, "recovery.abort-storm", lambda facts, tag: storm(stage, tag, rate, body), hurt_s=HURT_S, after_s=AFTER_S + stage.kv_bound_s)
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=False, why="other clients leave; these stay"))
