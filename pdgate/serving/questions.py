"""What has to be known of a deployment before it can be asked anything: its model, its longest prompt, its golden answers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Deployment
from pdgate.serving.exchange import endpoint_of, served_models
from pdgate.serving.golden import GoldenBook, GoldenError, corpus, learn, load_golden


def model_of(deployment: Deployment) -> str:
    """The model name requests ask for: the declared one, else what the first answering engine serves; raises UnknownFact."""
    for engine in deployment.engines:
        if engine.model:
            return engine.model
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        with contextlib.suppress(ValueError):
            names = served_models(endpoint) if endpoint else {}
            if names:
                return next(iter(names))
    raise UnknownFact("no pd_model in the inventory and no engine answers /v1/models")


def deadline_of(deployment: Deployment) -> float:
    return max(deployment.host_of(engine).expect.request_deadline_s for engine in deployment.engines)


def context_length_of(deployment: Deployment, model: str) -> int:
    """The longest prompt plus answer every engine takes, in tokens; raises UnknownFact."""
    known = []
    for engine in deployment.engines:
        endpoint = endpoint_of(deployment, engine)
        with contextlib.suppress(ValueError):
            limit = served_models(endpoint).get(model) if endpoint else None
            known += [limit] if limit else []
    if not known:
        raise UnknownFact("no engine tells its max_model_len in /v1/models")
    return min(known)


def golden_of(deployment: Deployment, model: str, max_tokens: int, file: Path | None = None) -> GoldenBook:
    """Golden answers from a file, else learned from the first decode engine that answers by itself; raises UnknownFact."""
    if file is not None:
        try:
            return load_golden(file)
        except GoldenError as error:
            raise UnknownFact(str(error)) from None
    longest = deployment.front_host.expect.max_prompt_tokens or context_length_of(deployment, model)
    prompts = corpus(longest, max_tokens)
    reasons = []
    for engine in (engine for engine in deployment.engines if engine.serves_decode):
        endpoint = endpoint_of(deployment, engine)
        if endpoint is None:
            reasons.append(f"{engine.name}: the inventory gives no address")
            continue
        try:
            return learn(endpoint, engine.name, model, prompts, deadline_of(deployment))
        except GoldenError as error:
            reasons.append(str(error))
    raise UnknownFact("golden answers could not be learned: " + "; ".join(reasons))
