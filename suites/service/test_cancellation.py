"""Clients that leave in each phase of a request's life, and all at once: nothing stays behind."""

import pytest

from pdgate.facts.model import UnknownFact
from pdgate.plugin import check
from pdgate.rules import service
from pdgate.rules.finding import NotRun
from pdgate.serving import cancel
from pdgate.serving.exchange import fresh_prompt, observe, wait_for_baseline
from pdgate.serving.golden import corpus

R1 = "field report R1"
ISSUES = "vllm#50425, vllm-ascend#14142"
LONG_ANSWER, STORM_ANSWER, SHORT_ANSWER = 1000, 200, 16


def _longest(longest_prompt, model, seed):
    [prompt] = corpus(longest_prompt, SHORT_ANSWER, seed=seed, lengths=1)
    return cancel.Prompt("cancel", prompt.text, model, prompt.max_tokens)


@pytest.fixture(scope="module")
def longest(longest_prompt, model):
    """The longest prompt the deployment is said to take: long in each phase."""
    return _longest(longest_prompt, model, 2)


@pytest.fixture(scope="module")
def longest_in_a_queue(longest_prompt, model):
    """Another one of that length, for many at once."""
    return _longest(longest_prompt, model, 3)


@pytest.fixture
def left_behind(pytestconfig, deployment, model, bound, judge, pdgate_run):
    """Cancel, then judge what stays on prefill and decode."""
    if pytestconfig.getoption("gentle"):
        raise NotRun("--gentle")

    def run(act):
        baseline, _ = observe(deployment)
        cancelled = act()
        settling = wait_for_baseline(deployment, model, baseline, bound[0])
        if cancelled.record is not None:
            pdgate_run.keep(cancelled.record)
        if cancelled.missed:
            raise NotRun(cancelled.missed)
        judge(service.cancel_leaves_nothing(cancelled.phase, cancelled.proof, settling, bound[1]))

    return run


@check("service.cancel.queued", severity="critical", reference=ISSUES)
def test_requests_cancelled_while_queued_leave_nothing(left_behind, deployment, door, longest_in_a_queue, wish, deadline_s):
    left_behind(lambda: cancel.while_queued(deployment, door, longest_in_a_queue, max(1, wish.max_concurrency), deadline_s))


@check("service.cancel.prefilling", severity="critical", reference=ISSUES)
def test_a_request_cancelled_while_prefilling_leaves_nothing(left_behind, deployment, door, longest, deadline_s):
    left_behind(lambda: cancel.while_prefilling(deployment, door, longest, deadline_s))


@check("service.cancel.prefilled", severity="critical", reference="vllm-ascend#13929; vllm#50425")
def test_a_prefill_that_no_decoder_fetches_is_given_up_in_time(left_behind, deployment, longest, deadline_s):
    left_behind(lambda: cancel.once_prefilled(deployment, longest, deadline_s))


@check("service.cancel.transferring", severity="critical", reference=ISSUES)
def test_a_request_cancelled_while_its_kv_is_transferred_leaves_nothing(left_behind, deployment, longest, deadline_s):
    left_behind(lambda: cancel.while_transferring(deployment, longest, deadline_s))


@check("service.cancel.baseline", severity="critical", reference=R1)
def test_a_cancelled_request_leaves_nothing_on_prefill_and_decode(deployment, door, front, model, bound, deadline_s, context_length, judge):
    for reset in (False, True):  # with a goodbye after a chunk, and without one between two
        baseline, _ = observe(deployment)
        prompt = fresh_prompt("cancel", model, max_tokens=min(LONG_ANSWER, context_length // 2))
        cancelled = cancel.while_decoding(door, prompt, deadline_s, reset)
        settling = wait_for_baseline(deployment, model, baseline, bound[0])
        judge(service.came_back_to_baseline(f"proxy {front.name}", cancelled.record, settling, bound[1]))


@check("service.cancel.storm", severity="critical", reference="sglang#28651")
def test_many_clients_leaving_at_once_leave_nothing_and_break_nothing(deployment, door, model, bound, wish, deadline_s, context_length, judge):
    if wish.max_concurrency < 2:
        raise NotRun("--gentle, or pd_load.max_concurrency below 2")
    baseline, _ = observe(deployment)
    prompt = fresh_prompt("storm", model, max_tokens=min(STORM_ANSWER, context_length // 4))
    records = cancel.storm(door, prompt, wish.max_concurrency, deadline_s)
    if not any(record.outcome == "aborted" for record in records):
        raise UnknownFact(f"no client of the storm got as far as leaving: {records[0].outcome}: {records[0].detail}")
    settling = wait_for_baseline(deployment, model, baseline, bound[0])
    judge(service.cancel_leaves_nothing(f"storm of {len(records)}", f"{sum(r.outcome == 'aborted' for r in records)} left", settling, bound[1]))
