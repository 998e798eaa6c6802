"""Many at once: up to the declared maximum, after a pause, and next to somebody slow."""

import time

from pdgate.plugin import check
from pdgate.rules import concurrency
from pdgate.rules.finding import NotRun
from pdgate.serving.exchange import decoder_alone
from pdgate.serving.golden import judged_twice, prompt_with_salt
from pdgate.serving.manners import at_once, slow_reader

PAUSE_S = 1.2
SLOW_TOKENS = 128


@check("service.concurrency", severity="major", reference="pd_load.max_concurrency")
def test_every_level_up_to_the_declared_concurrency_is_answered(sweep, front, judge):
    judge(concurrency.levels_are_answered(f"proxy {front.name}", sweep.levels))


@check("service.connections.storm", severity="major", reference="vllm-ascend#13482")
def test_twice_as_many_connections_after_a_pause_are_all_served(sweep, door, deployment, front, golden, wish, deadline_s, judge):
    time.sleep(wish.idle_s)
    prompts = [prompt_with_salt(golden.shortest, golden.model) for _ in range(2 * wish.max_concurrency)]
    records = judged_twice(at_once(door, prompts, deadline_s), golden, decoder_alone(deployment), deadline_s)[0]
    judge(concurrency.all_are_served(f"proxy {front.name}", f"{len(prompts)} connections at once after {wish.idle_s:g} s of silence", records))


@check("service.readers.slow", severity="major")
def test_a_slow_reader_gets_its_answer_and_delays_nobody(sweep, door, front, golden, model, deadline_s, judge):
    if door.url.startswith("https"):
        raise NotRun("the slow reader speaks plain HTTP only")
    long_answer = golden.shortest.model_copy(update={"max_tokens": SLOW_TOKENS})
    record = slow_reader(door, prompt_with_salt(long_answer, golden.model), PAUSE_S, deadline_s)
    judge(concurrency.slow_reader_is_served(f"proxy {front.name}", record, golden, SLOW_TOKENS))
