"""The load that runs through an experiment in the background, and everything seen meanwhile."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Deployment, Proxy
from pdgate.inventory.variables import Load
from pdgate.rules.load import must_be_applied
from pdgate.serving.exchange import decoder_alone, front_of
from pdgate.serving.golden import GoldenBook, judged_twice
from pdgate.serving.load import LoadFailed, LoadPlan, LoadResult, Stage, end_early, run_load, schedule
from pdgate.serving.logs import LogBook, Logs, attribute
from pdgate.serving.record import Record, append_records, now
from pdgate.serving.watch import Moment, Watch

FLOWING_S = 1.0
CALM_S, CALM_REQUESTS = 2.0, 5
KEEPS_UP = 0.5


@dataclass
class Observation:
    """A load in a thread, from `start` to `finish`; records are judged when it has ended."""

    deployment: Deployment
    plan: LoadPlan
    book: GoldenBook
    logbook: LogBook
    folder: Path

    def __post_init__(self) -> None:
        self._result: LoadResult | None = None
        self._failure: LoadFailed | None = None
        self._thread = threading.Thread(target=self._play, daemon=True, name="pdgate-load")
        self._watch = Watch(self.deployment, 0.5)
        self._slots = list(schedule(self.plan))

    @property
    def _records(self) -> Path:
        return self.folder / "load" / "records.jsonl"

    def _play(self) -> None:
        try:
            self._result = run_load(self.plan, self.folder / "load")
        except LoadFailed as error:
            self._failure = error

    def start(self) -> None:
        """Begin, and come back once answers have come in; raises UnknownFact where none do."""
        self.logbook.read()
        self._watch.__enter__()
        self._thread.start()
        records = self._records
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._failure is None:
            if records.exists() and any('"ok"' in line for line in records.read_text().splitlines()):
                time.sleep(FLOWING_S)
                return
            time.sleep(0.1)
        raise UnknownFact(f"the load did not start: {self._failure or 'no good answer in 60 s'}")

    def must_keep_up(self) -> None:
        """Raises UnknownFact where fewer than half of the requests sent so far have ended: then every later hang is the load's own doing."""
        start, ended = self._ended()
        due = sum(start + slot.at <= now() for slot in self._slots)
        if len(ended) < due * KEEPS_UP:
            raise UnknownFact(
                f"the load is more than the deployment carries: {len(ended)} of {due} requests had ended before the fault; lower pd_load.rate or --load-rate "
                f"(now {self.plan.stages[0].rate:g} a second)"
            )

    def until_calm(self, at_most_s: float, back: Callable[[], bool]) -> None:
        """Let the load run on until everything sent from now on has been good for a while and `back` holds, then end it.

        From now on, and not from the healing: taking Toxiproxy out may just have ended connections. At most so long: whoever never
        recovers is watched to the end.
        """
        since = now()
        calm_s = max(CALM_S, CALM_REQUESTS / self.plan.stages[0].rate)
        deadline = time.monotonic() + at_most_s
        is_back = False
        while time.monotonic() < deadline and self._thread.is_alive():
            is_back = is_back or back()
            if is_back and self._calm_for(since) >= calm_s:
                break
            time.sleep(0.25)
        end_early(self.folder / "load")

    def _ended(self) -> tuple[float, list[dict[str, Any]]]:
        """When the load began, and the requests that have ended so far."""
        entries = [json.loads(line) for line in self._records.read_text().splitlines() if line.endswith("}")]
        return next(entry["start"] for entry in entries if "start" in entry), [entry for entry in entries if "outcome" in entry]

    def _calm_for(self, since: float) -> float:
        """Seconds behind the last bad request (or `since`) for which every request that was sent has ended, and well."""
        start, entries = self._ended()
        ended = {round(entry["scheduled"] - start, 3): entry["outcome"] for entry in entries}
        begin = max([since - start, *(at for at, outcome in ended.items() if outcome != "ok")])
        # What is still on its way may end badly: calm reaches up to it and no further.
        first_open = next((slot.at for slot in self._slots if round(slot.at, 3) not in ended), self.plan.seconds)
        return first_open - begin

    def __enter__(self) -> Observation:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A load nobody will judge must not outlive its experiment."""
        if kind is not None and self._thread.is_alive():
            end_early(self.folder / "load")
            self._thread.join(self.plan.deadline_s + 30)
            self._watch.__exit__()

    def finish(self) -> tuple[list[Record], Logs, list[Moment]]:
        """Wait for the load's end; raises UnknownFact where it was not applied as planned."""
        self._thread.join(self.plan.seconds + self.plan.deadline_s + 90)
        self._watch.__exit__()
        if self._failure is not None or self._result is None:
            raise UnknownFact(f"the load was not applied: {self._failure or 'it did not end'}")
        must_be_applied(self._result)
        logs = Logs(self.logbook.read(), dict(self.logbook.unknown), datetime.date.today())
        judged, _ = judged_twice(self._result.records, self.book, decoder_alone(self.deployment), self.plan.deadline_s)
        records = attribute(judged, logs)
        append_records(self.folder / "requests.jsonl", records)
        return records, logs, self._watch.moments


def through_plan(deployment: Deployment, proxy: Proxy, wish: Load, book: GoldenBook, deadline_s: float, seconds: float) -> LoadPlan:
    """A constant load without aborts that lasts through the experiment."""
    endpoint = front_of(deployment, proxy)
    prompts = [golden.prompt for golden in book.answers.values()]
    return LoadPlan(
        url=endpoint.url, api_key_env=endpoint.api_key_env, model=book.model, prompts=prompts, seed=wish.seed, stream_share=wish.stream_share,
        stages=[Stage(seconds=seconds, rate=wish.rate, arrival="constant")], deadline_s=deadline_s,
    )  # fmt: skip


def keep_timeline(folder: Path, name: str, document: dict[str, object]) -> None:
    """The experiment's own page of numbers in the bundle."""
    (folder / "experiments").mkdir(exist_ok=True)
    (folder / "experiments" / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
