"""One request, hit in a chosen phase: asked through the proxy, one at a time, until the trigger on the faulted host has struck."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.experiment import Make, Prepared, Stage, comes_back, inject, keep, killing, prepare, serving, settle
from chaos.guard import GuardFailed
from chaos.injection import Applied, NotApplied
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Engine
from pdgate.serving.cancel import Held
from pdgate.serving.client import Endpoint, Prompt, complete, stream
from pdgate.serving.exchange import POLL_S, Settling, decoder_alone, endpoint_of, front_of, observe
from pdgate.serving.golden import GoldenBook, GoldenError, judged, judged_twice, learn, prompt_with_salt
from pdgate.serving.load import LoadPrompt
from pdgate.serving.logs import LogBook, Logs
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record, append_records, now

LONG_ANSWER = 64  # tokens: decoding that lasts long enough to be met
GOOD_IN_A_ROW = 3
PAUSE_S = 0.05
ASKED_S = 0.3


@dataclass
class Hit:
    """What became of the request that was hit, and of the deployment after it."""

    name: str
    record: Record
    earlier: list[Record]  # those that were not hit, in order
    applied: Applied
    evidence: str  # what the trigger saw
    good_s: float | None  # from the healing to the first of three good answers in a row
    settling: Settling
    before: dict[str, HostFacts]
    after: dict[str, HostFacts]
    logs: Logs
    samples: tuple[dict[str, Sample], dict[str, Sample]]  # before anything was asked, and while the fault lasted
    victims: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


class Asker(threading.Thread):
    """Asks the same thing again and again, one request at a time, until it is told to stop."""

    def __init__(self, stage: Stage, prompt: LoadPrompt, leaves: bool) -> None:
        super().__init__(daemon=True, name="pdgate-asker")
        self.stage, self.prompt, self.leaves = stage, prompt, leaves
        self.records: list[Record] = []
        self.enough = threading.Event()

    def run(self) -> None:
        door = front_of(self.stage.deployment, self.stage.proxy)
        while not self.enough.is_set():
            asked = prompt_with_salt(self.prompt, self.stage.book.model)
            self.records.append(self._until_told(door, asked) if self.leaves else stream(door, asked, self.stage.deadline_s))
            time.sleep(PAUSE_S)

    def _until_told(self, door: Endpoint, prompt: Prompt) -> Record:
        """A client that leaves once the fault is there; one whose answer begins before leaves then, and is not the one that counts."""
        held = Held(door, prompt, self.stage.deadline_s)
        while not self.enough.is_set() and not held.said() and now() - held.sent < self.stage.deadline_s:
            time.sleep(0.005)
        said = held.said()
        time.sleep(ASKED_S)  # for P's answer to go out, and D to be asked
        return held.leave().model_copy(update={"text": said})


def question(stage: Stage) -> tuple[LoadPrompt, GoldenBook]:
    """The longest prompt of the corpus with a longer answer, and its golden answer, learned once; raises UnknownFact."""
    if stage.question is None:
        stage.question = _learn(stage)
    return stage.question


def asked_now(stage: Stage, candidates: Sequence[Engine]) -> Engine:
    """The engine of these that a request alone goes to, seen by its tokens; raises UnknownFact where none served it.

    A proxy that scores its engines sends requests one at a time to one of them, and which it is follows from all it served before (sums
    of scores leave a rest): aimed at another, one would wait in vain.
    """
    before, _ = observe(stage.deployment)
    record = complete(front_of(stage.deployment, stage.proxy), prompt_with_salt(stage.book.shortest, stage.book.model), stage.deadline_s)
    time.sleep(POLL_S)  # counters follow the answer by a step
    after, unknown = observe(stage.deployment)
    served = [
        engine for engine in candidates
        if engine.name in before and engine.name in after and (after[engine.name].generated_tokens or 0) > (before[engine.name].generated_tokens or 0)
    ]  # fmt: skip
    if not served:
        why = "; ".join(unknown.values()) or f"none of {', '.join(engine.name for engine in candidates)} counted a token"
        raise UnknownFact(f"which engine a request goes to cannot be told: {record.outcome}: {record.detail or why}")
    return served[0]


def _learn(stage: Stage) -> tuple[LoadPrompt, GoldenBook]:
    longest = stage.book.longest
    prompt = longest.model_copy(update={"max_tokens": LONG_ANSWER, "id": f"{longest.id}-{LONG_ANSWER}"})
    engine = next(engine for engine in stage.deployment.engines if engine.serves_decode)
    endpoint = endpoint_of(stage.deployment, engine)
    if endpoint is None:
        raise UnknownFact(f"{engine.name}: the inventory gives no address, so the golden answer cannot be learned")
    try:
        return prompt, learn(endpoint, engine.name, stage.book.model, [prompt], stage.deadline_s)
    except GoldenError as error:
        raise UnknownFact(str(error)) from None


def hit(
    stage: Stage, name: str, make: Make, *, hurt_s: float, holds: Sequence[Make] = (), leaves: bool = False, anew: Engine | None = None,
) -> Hit:  # fmt: skip
    """Strike one request. `anew`: an engine that is restarted beforehand, so that nobody has met it yet; `holds` are faults that keep its phase open, entered before it is asked; with `leaves` its client then goes away.

    Raises UnknownFact where the fault was not applied or nothing is known of the request, NotRun where it is refused.
    """
    prompt, book = question(stage)
    ready = prepare(stage, [*holds, make])
    if anew is not None:
        restart_quietly(stage, anew)
        ready = prepare(stage, [*holds, make], steady=False)  # a steady state would have met it
    folder = stage.bundle / name.replace(".", "-")
    logbook = LogBook(stage.deployment, stage.shells, folder / "logs")
    asker = Asker(stage, prompt, leaves)
    (fault, tag), before = ready.faults[-1], ready.faults[:-1]
    try:
        with contextlib.ExitStack() as stack:
            for held, its_tag in before:
                stack.enter_context(inject(stage, held, its_tag, hurt_s + 30))
            began = threading.Timer(0.3, asker.start)  # the trigger needs a moment to stand
            began.start()
            applied = stack.enter_context(inject(stage, fault, tag, hurt_s + 25))
            asker.enough.set()
            evidence = stage.hand(fault.host).must(f"cat $PDGATE_GUARD/{tag}/hit", "what the trigger saw was not kept").strip()
            time.sleep(hurt_s)
            then = observe(stage.deployment)[0]
    except (NotApplied, GuardFailed) as error:
        raise UnknownFact(str(error)) from None
    finally:
        asker.enough.set()
    asker.join(stage.deadline_s + 5)
    good_s = _good_again(stage, applied.healed[1], ready)
    record, earlier = _the_one(stage, asker.records, applied, book)
    settling, after = settle(stage, ready)
    if applied.idle:
        raise UnknownFact(applied.idle)
    append_records(stage.bundle / "requests.jsonl", [*earlier, record])
    logs = Logs(logbook.read(), dict(logbook.unknown), datetime.date.today())
    keep(stage, name, ready, [applied], None, settling.seconds, logs, hit=evidence, outcome=record.outcome, detail=record.detail, good_s=good_s)
    missing = ready.victims - serving(stage.deployment)
    return Hit(
        name, record, earlier, applied, evidence, good_s, settling, ready.facts, after, logs, (ready.baseline, then), ready.victims, missing
    )  # fmt: skip


def restart_quietly(stage: Stage, engine: Engine) -> None:
    """Restart an engine while nobody asks; raises UnknownFact where it does not come back."""

    [(fault, tag)] = prepare(stage, [killing(stage, engine)], steady=False).faults
    try:
        with inject(stage, fault, tag, 5):
            pass
    except (NotApplied, GuardFailed) as error:
        raise UnknownFact(f"{engine.name} could not be restarted beforehand: {error}") from None
    if comes_back(stage.deployment, engine.name, stage.wish.restart_s) is None:
        raise UnknownFact(f"{engine.name} did not come back within {stage.wish.restart_s:g} s, before anything was tried")


def _the_one(stage: Stage, records: list[Record], applied: Applied, book: GoldenBook) -> tuple[Record, list[Record]]:
    """The request that was on its way when the fault struck, and the others."""
    low, high = applied.injected
    hurt = [record for record in records if record.sent <= high and (record.end is None or record.end >= low)]
    if not hurt:
        raise UnknownFact(f"no request was on its way when {applied.fault} struck, of {len(records)} that were asked")
    [record, *others], _ = judged_twice([hurt[0], *(record for record in records if record is not hurt[0])], book, decoder_alone(stage.deployment), stage.deadline_s)
    return record, others


def _good_again(stage: Stage, healed: float, ready: Prepared) -> float | None:
    """Seconds from the healing to the first of some good answers in a row, once all that was hurt serves; None: not in time."""
    door = front_of(stage.deployment, stage.proxy)
    prompt = stage.book.shortest
    deadline = time.monotonic() + stage.wish.restart_s + stage.wish.recovery_s
    good: list[Record] = []
    while time.monotonic() < deadline:
        record = judged(complete(door, prompt_with_salt(prompt, stage.book.model), stage.deadline_s), stage.book)
        good = [*good, record] if record.outcome == "ok" else []
        if len(good) >= GOOD_IN_A_ROW and ready.victims <= serving(stage.deployment):
            return max(0.0, (good[0].end or good[0].sent) - healed)
        time.sleep(0.2)
    return None
