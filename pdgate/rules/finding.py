"""What a rule says."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Severity = Literal["critical", "major", "minor", "note"]


class NotRun(Exception):
    """The check does not apply here, or something it stands on is reported by another check; the message says which."""


class Finding(BaseModel):
    """One thing that is not as it should be. A `note` is reported and fails nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(description="engine, host, device … the finding is about")
    expected: str
    seen: str = Field(description="the evidence")
    why: str = Field(description="what goes wrong because of it")
    remedy: str
    severity: Severity | None = Field(None, description="None: the severity of the check")
    reference: str | None = Field(None, description="None: the reference of the check")


def note(target: str, seen: str) -> Finding:
    """What happened, where nothing was expected otherwise."""
    return Finding(target=target, expected="-", seen=seen, why="-", remedy="-", severity="note")
