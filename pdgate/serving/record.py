"""What a request left: one JSON line, whatever happened to it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["ok", "wrong", "empty", "truncated", "error", "hang", "aborted"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "empty", "truncated", "error", "hang", "aborted")


class Record(BaseModel):
    """One request. Times are seconds since the epoch in the controller's clock."""

    model_config = ConfigDict(extra="forbid")

    prompt_id: str
    url: str
    stream: bool = False
    scheduled: float
    sent: float
    first_byte: float | None = None
    tokens: list[float] = Field(default_factory=list, description="arrival of each chunk that bore text")
    end: float | None = None
    status: int | None = None
    text: str = ""
    finish_reason: str | None = None
    outcome: Outcome
    detail: str = Field("", description="what the client saw where the outcome is not ok")
    body: str = Field("", description="raw body of a non-stream answer, cut to 4 KiB")

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds, from the scheduled time (no coordinated omission)."""
        first = self.tokens[0] if self.tokens else None
        return None if first is None else first - self.scheduled
