"""Many requests at once, and clients that are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdgate.rules.finding import Finding
from pdgate.serving.golden import GoldenBook
from pdgate.serving.record import Record

UNSERVED = ("wrong", "empty", "truncated", "error", "hang")


def levels_are_answered(target: str, levels: dict[int, list[Record]]) -> Iterator[Finding]:
    """At every level up to the declared concurrency each request gets its golden answer."""
    for level, records in levels.items():
        bad = [record for record in records if record.outcome in UNSERVED]
        if bad:
            yield _failed(target, f"{level} requests at the same moment", records, bad)
            return  # higher levels say the same again


def all_are_served(target: str, what: str, records: list[Record]) -> Iterator[Finding]:
    """All of a burst of new connections get their golden answer."""
    bad = [record for record in records if record.outcome in UNSERVED]
    if bad:
        yield _failed(target, what, records, bad)


def _failed(target: str, what: str, records: list[Record], bad: list[Record]) -> Finding:
    words = ", ".join(f"{count} {outcome}" for outcome, count in Counter(record.outcome for record in bad).most_common())
    return Finding(
        target=target, expected=f"{what} are all answered", seen=f"{len(bad)} of {len(records)}: {words}; the first: {bad[0].detail[:240]}",
        why="the deployment does not take what it is said to take: at that load users get failures",
        remedy="lower the declared pd_load.max_concurrency, or raise the limit that refused: --max-num-seqs, the proxy's connection limit, ulimit -n",
    )  # fmt: skip


def slow_reader_is_served(target: str, record: Record, book: GoldenBook, max_tokens: int) -> Iterator[Finding]:
    """A client that pauses gets the whole answer in the end, and its beginning is the golden one."""
    golden = book.answers[record.prompt_id]
    sure = golden.text[: golden.agreed]
    right = record.text.startswith(sure)
    if record.outcome != "ok" or not right:
        seen = f"{record.outcome}: {record.detail}" if record.outcome != "ok" else f"{record.text[:60]!r} instead of {sure[:60]!r}"
        yield Finding(
            target=target, expected=f"all {max_tokens} tokens, also for a client that stops reading for a while", seen=seen,
            why="clients on slow lines lose their answers", remedy="look for send timeouts in the proxy and in what stands before it",
        )  # fmt: skip
