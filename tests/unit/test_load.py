"""A load is a schedule first: the same seed gives the same one, open loop, shared out without overlap; played times are true."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pdgate.facts.model import UnknownFact
from pdgate.rules.load import must_be_applied, must_be_punctual
from pdgate.rules.statistics import percentile
from pdgate.serving.load import LoadFailed, LoadPlan, LoadPrompt, LoadResult, Stage, run_load, schedule
from pdgate.serving.record import now

PROMPTS = [LoadPrompt(id="short", text="a b c"), LoadPrompt(id="long", text="d " * 300, api="chat")]
TOKENS, PAUSE_S = 8, 0.02


def plan(url: str = "http://127.0.0.1:1", **values: object) -> LoadPlan:
    defaults = {"stages": [Stage(seconds=2, rate=20)], "deadline_s": 5, "stream_share": 0.7, "abort_share": 0.2}
    return LoadPlan(url=url, model="m", prompts=PROMPTS, **{**defaults, **values})


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert list(schedule(plan(seed=5))) == list(schedule(plan(seed=5)))
    assert list(schedule(plan(seed=5))) != list(schedule(plan(seed=6)))


def test_rates_ramps_and_bursts_are_what_they_say() -> None:
    constant = [slot.at for slot in schedule(plan(stages=[Stage(seconds=10, rate=10, arrival="constant")]))]
    assert len(constant) == 100 and constant[1] - constant[0] == pytest.approx(0.1)
    ramp = [slot.at for slot in schedule(plan(stages=[Stage(seconds=10, rate=0, rate_end=20, arrival="constant")]))]
    assert len(ramp) == pytest.approx(100, abs=1) and sum(at < 5 for at in ramp) == pytest.approx(25, abs=1)
    burst = [slot.at for slot in schedule(plan(stages=[Stage(seconds=3, rate=1), Stage(seconds=1, rate=40, arrival="burst")]))]
    assert burst.count(3.0) == 40
    assert not list(schedule(plan(stages=[Stage(seconds=5, rate=0)])))


def test_shares_of_streams_and_aborts_are_kept() -> None:
    slots = list(schedule(plan(stages=[Stage(seconds=100, rate=50)])))
    assert sum(slot.stream for slot in slots) / len(slots) == pytest.approx(0.7, abs=0.03)
    assert sum(slot.leave() is not None for slot in slots) / len(slots) == pytest.approx(0.2, abs=0.03)
    assert len({slot.salt for slot in slots}) == len(slots)


@pytest.fixture(scope="module")
def truth() -> Iterator[str]:
    """A server that writes into each token when it sent it, by its own clock: the same clock as ours."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if not asked["stream"]:
            return web.json_response({"id": "x", "choices": [{"text": " t", "message": {"content": " t"}, "finish_reason": "length"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(TOKENS):
            await asyncio.sleep(PAUSE_S)
            text = f" {time.time():.6f}"
            choice = {"text": text, "delta": {"content": text}, "finish_reason": "length" if index == TOKENS - 1 else None}
            await response.write(f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_scheduled_request_is_a_record_with_true_times(truth: str, tmp_path: Path, workers: int) -> None:
    asked = plan(truth, abort_share=0.1)
    result = run_load(asked, tmp_path, workers=workers)
    slots = list(schedule(asked))
    assert len(result.records) == len(slots) == sum(result.counts().values()) and result.unsent == 0
    assert result.workers == max(1, workers)
    assert set(result.counts()) <= {"ok", "aborted"}
    must_be_applied(result)
    # Open loop: each record bears the time it was scheduled for, whatever the answers took.
    for slot, record in zip(slots, result.records, strict=True):
        assert record.scheduled == pytest.approx(result.start + slot.at, abs=0.001 + result.clock_radius_s)
    errors = [abs(at - float(word)) for record in result.records for at, word in zip(record.tokens, record.text.split(), strict=False) if record.stream]
    assert len(errors) > 100
    assert percentile(errors, 0.9).value < 0.005  # a busy machine may delay a few; benchmarks/load.py tells the whole distribution


def test_a_load_nobody_answers_is_all_errors_and_not_a_failure_of_the_load(tmp_path: Path) -> None:
    result = run_load(plan(stages=[Stage(seconds=1, rate=10)]), tmp_path)
    assert set(result.counts()) == {"error"}


def test_a_broken_locust_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdgate.serving.load.run.LOCUSTFILE", tmp_path / "gone.py")
    with pytest.raises(LoadFailed, match=r"locust ended with code 1.*gone\.py"):
        run_load(plan(), tmp_path)


def test_a_load_that_was_not_applied_proves_nothing(truth: str, tmp_path: Path) -> None:
    good = run_load(plan(truth, stages=[Stage(seconds=1, rate=20)]), tmp_path)
    late = [record.model_copy(update={"sent": record.sent + 0.5}) for record in good.records]
    for broken, rule, word in [
        (LoadResult(good.plan, [], now()), must_be_applied, "made no request"),
        (LoadResult(good.plan, good.records, now(), unsent=3), must_be_applied, "3 scheduled requests were not sent"),
        (LoadResult(good.plan, late, now()), must_be_punctual, "itself was late"),
    ]:
        with pytest.raises(UnknownFact, match=word):
            rule(broken)
