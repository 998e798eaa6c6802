"""P is killed between prefill and decode: does D answer right, fail cleanly, hang, or lie?

All engines of P's host die at once. Whether D had met P before tells `first-contact` from the others: that one on a fresh deployment.
"""

from __future__ import annotations

import uuid

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import right_or_cleanly_failed, serves_again, with_outcome
from pdgate.serving.client import complete
from pdgate.serving.exchange import endpoint_of, fresh_prompt, golden_answer
from pdgate.serving.handover import NoHandover, decode, prefill
from pdgate.serving.logs import LogUnavailable, mark, since

ISSUE = "vllm-ascend#17044"


@pytest.fixture
def pair(consent, deployment):
    """A prefill and a decode engine of their own, with their endpoints."""
    p = next((engine for engine in deployment.engines if engine.role == "prefill"), None)
    d = next((engine for engine in deployment.engines if engine.role == "decode"), None)
    if p is None or d is None:
        raise NotRun("the inventory has no separate prefill and decode engines")
    return p, d, endpoint_of(deployment, p), endpoint_of(deployment, d)


@pytest.fixture
def lose_prefill(pair, outage, deployment, pdgate_run):
    """Prefill on P, kill P, decode on D: (record with its outcome, D's log lines meanwhile, deadline)."""
    p, d, p_endpoint, d_endpoint = pair
    deadline_s = deployment.host_of(d).expect.request_deadline_s
    host = deployment.host_of(d)

    def run(warm: bool):
        if warm:
            _hand_over(p_endpoint, d_endpoint, d.model, deadline_s)
        prompt = fresh_prompt("lost-prefill", d.model)
        golden = golden_answer(deployment, prompt, deadline_s)
        try:
            params = prefill(p_endpoint, prompt, uuid.uuid4().hex, deadline_s)
        except NoHandover as error:
            raise NotRun(f"{d.connector} hands over through its router only: {error}") from None
        with outage([engine for engine in deployment.engines if engine.host == p.host]):
            start = mark(pdgate_run.shells, host.connection, [d.log])[d.log]
            record = with_outcome(decode(d_endpoint, prompt, params, deadline_s), golden)
            pdgate_run.keep(record)
            lines = since(pdgate_run.shells, host.connection, [start])[d.log] if not isinstance(start, LogUnavailable) else start
        return record, ([] if isinstance(lines, LogUnavailable) else lines.lines), deadline_s

    return run


def _hand_over(p_endpoint, d_endpoint, model, deadline_s) -> None:
    """One healthy hand-off, so that D knows P."""
    prompt = fresh_prompt("contact", model)
    try:
        params = prefill(p_endpoint, prompt, uuid.uuid4().hex, deadline_s)
    except NoHandover as error:
        raise NotRun(f"P hands over through its router only: {error}") from None
    record = decode(d_endpoint, prompt, params, deadline_s)
    if record.outcome != "ok":
        raise UnknownFact(f"the healthy hand-off before the fault failed: {record.outcome}: {record.detail}")


@check("recovery.prefill-killed.known-peer", severity="critical", reference=ISSUE, waivable=False)
def test_prefill_killed_before_the_pull_by_a_decoder_that_knew_it(pair, lose_prefill, judge):
    record, lines, deadline_s = lose_prefill(warm=True)
    judge(right_or_cleanly_failed(pair[1], record, lines, deadline_s))


@check("recovery.prefill-killed.first-contact", severity="critical", reference="docs/track-record.md", waivable=False)
def test_prefill_killed_before_the_pull_by_a_decoder_that_never_met_it(pair, lose_prefill, judge):
    record, lines, deadline_s = lose_prefill(warm=False)
    judge(right_or_cleanly_failed(pair[1], record, lines, deadline_s))


@check("recovery.prefill-restarted", severity="critical", reference="smg-project/smg#2491")
def test_the_deployment_serves_again_after_prefill_was_restarted(pair, outage, deployment, pdgate_run, judge):
    p, d, _, _ = pair
    if not deployment.proxies:
        raise UnknownFact("the inventory has no proxy")
    proxy = deployment.proxies[0]
    endpoint = endpoint_of(deployment, proxy)
    deadline_s = deployment.host_of(d).expect.request_deadline_s
    before = complete(endpoint, fresh_prompt("before-restart", d.model), deadline_s)
    if before.outcome != "ok":
        raise UnknownFact(f"the request before the fault failed: {before.outcome}: {before.detail}")
    with outage([engine for engine in deployment.engines if engine.host == p.host]):
        pass
    for attempt in range(10):  # a router may need a health check or two to see that P is back; silence is not waited for again
        prompt = fresh_prompt(f"after-restart-{attempt}", d.model)
        golden = golden_answer(deployment, prompt, deadline_s)
        record = with_outcome(complete(endpoint, prompt, deadline_s), golden)
        pdgate_run.keep(record)
        if record.outcome in ("ok", "wrong", "hang"):
            break
    judge(serves_again(f"proxy {proxy.name}", record, p.name))
