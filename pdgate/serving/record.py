"""What a request left: one JSON line, whatever happened to it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["ok", "wrong", "empty", "truncated", "error", "hang", "aborted"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "empty", "truncated", "error", "hang", "aborted")
Api = Literal["completions", "chat"]

_ANCHOR = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch in this process's clock, which does not step while the process lives."""
    return _ANCHOR + time.monotonic()


class Record(BaseModel):
    """One request. Times are seconds since the epoch in the controller's clock."""

    model_config = ConfigDict(extra="forbid")

    prompt_id: str
    url: str
    api: Api = "completions"
    stream: bool = False
    scheduled: float
    sent: float
    first_byte: float | None = None
    tokens: list[float] = Field(default_factory=list, description="arrival of each chunk that bore text")
    end: float | None = None
    status: int | None = None
    text: str = ""
    finish_reason: str | None = None
    served_id: str = Field("", description="the id the answer bears; proxies and engines log it")
    prompt_tokens: int | None = Field(None, description="as the server counted them, where it says")
    completion_tokens: int | None = None
    engine: str | None = Field(None, description="the decode engine that answered, if its log says so")
    outcome: Outcome
    detail: str = Field("", description="what the client saw where the outcome is not ok")
    body: str = Field("", description="raw body of a non-stream answer, cut to 4 KiB")

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds, from the scheduled time (no coordinated omission)."""
        first = self.tokens[0] if self.tokens else None
        return None if first is None else first - self.scheduled

    @property
    def itl(self) -> float | None:
        """Mean inter-token latency, seconds, of a streamed answer with more than one token."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def e2e(self) -> float | None:
        """Seconds from the scheduled time to the end."""
        return None if self.end is None else self.end - self.scheduled

    @property
    def late(self) -> float:
        """Seconds the client sent it after its scheduled time: the load generator's own lag."""
        return self.sent - self.scheduled


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add a line for each record to a requests.jsonl."""
    with path.open("a") as out:
        out.writelines(record.model_dump_json() + "\n" for record in records)
