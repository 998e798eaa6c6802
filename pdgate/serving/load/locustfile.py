"""Plays a load plan under Locust; only ever loaded by the `locust` command, never imported by pdgate (gevent stays there).

Each worker plays its share of one schedule: slot n belongs to worker n modulo their number. The start is agreed in the
master's clock; each worker knows its own offset to it from a few exchanges and states its times in the master's clock.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Pool
from locust import User, events, task
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from pdgate.serving.client import Endpoint, complete, stream
from pdgate.serving.load.plan import LoadPlan, Slot, prompt_of, schedule
from pdgate.serving.record import Record, now

FLUSH_S = 0.25
HEAD_START_S = 0.3
PINGS = 5


class Clocks:
    """This worker's clock against the master's, from the exchange with the shortest round trip."""

    def __init__(self) -> None:
        self.offset, self.radius = 0.0, 0.0
        self.answers: list[tuple[float, float]] = []
        self.arrived = gevent.event.Event()

    def measure(self, runner: WorkerRunner) -> None:
        self.answers.clear()
        for _ in range(PINGS):
            self.arrived.clear()
            runner.send_message("pdgate-ping", {"sent": now()})
            self.arrived.wait(timeout=2)
        if self.answers:
            self.offset, self.radius = min(self.answers, key=lambda answer: answer[1])

    def on_pong(self, data: dict[str, float]) -> None:
        back = now()
        self.answers.append(((data["sent"] + back) / 2 - data["master"], (back - data["sent"]) / 2))
        self.arrived.set()


class Sink:
    """Where finished records go: into the file, or to the master that has it."""

    def __init__(self) -> None:
        self.path = os.environ.get("PDGATE_LOAD_RECORDS")
        self.waiting: list[dict[str, Any]] = []
        self.unsent = 0

    def write(self, lines: list[dict[str, Any]]) -> None:
        assert self.path, "PDGATE_LOAD_RECORDS is not set"
        with Path(self.path).open("a") as out:
            out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def flush(self, runner: Any) -> None:
        lines, self.waiting = self.waiting, []
        if not lines:
            return
        if isinstance(runner, WorkerRunner):
            runner.send_message("pdgate-records", {"lines": lines})
        else:
            self.write(lines)


CLOCKS, SINK = Clocks(), Sink()
STOP = Path(os.environ.get("PDGATE_LOAD_STOP", "/nonexistent"))
START: dict[str, Any] = {}
READY: dict[str, float] = {}
DONE: set[str] = set()


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        plan = Path(os.environ["PDGATE_LOAD_PLAN"]).read_text()
        runner.register_message("pdgate-ping", lambda environment, msg, **_: _pong(runner, msg))
        runner.register_message("pdgate-records", lambda environment, msg, **_: SINK.write(msg.data["lines"]))
        runner.register_message("pdgate-ready", lambda environment, msg, **_: _start_together(runner, msg, plan))
        runner.register_message("pdgate-done", lambda environment, msg, **_: _end(runner, msg))
    elif isinstance(runner, WorkerRunner):
        runner.register_message("pdgate-pong", lambda environment, msg, **_: CLOCKS.on_pong(msg.data))
        runner.register_message("pdgate-start", lambda environment, msg, **_: START.update(msg.data))


def _pong(runner: MasterRunner, message: Any) -> None:
    runner.send_message("pdgate-pong", {**message.data, "master": now()}, message.node_id)


def _start_together(runner: MasterRunner, message: Any, plan: str) -> None:
    """Once all workers are ready they get their places in the schedule and one start."""
    READY[message.node_id] = message.data["radius"]
    if len(READY) < int(os.environ["PDGATE_LOAD_WORKERS"]):
        return
    start = now() + HEAD_START_S
    SINK.write([{"start": start, "workers": len(READY), "clock_radius_s": max(READY.values())}])
    for index, node in enumerate(sorted(READY)):
        runner.send_message("pdgate-start", {"at": start, "index": index, "of": len(READY), "plan": plan}, node)


def _end(runner: MasterRunner, message: Any) -> None:
    DONE.add(message.node_id)
    SINK.write([{"unsent": message.data["unsent"]}])
    if set(READY) <= DONE:
        runner.quit()


class Client(User):
    """The one user of a worker; it plays the worker's part of the schedule, whatever the answers do (open loop)."""

    @task
    def play(self) -> None:
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            CLOCKS.measure(runner)
            runner.send_message("pdgate-ready", {"radius": CLOCKS.radius})
            while "at" not in START:
                gevent.sleep(0.005)
        elif isinstance(runner, LocalRunner):
            START.update({"at": now() + HEAD_START_S, "index": 0, "of": 1, "plan": Path(os.environ["PDGATE_LOAD_PLAN"]).read_text()})
            SINK.write([{"start": START["at"], "workers": 1, "clock_radius_s": 0.0}])
        plan = LoadPlan.model_validate_json(START["plan"])
        start = START["at"] + CLOCKS.offset
        pool = Pool(plan.most_in_flight)
        flusher = gevent.spawn(self._flush_for_ever)
        for slot in schedule(plan):
            if slot.number % START["of"] != START["index"]:
                continue
            gevent.sleep(max(0.0, start + slot.at - now()))
            if STOP.exists():
                break
            if pool.free_count() == 0:
                SINK.unsent += 1
                continue
            pool.spawn(self._request, plan, slot, start + slot.at)
        pool.join(timeout=plan.deadline_s + 10)
        SINK.unsent += len(pool)
        flusher.kill()
        SINK.flush(runner)
        if isinstance(runner, WorkerRunner):
            runner.send_message("pdgate-done", {"unsent": SINK.unsent})
            gevent.sleep(3600)  # the master ends us
        SINK.write([{"unsent": SINK.unsent}])
        runner.quit()

    def _flush_for_ever(self) -> None:
        while True:
            gevent.sleep(FLUSH_S)
            SINK.flush(self.environment.runner)

    def _request(self, plan: LoadPlan, slot: Slot, scheduled: float) -> None:
        ask = stream if slot.stream else complete
        record = ask(Endpoint(plan.url, plan.api_key_env), prompt_of(plan, slot), plan.deadline_s, leave=slot.leave(), scheduled=scheduled)
        SINK.waiting.append(_in_masters_clock(record, CLOCKS.offset).model_dump(mode="json"))
        assert record.end is not None
        self.environment.events.request.fire(
            request_type="stream" if slot.stream else "whole", name=record.prompt_id, response_time=(record.end - scheduled) * 1000,
            response_length=len(record.text), exception=None if record.outcome in ("ok", "aborted") else RuntimeError(record.outcome), context={},
        )  # fmt: skip


def _in_masters_clock(record: Record, offset: float) -> Record:
    if not offset:
        return record
    moved = {name: getattr(record, name) - offset for name in ("scheduled", "sent", "first_byte", "end") if getattr(record, name) is not None}
    return record.model_copy(update={**moved, "tokens": [at - offset for at in record.tokens]})
