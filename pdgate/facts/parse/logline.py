"""Log lines of vLLM, uvicorn, glog (Mooncake), CANN plog, Python's logging and Rust's tracing as plain data.

Shapes: vllm `vllm/logger.py` (month-day, no year), uvicorn (no time at all), glog (no year, microseconds), CANN plog, the pull
proxy's `logging.basicConfig`, vllm-router's tracing. A line of none of these continues the one before (a traceback).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

PREFIX = re.compile(r"^\((?P<process>[\w.]+)(?: pid=(?P<pid>\d+))?\)\s+")
TRACEBACK = "Traceback (most recent call last)"
LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "ERROR", "WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR", "EVENT": "INFO"}
SHAPES = [
    ("vllm", re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d) \[(?P<where>[^\]]+)\] ?(?P<text>.*)$")),
    ("uvicorn", re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): +(?P<text>.*)$")),
    ("glog", re.compile(r"^(?P<level>[IWEF])(?P<year>20\d\d)?(?P<month>\d\d)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d\.\d+)\s+(?P<pid>\d+) (?P<where>[^\]]+)\] ?(?P<text>.*)$")),
    ("plog", re.compile(r"^\[(?P<level>\w+)\] ?(?P<process>\w+)\((?P<pid>\d+),[^)]*\):(?P<date>\d{4}-\d\d-\d\d)-(?P<time>\d\d:\d\d:\d\d)\.(?P<ms>\d{3})\.(?P<us>\d{3}) ?\[(?P<where>[^\]]+)\] ?(?P<text>.*)$")),
    ("plog", re.compile(r"^\[(?P<level>ERROR|WARNING|INFO|EVENT|DEBUG)\] (?P<process>[A-Z]+) (?P<where>\S+:\d+)\s+(?P<text>.*)$")),
    ("python", re.compile(r"^(?P<date>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)(?:[,.](?P<ms>\d{3}))?\d*(?P<utc>Z)? +(?:\[?[\w.]+\]? - )?\[?(?P<level>DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\]?:? *(?P<text>.*)$")),
]  # fmt: skip


@dataclass(frozen=True)
class LogLine:
    """One entry with the lines that continue it. `at` is its own wall-clock time as seconds since 1970 read as if UTC, without zone; with `utc` it is UTC.

    vllm-router writes UTC and no zone (seen with 0.1.17 on a host at +0800).
    """

    unit: str
    number: int
    text: str
    level: str = ""
    at: float | None = None
    resolution_s: float = 1.0
    shape: str = ""
    process: str = ""
    pid: int | None = None
    where: str = ""
    utc: bool = False
    more: tuple[str, ...] = field(default=())

    @property
    def whole(self) -> str:
        return "\n".join([self.text, *self.more])

    @property
    def is_error(self) -> bool:
        """Of level ERROR, or a bare traceback somebody's stderr left behind another line."""
        return self.level == "ERROR" or TRACEBACK in self.whole

    @property
    def said(self) -> str:
        """The telling line: of a traceback the last, else the first."""
        lines = [line.strip() for line in self.whole.splitlines() if line.strip()]
        return (lines[-1] if TRACEBACK in self.whole else lines[0]) if lines else ""


def parse_log(unit: str, lines: Iterable[str], today: datetime.date) -> list[LogLine]:
    """Entries of one log. `today` gives the year where a line has none: the date nearest to it."""
    entries: list[LogLine] = []
    tails: list[list[str]] = []
    for number, raw in enumerate(lines):
        entry = _entry(unit, number, raw, today)
        last = entries[-1] if entries else None
        if entry is None and last is not None:
            tails[-1].append(raw)
            continue
        if entry is not None and last is not None and _continues(last, tails[-1], entry):
            tails[-1].append(entry.text)
            continue
        entries.append(entry or LogLine(unit, number, raw))
        tails.append([])
    return [LogLine(**{**entry.__dict__, "more": tuple(tail)}) for entry, tail in zip(entries, tails, strict=True)]


def _continues(last: LogLine, tail: list[str], entry: LogLine) -> bool:
    """vLLM repeats the head on every line of one message: a traceback is one entry, its last line included."""
    same = (last.shape, last.level, last.at, last.where, last.pid) == (entry.shape, entry.level, entry.at, entry.where, entry.pid)
    return same and entry.shape == "vllm" and entry.level == "ERROR" and (
        entry.text.startswith((" ", "Traceback", "\t")) or not entry.text or any(TRACEBACK in text for text in (last.text, *tail))
    )


def _entry(unit: str, number: int, raw: str, today: datetime.date) -> LogLine | None:
    rest, process, pid = raw.strip(), "", None
    while found := PREFIX.match(rest):  # "(APIServer pid=1) (EngineCore pid=2) …": the innermost spoke
        process, pid = found["process"], int(found["pid"]) if found["pid"] else None
        rest = rest[found.end() :]
    for shape, pattern in SHAPES:
        match = pattern.match(rest)
        if match is None:
            continue
        parts = match.groupdict()
        level = LEVELS.get(parts["level"], parts["level"])
        at, resolution = _time_of(parts, today)
        return LogLine(
            unit, number, parts["text"], level, at, resolution, shape, parts.get("process") or process,
            int(parts["pid"]) if parts.get("pid") else pid, parts.get("where") or "",
            bool(parts.get("utc")) or parts["text"].startswith("vllm_router_rs::"),
        )  # fmt: skip
    return LogLine(unit, number, rest, process=process, pid=pid) if process and not raw.startswith((" ", "\t")) else None


def _time_of(parts: dict[str, str | None], today: datetime.date) -> tuple[float | None, float]:
    if not parts.get("time"):
        return None, 1.0
    clock, _, fraction = str(parts["time"]).partition(".")
    if parts.get("ms"):
        fraction = f"{parts['ms']}{parts.get('us') or ''}"
    hour, minute, second = map(int, clock.split(":"))
    if parts.get("date"):
        day = datetime.date.fromisoformat(str(parts["date"]))
    elif parts.get("year"):
        day = datetime.date(int(str(parts["year"])), int(str(parts["month"])), int(str(parts["day"])))
    else:
        nearest = _nearest_year(int(str(parts["month"])), int(str(parts["day"])), today)
        if nearest is None:
            return None, 1.0
        day = nearest
    if not (hour < 24 and minute < 60 and second < 61):
        return None, 1.0
    base = datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC).timestamp() + hour * 3600 + minute * 60 + second
    return base + (int(fraction) / 10 ** len(fraction) if fraction else 0.0), 10.0 ** -len(fraction)


def _nearest_year(month: int, day: int, today: datetime.date) -> datetime.date | None:
    """A log bears no year: of last year's, this year's and next year's date the one nearest to today."""
    candidates = []
    for year in (today.year - 1, today.year, today.year + 1):
        try:
            candidates.append(datetime.date(year, month, day))
        except ValueError:
            continue
    return min(candidates, key=lambda date: abs((date - today).days), default=None)
