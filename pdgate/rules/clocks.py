"""Clocks first: with them unknown or eight hours apart, every later conclusion is wrong (field report R2)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from pdgate.facts.model import HostFacts, Root, UnknownFact
from pdgate.inventory.model import Deployment, Engine, Host
from pdgate.rules.engines import naive_log_time, parse_utc_offset
from pdgate.rules.finding import Finding
from pdgate.rules.running import PERMISSION, need_running


def offset_is_small(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """The host's clock agrees with the controller's within the declared bound, the measurement's doubt included."""
    offset = facts.clock.get().offset_s
    limit = host.expect.clock_offset_ms / 1000
    if -limit <= offset.low and offset.high <= limit:
        return
    if offset.low <= limit and offset.high >= -limit and offset.radius > limit / 2:
        raise UnknownFact(
            f"{host.name}: the clock offset is {offset.middle * 1000:.0f} ms +- {offset.radius * 1000:.0f} ms, too uncertain to "
            f"judge against {limit * 1000:.0f} ms; the connection is slow"
        )
    yield Finding(
        target=host.name,
        expected=f"host and controller clocks within {limit * 1000:.0f} ms",
        seen=f"the host is {_words(offset.middle)} (+- {offset.radius * 1000:.0f} ms)",
        why="logs of two hosts cannot be put in order, TLS and leases expire wrongly, recovery times are wrong",
        remedy="start chronyd or ntpd on the host and check that it is synchronised: chronyc tracking",
    )


def zones_agree(deployment: Deployment, machine: str, facts: dict[str, HostFacts]) -> Iterator[Finding]:
    """The host has the deployment's zone, and its containers have the host's."""
    own = facts[machine]
    host = deployment.machines[machine][0]
    first = next(iter(deployment.machines))
    expected = host.expect.zone or facts[first].clock.get().utc_offset
    seen = own.clock.get().utc_offset
    if seen != expected:
        origin = "pd_expect.zone" if host.expect.zone else f"host {deployment.machines[first][0].name}"
        yield _zone(host.name, f"zone {expected} (from {origin})", f"the host is in {seen}")
    for root_id, root in _readable_roots(own).items():
        if root.utc_offset is not None and root.utc_offset != seen:
            name = _root_name(own, root_id)
            yield _zone(host.name, f"{name} in the host's zone {seen}", f"it is in {root.utc_offset}")


def log_zone_agrees(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """The engine writes its log in the host's zone: the last line's time is set against the file's."""
    need_running(engine, facts)
    if engine.log is None:
        raise UnknownFact(f"{engine.name}: no pd_log in the inventory, so the zone of its log is unknown")
    if engine.log not in facts.logs:
        raise UnknownFact(f"{engine.name}: {engine.log} was not collected")
    log = facts.logs[engine.log].get()
    stamped = [stamp for line in log.tail if (stamp := naive_log_time(line, log.modified)) is not None]
    if not stamped:
        raise UnknownFact(f"{engine.name}: no line of {engine.log} bears a time")
    # The file was last written at `modified`, when the log's clock showed the last stamp or, if lines without a stamp
    # (access lines) follow it, a later time. In the host's zone, the stamp is therefore at or a little behind the file.
    zone = facts.clock.get().utc_offset
    written = datetime.fromtimestamp(log.modified, parse_utc_offset(zone)).replace(tzinfo=None)
    behind = (written - stamped[-1]).total_seconds()
    if -60 <= behind < 900:
        return
    undated = naive_log_time(next(line for line in reversed(log.tail) if line.strip()), log.modified) is None
    if undated and 0 <= behind < 3 * 3600:
        raise UnknownFact(
            f"{engine.name}: the last dated line of {engine.log} is {behind / 60:.0f} min older than the file: idle, or another zone"
        )
    yield _zone(
        engine.name,
        f"{engine.log} is written in the host's zone {zone}",
        f"its last line is {abs(behind) / 3600:.2f} h {'behind' if behind > 0 else 'ahead of'} the file's own time: {_last(log.tail)}",
    )


def timezone_is_a_file(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """The trap of `-v /etc/timezone:/etc/timezone`: where the host has no such file, docker makes a directory of it."""
    places = [("on the host", facts.clock.get().timezone_is_directory)]
    places += [(f"in {_root_name(facts, root_id)}", root.timezone_is_directory) for root_id, root in _readable_roots(facts).items()]
    for where, is_directory in dict.fromkeys(places):
        if is_directory:
            yield Finding(
                target=host.name,
                expected="/etc/timezone is a file or absent",
                seen=f"it is a directory {where}",
                why="the mount that was to set the container's zone made an empty directory, and the zone stayed UTC",
                remedy="mount /etc/localtime and /usr/share/zoneinfo and set TZ; remove the /etc/timezone mount and directory",
            )


def _readable_roots(facts: HostFacts) -> dict[str, Root]:
    """Mount namespaces of the engine processes; raises UnknownFact where the probe could not look into one."""
    hidden = [process.pid for process in facts.engine_processes.get() if not process.readable]
    if hidden:
        raise UnknownFact(f"{facts.host}: the container of pid {hidden[0]} could not be looked into; {PERMISSION}")
    return facts.roots.get()


def _zone(target: str, expected: str, seen: str) -> Finding:
    return Finding(
        target=target,
        expected=expected,
        seen=seen,
        why="timestamps of host, container and log are hours apart, and events are put in the wrong order",
        remedy="mount /etc/localtime and /usr/share/zoneinfo into the container and set TZ, then restart",
    )


def _root_name(facts: HostFacts, root_id: str) -> str:
    for process in facts.engine_processes.get():
        if process.mntns == root_id:
            container = facts.container_of(process.pid) if facts.processes.known else None
            return f"container {container.name}" if container else f"the mount namespace of pid {process.pid}"
    return root_id


def _words(seconds: float) -> str:
    direction = "ahead" if seconds > 0 else "behind"
    seconds = abs(seconds)
    return f"{seconds * 1000:.0f} ms {direction}" if seconds < 10 else f"{seconds:.0f} s {direction}"


def _last(lines: list[str]) -> str:
    return next((line.strip()[:120] for line in reversed(lines) if line.strip()), "")
