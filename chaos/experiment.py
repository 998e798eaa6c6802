"""One experiment: steady state, load, guard, fault, effect proved, observed, healed, recovery measured, nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaos.blast import foreign_traffic, refusal
from chaos.faults.base import IDENTIFY, Fault, Victim, pids_of, victims_from
from chaos.guard import GuardFailed, Hand, leftovers
from chaos.injection import Applied, NotApplied, OnStep, injected
from chaos.observe import Observation, keep_timeline, through_plan
from pdgate.facts.collect import collect
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.facts.shell import Shells
from pdgate.inventory.model import Deployment, Engine, Proxy
from pdgate.inventory.variables import Load
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Measures, measure
from pdgate.rules.running import RunningEngine, need_running
from pdgate.serving.client import complete
from pdgate.serving.exchange import Settling, endpoint_of, front_of, observe, served_models, wait_for_baseline
from pdgate.serving.golden import GoldenBook, judged, prompt_with_salt
from pdgate.serving.load import LoadPrompt
from pdgate.serving.logs import LogBook, Logs
from pdgate.serving.record import Record, now
from pdgate.serving.watch import Moment

STEADY_REQUESTS = 3
GUARD_MARGIN_S = 20.0
LOCK_S = 600  # renewed before each experiment: the lock of a killed run is not in the way for long
FOREIGN_LOOK_S = 1.0


@dataclass
class Stage:
    """Everything an experiment stands on."""

    deployment: Deployment
    shells: Shells
    bundle: Path
    proxy: Proxy
    book: GoldenBook
    wish: Load
    deadline_s: float
    kv_bound_s: float
    owner: str
    number: int = 0
    on_step: OnStep = lambda step: None

    def hand(self, host: str) -> Hand:
        return Hand(self.deployment.hosts[host], self.shells)

    def facts(self) -> dict[str, HostFacts]:
        return collect(self.deployment, self.shells)[0]

    def tag(self) -> str:
        self.number += 1
        return f"{self.owner.split()[0]}-{self.number}"

    def victims(self, engine: Engine, part: str, facts: dict[str, HostFacts]) -> tuple[Victim, ...]:
        """The processes of a part of an engine, identified on the host."""
        return identify(self.hand(engine.host), need_running(engine, facts[self.deployment.host_of(engine).machine]), part)


def identify(hand: Hand, running: RunningEngine, part: str) -> tuple[Victim, ...]:
    """The processes of a part of a running engine as its host knows them; raises GuardFailed."""
    pids = " ".join(map(str, pids_of(running, part))) or "''"
    return tuple(victims_from(hand.must(IDENTIFY.format(pids=pids), f"the processes of {running.engine.name} could not be identified")))


@dataclass
class Outcome:
    """What an experiment left, for the rules."""

    name: str
    applied: Applied
    measures: Measures
    records: list[Record]
    settling: Settling
    before: dict[str, HostFacts]
    after: dict[str, HostFacts]
    logs: Logs
    moments: list[Moment]
    victims: set[str] = field(default_factory=set)


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


def serving(deployment: Deployment) -> set[str]:
    """Engines that list a model right now."""
    found = set()
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        try:
            if endpoint is not None and served_models(endpoint, 2.0):
                found.add(engine.name)
        except ValueError:
            continue
    return found


def run(
    stage: Stage, name: str, make: Callable[[dict[str, HostFacts], str], Fault], *, hurt_s: float, after_s: float, allow_last: bool = False,
    prompts: list[LoadPrompt] | None = None, rate: float | None = None,
) -> Outcome:  # fmt: skip
    """Run one experiment. Raises UnknownFact (invalid) where the fault was not applied or the load did not run, NotRun where it is refused."""
    folder = stage.bundle / name.replace(".", "-")
    facts = stage.facts()
    tag = stage.tag()
    fault = make(facts, tag)
    plan = fault.plan()
    why_not = fault.available(facts[stage.deployment.hosts[fault.host].machine]) or refusal(
        stage.deployment, fault.host, plan, serving(stage.deployment), allow_last
    )
    if why_not:
        raise NotRun(f"{fault.name}: {why_not}")
    refuse_what_is_not_ours(stage)
    for hosts in stage.deployment.machines.values():
        stage.hand(hosts[0].name).must(f"lock_take {stage.owner} {LOCK_S}", "the chaos lock was lost")
    steady_state(stage, "before")
    baseline, _ = observe(stage.deployment)
    load = through_plan(stage.deployment, stage.proxy, stage.wish, stage.book, stage.deadline_s, 4.0 + hurt_s + after_s)
    if prompts is not None and rate is not None:
        load = load.model_copy(update={"prompts": prompts, "stages": [load.stages[0].model_copy(update={"rate": rate})]})
    folder.mkdir(parents=True, exist_ok=True)
    observation = Observation(stage.deployment, load, stage.book, LogBook(stage.deployment, stage.shells, folder / "logs"), folder)
    observation.start()
    try:
        with injected(fault, stage.hand(fault.host), tag, f"{stage.owner}: {plan.does}", hurt_s + GUARD_MARGIN_S, stage.on_step) as applied:
            time.sleep(max(0.0, hurt_s - (time.monotonic() - _since(applied))))
    except (NotApplied, GuardFailed) as error:
        observation.finish()
        raise UnknownFact(str(error)) from None
    records, logs, moments = observation.finish()
    seen = measure(records, applied.injected, applied.healed)
    settling = wait_for_baseline(stage.deployment, stage.book.model, baseline, stage.kv_bound_s)
    after = stage.facts()
    left = leftovers(stage.hand(fault.host))
    if tag in left:
        raise UnknownFact(f"{fault.host}: the guard {tag} is still there after healing; pytest chaos --cleanup")
    keep_timeline(stage.bundle, name, {
        "fault": applied.fault, "does": plan.does, "hits": plan.hits, "evidence": applied.evidence, "steps": applied.steps,
        "measures": {**asdict(seen), "uncertainty_s": seen.uncertainty_s}, "kv_back_s": settling.seconds,
    })  # fmt: skip
    return Outcome(name, applied, seen, records, settling, facts, after, logs, moments, set(plan.engines))


def _since(applied: Applied) -> float:
    """Monotonic time of the injection."""
    return time.monotonic() - (now() - applied.injected[1])
