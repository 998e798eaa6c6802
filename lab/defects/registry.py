"""Defects: planted faults of the lab, each with the checks that must catch it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.plan import LabPlan

Inventory = dict[str, Any]
GENTLE = ("suites", "--gentle")


@dataclass(frozen=True)
class Defect:
    """`trips` must fail, `invalid` must be invalid, and nothing else may be either."""

    name: str
    summary: str
    trips: frozenset[str]
    invalid: frozenset[str]
    phase: Literal["before", "after"]
    change: Callable[[LabPlan], None]
    edit: Callable[[Inventory], None]
    reference: str = field(default="")
    run: tuple[str, ...] = GENTLE  # what to run to see it
    alone: bool = False  # changes what others change, or hides them
    nightly: bool = False  # tried by `make test-all`, not by `make test`: there is no time for all of them in twenty minutes


DEFECTS: dict[str, Defect] = {}


def defect(
    name: str,
    *,
    trips: set[str] | frozenset[str] = frozenset(),
    invalid: set[str] | frozenset[str] = frozenset(),
    phase: Literal["before", "after"] = "after",
    edit: Callable[[Inventory], None] = lambda inventory: None,
    reference: str = "",
    run: tuple[str, ...] = GENTLE,
    alone: bool = False,
    nightly: bool = False,
) -> Callable[[Callable[[LabPlan], None]], Callable[[LabPlan], None]]:
    """Register a change of the plan as a defect; its docstring is the summary. `edit` changes the inventory first."""

    def register(change: Callable[[LabPlan], None]) -> Callable[[LabPlan], None]:
        assert name not in DEFECTS, f"two defects are called {name}"
        assert change.__doc__, f"defect {name} needs a docstring: it is the summary"
        DEFECTS[name] = Defect(name, change.__doc__.strip(), frozenset(trips), frozenset(invalid), phase, change, edit, reference, run, alone, nightly)
        return change

    return register


def find_defects(names: list[str]) -> list[Defect]:
    """Defects by name; raises KeyError, worded for the user, for an unknown one."""
    from lab.defects import load_all

    load_all()
    found = []
    for name in names:
        if name not in DEFECTS:
            if "," in name:
                raise KeyError(f"--lab-defect={name}: give the option once for each defect: --lab-defect=A --lab-defect=B")
            near = difflib.get_close_matches(name, DEFECTS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "pdgate lab defects lists them"
            raise KeyError(f"--lab-defect={name}: no such defect; {hint}")
        found.append(DEFECTS[name])
    return found
