"""What the logs say: chains read to their first cause, storms told from point faults, unknown errors reported and not dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdgate.connectors import connector_of
from pdgate.connectors.catalogue import Signature, recognise
from pdgate.connectors.codes import translate
from pdgate.facts.model import HostFacts, Interval, UnknownFact
from pdgate.facts.parse.logline import LogLine
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.engines import parse_utc_offset
from pdgate.rules.finding import Finding, NotRun
from pdgate.serving.logs import UUID, Logs
from pdgate.serving.record import Record

CHAIN_GAP_S = 1.0
STORM_S, STORM_PEERS = 0.020, 3
SHOWN = 5
PEER = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}:\d{2,5}\b")
NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|\d+")


@dataclass(frozen=True)
class Chain:
    """Error entries that belong together; the first in the log is the first cause, the others follow from it."""

    entries: tuple[LogLine, ...]

    @property
    def cause(self) -> LogLine:
        return self.entries[0]

    @property
    def signature(self) -> Signature | None:
        return recognise(self.cause.whole)


def chains(entries: list[LogLine]) -> list[Chain]:
    """Consecutive errors of one log, each within a second of the one before (a line without time belongs to its neighbour)."""
    found: list[list[LogLine]] = []
    last: LogLine | None = None
    for entry in entries:
        signature = recognise(entry.whole) if entry.is_error else None
        if signature is not None and signature.kind != "error":
            continue  # it neither causes what stands beside it nor hides it
        if not entry.is_error and not (last is not None and entry.level == "INFO" and _of_chain(entry)):
            continue
        if last is not None and (entry.at is None or last.at is None or abs(entry.at - last.at) <= CHAIN_GAP_S):
            found[-1].append(entry)
        else:
            found.append([entry])
        last = entry
    return [Chain(tuple(entry for entry in chain if entry.is_error)) for chain in found]


def _of_chain(entry: LogLine) -> bool:
    """Mooncake says parts of a failure at INFO."""
    return "transfer failed and disconnect" in entry.text


def storms(entries: list[LogLine]) -> list[list[LogLine]]:
    """Bursts of errors that name at least three peers within 20 ms; only entries whose time is fine enough can tell."""
    timed = [(entry.at, entry) for entry in entries if entry.is_error and entry.at is not None and entry.resolution_s <= STORM_S / 4 and PEER.search(entry.text)]
    timed.sort(key=lambda pair: pair[0])
    bursts: list[list[LogLine]] = []
    start = 0
    for end in range(len(timed)):
        while timed[end][0] - timed[start][0] > STORM_S:
            start += 1
        window = [entry for _, entry in timed[start : end + 1]]
        if len({peer for entry in window for peer in PEER.findall(entry.text)}) < STORM_PEERS:
            continue
        if bursts and bursts[-1][-1] in window:
            bursts[-1] = list(dict.fromkeys([*bursts[-1], *window]))
        else:
            bursts.append(window)
    return bursts


def moment(entry: LogLine, facts: HostFacts) -> Interval | None:
    """When an entry was written in the controller's clock: its zone and the host's offset taken off, the doubt kept."""
    if entry.at is None:
        return None
    clock = facts.clock.get()
    zone = parse_utc_offset(clock.utc_offset).utcoffset(None)
    assert zone is not None
    written = entry.at if entry.utc else entry.at - zone.total_seconds()
    return Interval(low=written - clock.offset_s.high, high=written + entry.resolution_s - clock.offset_s.low)


@dataclass(frozen=True)
class Told:
    """A chain of errors in one log. `at`: when it began, in the controller's clock; None where that cannot be told, and `doubt` says why."""

    unit: str
    said: str
    lines: int
    at: tuple[float, float] | None
    doubt: str = ""


def told(logs: Logs, facts: dict[str, HostFacts]) -> list[Told]:
    """What went wrong in which log, in the order in which it began, whatever the hosts' clocks and zones; facts by unit."""
    found = []
    for unit in sorted(logs.lines):
        for chain in chains(logs.entries(unit)):
            try:
                seen, doubt = moment(chain.cause, facts[unit]), "the line bears no time"
            except UnknownFact as error:
                seen, doubt = None, str(error)
            at = None if seen is None else (seen.low, seen.high)
            found.append(Told(unit, chain.cause.said[:240], len(chain.entries), at, "" if at else doubt))
    return sorted(found, key=lambda one: one.at or (float("inf"), 0.0))


def known_errors(unit: str, logs: Logs) -> Iterator[Finding]:
    """No error line of a known kind, but those that are harmless or judged elsewhere; each chain is told by its first cause."""
    entries = logs.entries(unit)
    in_storm = {entry for burst in storms(entries) for entry in burst}
    grouped: dict[str, list[Chain]] = {}
    for chain in chains([entry for entry in entries if entry not in in_storm]):
        signature = chain.signature
        if signature is not None and signature.kind == "error":
            grouped.setdefault(signature.name, []).append(chain)
    for found in grouped.values():
        yield _chain_finding(unit, found)
    _must_be_read(unit, logs)


def _chain_finding(unit: str, found: list[Chain]) -> Finding:
    chain, signature = found[0], found[0].signature
    assert signature is not None
    codes = list(dict.fromkeys(words for entry in chain.entries for words in translate(entry.whole)))
    requests = sorted({request for one in found for entry in one.entries for request in UUID.findall(entry.whole)})
    seen = f"{len(found)} x {signature.name} ({signature.component}): {chain.cause.said[:200]}"
    if len(chain.entries) > 1:
        seen += f"; {len(chain.entries) - 1} more lines follow from it, the last: {chain.entries[-1].said[:120]}"
    if codes:
        seen += f"; codes: {'; '.join(codes)}"
    if requests:
        seen += f"; requests {', '.join(requests[:3])}" + (f" and {len(requests) - 3} more" if len(requests) > 3 else "")
    return Finding(
        target=unit, expected="no error in the log while healthy traffic runs", seen=seen, why=signature.meaning,
        remedy=signature.remedy or "read the log around it; it is in the bundle's logs/", reference=signature.reference or None,
    )  # fmt: skip


def unknown_errors(unit: str, logs: Logs) -> Iterator[Finding]:
    """No error line that the catalogue does not know."""
    kinds: dict[str, list[Chain]] = {}
    for chain in chains(logs.entries(unit)):
        if chain.signature is None:
            kinds.setdefault(NUMBERS.sub("#", chain.cause.said)[:160], []).append(chain)
    for found in sorted(kinds.values(), key=len, reverse=True)[:SHOWN]:
        chain = found[0]
        codes = translate(chain.cause.whole)
        yield Finding(
            target=unit, expected="no error line that nobody knows",
            seen=f"{len(found)} x {chain.cause.said[:300]}" + (f"; codes: {'; '.join(codes)}" if codes else ""),
            why="an error nobody has explained is a fault nobody has excluded",
            remedy="find out what it means; where it is harmless, waive it with the reason and tell pdgate's catalogue",
        )  # fmt: skip
    if len(kinds) > SHOWN:
        yield Finding(target=unit, expected="no error line that nobody knows", seen=f"{len(kinds) - SHOWN} more kinds of unknown errors",
                      why="see above", remedy="they are in the bundle's logs/")  # fmt: skip
    _must_be_read(unit, logs)


def no_storm(unit: str, logs: Logs) -> Iterator[Finding]:
    """Errors do not come from several peers at the same moment."""
    for burst in storms(logs.entries(unit)):
        peers = sorted({peer for entry in burst for peer in PEER.findall(entry.text)})
        yield Finding(
            target=unit, expected="no failures with several peers at the same moment",
            seen=f"{len(burst)} errors with {len(peers)} peers ({', '.join(peers[:6])}) within {STORM_S * 1000:.0f} ms: {burst[0].said[:160]}"
            + (f"; codes: {'; '.join(translate(burst[0].whole))}" if translate(burst[0].whole) else ""),
            why="several peers failing together are not several faults: something they share failed (this engine, its host, its NIC or the fabric)",
            remedy="look at what they share before any single peer: links side by side, clocks, the moment P was restarted",
        )  # fmt: skip
    _must_be_read(unit, logs)


def no_forced_frees(engine: Engine, logs: Logs, records: list[Record]) -> Iterator[Finding]:
    """P gives up no KV of a request whose client stayed. One per client that left may be: before the pull, D tells P nothing."""
    aborted = sum(record.outcome == "aborted" for record in records)
    stayed = {request: record for record in records if record.outcome != "aborted" for request in UUID.findall(record.served_id)}
    freed = forced_frees(engine, logs)
    late = [(line, stayed[request]) for line in freed for request in UUID.findall(line) if request in stayed]
    for line, record in late[:1]:
        yield Finding(
            target=engine.name, expected="no forced free of a request whose client stayed",
            seen=f"{len(late)}, the first: {line.strip()[:200]}; its client got: {record.outcome} after {record.e2e or 0:.1f} s",
            why="D fetched the KV later than P's abort timeout: it may have read blocks that were others' by then, and answered wrong (vllm-ascend#15420)",
            remedy="find why D was late: its queue, its log around that request; the abort timeout must exceed D's longest wait",
        )  # fmt: skip
    if not late and len(freed) > aborted:
        yield Finding(
            target=engine.name, expected=f"at most {aborted} forced frees, one per client that left during the load",
            seen=f"{len(freed)}, the first: {freed[0].strip()[:240]}",
            why="P held KV until its abort timeout: D never said that it had fetched it, and D may still read recycled blocks (vllm-ascend#15420)",
            remedy="find why the acknowledgement did not come: D's log around those requests, and the side channel's owner",
        )  # fmt: skip
    elif freed and not late:
        yield Finding(
            target=engine.name, expected="no forced frees", seen=f"{len(freed)} forced frees, not more than the {aborted} clients that left",
            why="KV of a request whose client leaves before D's pull stays on P until the abort timeout (vllm-ascend#14142)", remedy="-", severity="note",
        )  # fmt: skip
    _must_be_read(engine.name, logs)


def forced_frees(engine: Engine, logs: Logs) -> list[str]:
    """Lines in which P says that it has given up KV nobody fetched."""
    pattern = connector_of(engine.connector).signatures.forced_free
    return [line for line in logs.lines.get(engine.name, []) if re.search(pattern, line)]


def freed_before(deployment: Deployment, records: list[Record], logs: Logs) -> str:
    """How many wrong answers are of requests whose KV P had given up, in words; empty where none is."""
    freed = {request for engine in deployment.engines if engine.serves_prefill for line in forced_frees(engine, logs) for request in UUID.findall(line)}
    wrong = [record for record in records if record.outcome == "wrong"]
    hit = sum(bool(freed & set(UUID.findall(record.served_id))) for record in wrong)
    return f"; P had given up the KV of {hit} of these {len(wrong)} at its abort timeout before D fetched it (vllm-ascend#15420)" if hit else ""


def no_communicator_leak(deployment: Deployment, host: str, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> Iterator[Finding]:
    """Each process has at most one open communicator per peer device: HcclCommInit counted against HcclCommDestroy."""
    peers = sum(len(engine.slots) for engine in deployment.engines if engine.host != host)
    if not after:
        raise UnknownFact(f"{host}: no plog file below the folder pd_plog names")
    for file, (inits, destroys) in after.items():
        grown = (inits - destroys) - (before.get(file, (0, 0))[0] - before.get(file, (0, 0))[1])
        if inits - destroys > peers and grown > 0:
            yield Finding(
                target=host, expected=f"at most {peers} open communicators in a process, one per peer device",
                seen=f"{file}: {inits} HcclCommInit, {destroys} HcclCommDestroy, {grown} more open than before the load",
                why="each costs 2 to 7 MB of HBM on both ends; P runs out of memory for links",
                remedy="connections are made anew and never closed: look for repeated connect errors and for 'Retry transfer to'",
            )  # fmt: skip


def of_all_units(rule: Callable[[str, Logs], Iterator[Finding]], logs: Logs) -> Iterator[Finding]:
    """A rule over every log; raises UnknownFact at the end for those that could not be read whole."""
    doubts = []
    for unit in sorted({*logs.lines, *logs.unknown}):
        try:
            yield from rule(unit, logs)
        except UnknownFact as error:
            doubts.append(str(error))
    if doubts:
        raise UnknownFact("; ".join(doubts))


def _must_be_read(unit: str, logs: Logs) -> None:
    if unit in logs.unknown:
        raise UnknownFact(logs.unknown[unit])
    if unit not in logs.lines:
        raise NotRun(f"{unit}: no log was followed")
