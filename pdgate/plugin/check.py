"""The `check` mark: everything report, terminal and waivers say about a check comes from here and from its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest

from pdgate.rules.finding import Severity

Phase = Literal["before", "after", "any"]
F = TypeVar("F", bound=Callable[..., Any])
REGISTRY: dict[str, CheckInfo] = {}


@dataclass(frozen=True)
class CheckInfo:
    """A check as declared. `phase`: before the engines start, after, or both."""

    id: str
    severity: Severity
    reference: str
    phase: Phase
    waivable: bool
    title: str
    where: str


def check(id: str, *, severity: Severity = "major", reference: str = "", phase: Phase = "after", waivable: bool = True) -> Callable[[F], F]:
    """Declare a test function a check. Its id is unique; raises ValueError where another function has it."""

    def mark(function: F) -> F:
        where = f"{inspect.getsourcefile(function)}:{function.__name__}"
        title = function.__name__.removeprefix("test_").replace("_", " ")
        info = CheckInfo(id, severity, reference, phase, waivable, title, where)
        known = REGISTRY.setdefault(id, info)
        if known.where != where:
            raise ValueError(f"check id '{id}' is declared twice: {known.where} and {where}")
        marked: F = pytest.mark.pdgate_check(info)(function)
        return marked

    return mark


def info_of(item: pytest.Item) -> CheckInfo | None:
    mark = item.get_closest_marker("pdgate_check")
    return mark.args[0] if mark else None


def target_of(item: pytest.Item) -> str:
    """What the check is about: its engine, host or proxy, else the deployment."""
    spec = getattr(item, "callspec", None)
    params = getattr(spec, "params", {})
    for name in ("engine", "pd_host", "proxy"):
        if name in params:
            return str(getattr(params[name], "name", params[name]))
    return f"deployment [{spec.id}]" if spec and "chaos" in item.path.parts else "deployment"
