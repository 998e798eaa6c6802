"""Field report R1, last step: a request is cancelled on purpose while D waits for KV; D is back within the abort timeout and never hangs."""

import itertools

from chaos import phases
from chaos.faults.processes import Stall
from chaos.single import asked_now, hit
from pdgate.plugin import check
from pdgate.rules import recovery

STALL_S = 0.8


@check("recovery.cancel-while-waiting", severity="critical", reference="field report R1; vllm-ascend#13240", waivable=False)
def test_a_request_cancelled_while_decode_waits_for_a_prefill_that_stands_still_is_given_back_in_time(stage, prefills, deployment, judge):
    p = asked_now(stage, prefills)

    def make(facts, tag):
        # Its workers only: P still answers the proxy, which asks D, which cannot have the KV.
        return Stall(p.name, p.host, "workers", stage.victims(p, "workers", facts), phases.held_back(stage, p, tag))

    found = hit(stage, "recovery.cancel-while-waiting", make, hurt_s=STALL_S, leaves=True)
    phases.was_left(found)
    judge(itertools.chain(
        recovery.kv_is_back(found.settling, found.victims),
        recovery.good_again(f"proxy {stage.proxy.name}", found.good_s, stage.wish.recovery_s, p.name),
        recovery.nobody_else_died(deployment, found.before, found.after, set()),
    ))  # fmt: skip
