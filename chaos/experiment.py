"""One experiment: steady state, load, guard, fault, effect proved, observed, healed, recovery measured, nothing left behind."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from chaos import lock
from chaos.aim import Aim
from chaos.blast import foreign_traffic, refusal
from chaos.faults.base import IDENTIFY, Fault, Victim, pids_of, victims_from
from chaos.faults.processes import Kill, Stall
from chaos.guard import GuardFailed, Hand, leftovers
from chaos.injection import Applied, NotApplied, OnStep, injected
from chaos.observe import Observation, keep_timeline, through_plan
from pdgate.facts.collect import collect
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.facts.shell import Shells
from pdgate.inventory.model import Deployment, Engine, Proxy
from pdgate.inventory.variables import Load
from pdgate.rules import recovery
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.logs import told
from pdgate.rules.recovery import Measures, measure
from pdgate.rules.running import RunningEngine, need_running
from pdgate.serving.client import complete
from pdgate.serving.exchange import Settling, endpoint_of, front_of, observe, served_models, wait_for_baseline
from pdgate.serving.golden import GoldenBook, judged, prompt_with_salt
from pdgate.serving.load import LoadPrompt
from pdgate.serving.logs import LogBook, Logs, logs_of
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record
from pdgate.serving.watch import Moment

STEADY_REQUESTS = 3
BETWEEN_S = 0.5
BEFORE_S = 4.0  # of load before the fault
TURN_S = 30.0  # room for what injecting and healing take themselves; the load ends early
GUARD_MARGIN_S = 20.0
FOREIGN_LOOK_S = 1.0
Make = Callable[[dict[str, HostFacts], str], Fault]  # a fault from fresh facts and the tag its guard will have


@dataclass
class Stage:
    """Everything an experiment stands on. `allow_outage`: the operator agreed that the last P or D may be taken."""

    deployment: Deployment
    shells: Shells
    bundle: Path
    proxy: Proxy
    book: GoldenBook
    wish: Load
    deadline_s: float
    kv_bound_s: float
    owner: lock.Holder
    allow_outage: bool = False
    applied: list[Applied] = field(default_factory=list)  # what the run has done so far
    number: int = 0
    question: tuple[LoadPrompt, GoldenBook] | None = None  # what aimed experiments ask, once it is learned
    on_step: OnStep = lambda step: None

    def hand(self, host: str) -> Hand:
        return Hand(self.deployment.hosts[host], self.shells)

    def facts(self) -> dict[str, HostFacts]:
        return collect(self.deployment, self.shells, quick=True)[0]

    def tag(self) -> str:
        self.number += 1
        return f"{self.owner.run}-{self.number}"

    def victims(self, engine: Engine, part: str, facts: dict[str, HostFacts]) -> tuple[Victim, ...]:
        """The processes of a part of an engine, identified on the host."""
        return identify(self.hand(engine.host), need_running(engine, facts[self.deployment.host_of(engine).machine]), part)


def identify(hand: Hand, running: RunningEngine, part: str) -> tuple[Victim, ...]:
    """The processes of a part of a running engine as its host knows them; raises GuardFailed."""
    return identify_pids(hand, pids_of(running, part), running.engine.name)


def identify_pids(hand: Hand, pids: list[int], whose: str) -> tuple[Victim, ...]:
    words = " ".join(map(str, pids)) or "''"
    return tuple(victims_from(hand.must(IDENTIFY.format(pids=words), f"the processes of {whose} could not be identified")))


def killing(stage: Stage, engine: Engine, part: str = "engine", aimed: Callable[[str, tuple[Victim, ...]], Aim] | None = None) -> Make:
    """How to kill a part of an engine, at once or when an aim (made of tag and victims) sees its moment; it is started again with pd_restart."""

    def make(facts: dict[str, HostFacts], tag: str) -> Fault:
        victims = stage.victims(engine, part, facts)
        rest = () if part == "engine" else tuple(one for one in stage.victims(engine, "engine", facts) if one not in victims)
        return Kill(engine.name, engine.host, part, victims, engine.restart or "", engine.http_port, aimed(tag, victims) if aimed else None, rest)

    return make


def stalling(stage: Stage, engine: Engine) -> Make:
    """How to stop a whole engine for a while."""
    return lambda facts, tag: Stall(engine.name, engine.host, "engine", stage.victims(engine, "engine", facts))


def start_by_hand(stage: Stage, engine: Engine) -> None:
    """Run its pd_restart on its host, as whoever runs it would; raises GuardFailed where the command itself fails."""
    stage.hand(engine.host).must(f"{{ {engine.restart}\n}} </dev/null >/dev/null 2>&1", f"{engine.name} could not be started")


@dataclass
class Outcome:
    """What an experiment left, for the rules."""

    name: str
    applied: list[Applied]
    measures: Measures
    records: list[Record]
    settling: Settling
    before: dict[str, HostFacts]
    after: dict[str, HostFacts]
    logs: Logs
    moments: list[Moment]
    victims: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)  # engines that were hurt and do not serve again
    parted: list[Record] = field(default_factory=list)  # failures of our own hands on the path, not among the records

    returns: dict[str, float | None] = field(default_factory=dict)  # engines hurt in turn: seconds from their healing until they served

    def by_fault(self) -> str:
        """Outcomes of the requests that were on their way while each fault lasted, where there were several in turn."""
        said = []
        for one in self.applied:
            met = Counter(record.outcome for record in self.records if record.sent < one.healed[1] and (record.end or record.sent) >= one.injected[0])
            said.append(f"{one.plan.does}: " + (", ".join(f"{count} {outcome}" for outcome, count in sorted(met.items())) or "no request"))
        return "; ".join(said) if len(said) > 1 else ""


class Left(Protocol):
    """What an experiment leaves behind, whatever it measured."""

    settling: Settling
    before: dict[str, HostFacts]
    after: dict[str, HostFacts]
    victims: set[str]
    missing: set[str]


def aftermath(stage: Stage, left: Left) -> Iterator[Finding]:
    """What was hurt serves again, KV is back, nobody else died."""
    yield from recovery.came_back(left.missing, stage.wish.restart_s)
    yield from recovery.kv_is_back(left.settling, left.victims)
    yield from recovery.nobody_else_died(stage.deployment, left.before, left.after, left.victims)


def steady_state(stage: Stage, when: str) -> None:
    """A few golden requests through the proxy; raises UnknownFact where the deployment is not well: then nothing is hurt."""
    door = front_of(stage.deployment, stage.proxy)
    prompts = [golden.prompt for golden in stage.book.answers.values()]
    for number in range(STEADY_REQUESTS):
        prompt = prompt_with_salt(prompts[number % len(prompts)], stage.book.model, f"steady-{when}")
        record = judged(complete(door, prompt, stage.deadline_s).model_copy(update={"prompt_id": prompts[number % len(prompts)].id}), stage.book)
        if record.outcome != "ok":
            raise UnknownFact(f"no steady state {when} the fault: {record.outcome}: {record.detail}")


def refuse_what_is_not_ours(stage: Stage) -> None:
    """Raises NotRun while other people's traffic runs."""
    before, _ = observe(stage.deployment)
    time.sleep(FOREIGN_LOOK_S)
    after, _ = observe(stage.deployment)
    moved = foreign_traffic(before, after)
    if moved:
        raise NotRun(f"somebody else's traffic runs: {moved}")


def serves(deployment: Deployment, engine: Engine) -> bool:
    """Whether it lists a model right now."""
    endpoint = endpoint_of(deployment, engine)
    try:
        return endpoint is not None and bool(served_models(endpoint, 2.0))
    except ValueError:
        return False


def serving(deployment: Deployment) -> set[str]:
    return {engine.name for engine in deployment.engines if serves(deployment, engine)}


@dataclass
class Prepared:
    """Faults that may be injected, the deployment as it was, and the moment's baseline."""

    faults: list[tuple[Fault, str]]  # with the tags of their guards
    facts: dict[str, HostFacts]
    baseline: dict[str, Sample]

    @property
    def victims(self) -> set[str]:
        return {name for fault, _ in self.faults for name in fault.plan().engines}


def prepare(stage: Stage, makes: Sequence[Make], allow_last: bool = False, steady: bool = True) -> Prepared:
    """Everything that must hold before anything is hurt. Raises NotRun where a fault is refused, UnknownFact without a steady state.

    `steady=False`: that was just seen, and asking again would spoil what is to be met.
    """
    facts, able = stage.facts(), serving(stage.deployment)
    faults = []
    for make in makes:
        tag = stage.tag()
        fault = make(facts, tag)
        why_not = fault.available(facts[stage.deployment.hosts[fault.host].machine]) or refusal(
            stage.deployment, fault.host, fault.plan().engines, able, allow_last or stage.allow_outage
        )
        if why_not:
            raise NotRun(f"{fault.name}: {why_not}")
        faults.append((fault, tag))
    if steady:
        refuse_what_is_not_ours(stage)
    for hosts in stage.deployment.machines.values():
        try:
            lock.take(stage.hand(hosts[0].name), stage.owner)
        except lock.Held as error:
            raise UnknownFact(f"the chaos lock was lost: {error}") from None
    if steady:
        steady_state(stage, "before")
    return Prepared(faults, facts, observe(stage.deployment)[0])


@contextlib.contextmanager
def inject(stage: Stage, fault: Fault, tag: str, guard_s: float) -> Iterator[Applied]:
    """The fault within the block, healed after it, by the guard at the latest."""
    with injected(fault, stage.hand(fault.host), tag, f"{stage.owner}: {fault.plan().does}", guard_s + GUARD_MARGIN_S, stage.on_step, stage.applied) as applied:
        yield applied


def run(
    stage: Stage, name: str, *makes: Make, hurt_s: float, after_s: float, allow_last: bool = False, in_turn: bool = False,
    meanwhile: Callable[[], None] = lambda: None, meanwhile_s: float = 0.0, rate: float | None = None,
) -> Outcome:  # fmt: skip
    """Faults under load: all at once, the first outermost, or one after the other (`in_turn`); `meanwhile` runs while they hurt, `meanwhile_s` at most.

    Raises UnknownFact (invalid) where a fault was not applied or the load did not run, NotRun where one is refused.
    """
    if (stage.wish.rate if rate is None else rate) <= 0:
        raise NotRun("an experiment needs a load that runs through it, and --load-rate or pd_load.rate says 0")
    ready = prepare(stage, makes, allow_last)
    folder = stage.bundle / name.replace(".", "-")
    folder.mkdir(parents=True, exist_ok=True)
    wish = stage.wish if rate is None else stage.wish.model_copy(update={"rate": rate})
    turns = len(makes) if in_turn else 1
    hurt_s += meanwhile_s
    most_s = BEFORE_S + turns * (hurt_s + TURN_S + (after_s if any(ready.victims) and in_turn else 0)) + after_s
    load = through_plan(stage.deployment, stage.proxy, wish, stage.book, stage.deadline_s, most_s)
    observation = Observation(stage.deployment, load, stage.book, LogBook(stage.deployment, stage.shells, folder / "logs"), folder)

    def back() -> bool:
        return ready.victims <= serving(stage.deployment)

    applied: list[Applied] = []
    returns: dict[str, float | None] = {}
    with observation:
        observation.must_keep_up()
        try:
            for group in [[one] for one in ready.faults] if in_turn else [ready.faults]:
                with contextlib.ExitStack() as stack:
                    applied += [stack.enter_context(inject(stage, fault, tag, hurt_s)) for fault, tag in group]
                    since = time.monotonic()
                    meanwhile()
                    time.sleep(max(0.0, hurt_s - meanwhile_s - (time.monotonic() - since)))
                if in_turn:
                    returns |= {hurt: comes_back(stage.deployment, hurt, after_s) for fault, _ in group for hurt in fault.plan().engines}
                    time.sleep(BETWEEN_S)
        except (NotApplied, GuardFailed) as error:
            raise UnknownFact(str(error)) from None
        healed = applied[-1 if in_turn else 0].healed
        observation.until_calm(after_s, back)
        everything, logs, moments = observation.finish()
    parted = recovery.parted(everything, [(one.injected[0], one.healed[1], one.renewed, one.cut) for one in applied])
    records = [record for record in everything if record not in parted]
    seen = measure(records, applied[0].injected, healed)
    # Where others in turn had already stopped everything, that is what there is to judge.
    idle = next((one.idle for one in applied if one.idle), "")
    if idle and not seen.dip:
        raise UnknownFact(idle)
    settling, after = settle(stage, ready)
    keep(stage, name, ready, applied, seen, settling.seconds, logs)
    return Outcome(name, applied, seen, records, settling, ready.facts, after, logs, moments, ready.victims, ready.victims - serving(stage.deployment), parted, returns)


def comes_back(deployment: Deployment, name: str, at_most_s: float) -> float | None:
    """Seconds until an engine serves; None where it does not in time."""
    began = time.monotonic()
    while not serves(deployment, deployment.engine(name)):
        if time.monotonic() - began > at_most_s:
            return None
        time.sleep(0.25)
    return time.monotonic() - began


def settle(stage: Stage, ready: Prepared) -> tuple[Settling, dict[str, HostFacts]]:
    """KV back at its baseline, the facts afterwards, and no guard left; raises UnknownFact where one is."""
    settling = wait_for_baseline(stage.deployment, stage.book.model, ready.baseline, stage.kv_bound_s)
    after = stage.facts()
    for host in {fault.host for fault, _ in ready.faults}:
        left = set(leftovers(stage.hand(host))) & {tag for _, tag in ready.faults}
        if left:
            raise UnknownFact(f"{host}: the guard {', '.join(sorted(left))} is still there after healing; pytest chaos --cleanup")
    return settling, after


def keep(
    stage: Stage, name: str, ready: Prepared, applied: list[Applied], seen: Measures | None, kv_back_s: float | None, logs: Logs, **more: object
) -> None:  # fmt: skip
    """The experiment's page of numbers in the bundle, and what the logs said when."""
    by_unit = {unit: ready.facts[stage.deployment.hosts[host].machine] for unit, (host, _) in logs_of(stage.deployment).items()}
    keep_timeline(stage.bundle, name, {
        "faults": [
            {"fault": one.fault, "does": one.plan.does, "hits": one.plan.hits, "evidence": one.evidence, "renewed": one.renewed, "cut": one.cut, "guard_s": one.guard_s, "injected": one.injected, "healed": one.healed, "steps": one.steps}
            for one in applied
        ],
        "measures": {**asdict(seen), "uncertainty_s": seen.uncertainty_s} if seen else None, "kv_back_s": kv_back_s,
        "logs": [asdict(one) for one in told(logs, by_unit)], "logs_unknown": logs.unknown, **more,
    })  # fmt: skip
