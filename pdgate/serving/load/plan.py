"""What a load is: stages, mix and seed as plain data, and the schedule that follows from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdgate.serving.client import Leave, Prompt
from pdgate.serving.record import Api


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stage(Frozen):
    """Requests per second from `rate` to `rate_end` (a ramp; default: constant). `burst`: all of the stage's requests at its start."""

    seconds: float = Field(gt=0)
    rate: float = Field(ge=0, description="requests per second at the start")
    rate_end: float | None = Field(None, ge=0)
    arrival: Literal["poisson", "constant", "burst"] = "poisson"


class LoadPrompt(Frozen):
    """One prompt of the mix."""

    id: str
    text: str
    api: Api = "completions"
    max_tokens: int = 16
    weight: float = 1.0


class LoadPlan(Frozen):
    """Everything the load generator is told. The same plan and seed give the same schedule, on any number of workers."""

    url: str
    api_key_env: str | None = None
    model: str
    prompts: list[LoadPrompt] = Field(min_length=1)
    stages: list[Stage] = Field(min_length=1)
    seed: int = 0
    stream_share: float = Field(0.5, ge=0, le=1)
    abort_share: float = Field(0.0, ge=0, le=1)
    deadline_s: float = Field(60.0, gt=0)
    most_in_flight: int = Field(2000, ge=1, description="per worker; a slot that finds no place is counted as unsent")

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


class Slot(Frozen):
    """One scheduled request: `at` seconds after the start."""

    number: int
    at: float
    prompt: int
    stream: bool
    leave_after_tokens: int | None = None
    leave_after_s: float | None = None
    salt: str = ""

    def leave(self) -> Leave | None:
        if self.leave_after_tokens is None and self.leave_after_s is None:
            return None
        return Leave(self.leave_after_tokens, self.leave_after_s)


def schedule(plan: LoadPlan) -> Iterator[Slot]:
    """The slots of a plan in order of time; the same seed, the same schedule."""
    rng = random.Random(plan.seed)
    weights = [prompt.weight for prompt in plan.prompts]
    number, start = 0, 0.0
    for stage in plan.stages:
        for offset in _arrivals(stage, rng):
            stream = rng.random() < plan.stream_share
            leaves: dict[str, Any] = {}
            if rng.random() < plan.abort_share:
                # Before the first byte, or between tokens: cancels meet a request in every phase of its life.
                leaves = {"leave_after_tokens": rng.randint(1, 6)} if stream and rng.random() < 0.5 else {"leave_after_s": rng.uniform(0.005, 0.15)}
            [prompt] = rng.choices(range(len(plan.prompts)), weights)
            yield Slot(number=number, at=start + offset, prompt=prompt, stream=stream, salt=f"{rng.getrandbits(64):016x}", **leaves)
            number += 1
        start += stage.seconds


def _arrivals(stage: Stage, rng: random.Random) -> Iterator[float]:
    end = stage.rate if stage.rate_end is None else stage.rate_end
    if stage.arrival == "burst":
        yield from (0.0 for _ in range(round(stage.rate * stage.seconds)))
        return
    due = moved = 0.0  # requests due so far by the integral of the rate
    due += rng.expovariate(1.0) if stage.arrival == "poisson" else 0.0
    slope = (end - stage.rate) / stage.seconds
    while True:
        # Solve rate*t + slope*t*t/2 = due for t.
        if abs(slope) < 1e-12:
            moved = due / stage.rate if stage.rate else stage.seconds
        else:
            root = stage.rate**2 + 2 * slope * due
            moved = (root**0.5 - stage.rate) / slope if root >= 0 else stage.seconds
        if moved >= stage.seconds:
            return
        yield moved
        due += rng.expovariate(1.0) if stage.arrival == "poisson" else 1.0


def prompt_of(plan: LoadPlan, slot: Slot) -> Prompt:
    """The request of a slot; its salt keeps prefix caches from short-cutting the transfer."""
    chosen = plan.prompts[slot.prompt]
    return Prompt(chosen.id, chosen.text, plan.model, chosen.max_tokens, chosen.api, {"cache_salt": slot.salt})
