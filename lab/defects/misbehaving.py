"""Switching a misbehaviour on, by role: the proxy, one decoder, all engines of a host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lab.plan import LabPlan


def proxy(plan: LabPlan, name: str, value: Any = True) -> None:
    plan.host_of("p0").misbehave("proxy", name, value)


def decoder(plan: LabPlan, rank: int, name: str, value: Any = True) -> None:
    plan.host_of("d0").misbehave(f"engine:{7000 + rank}", name, value)


def engines(plan: LabPlan, host: str, name: str, value: Any = True, ports: Iterable[int] = range(7000, 7004)) -> None:
    for port in ports:
        plan.host_of(host).misbehave(f"engine:{port}", name, value)


def decoders(plan: LabPlan, name: str, value: Any = True) -> None:
    engines(plan, "d0", name, value)
