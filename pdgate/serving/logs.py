"""What engines and proxies logged since a moment: by byte offset, so that neither clocks nor zones matter."""

from __future__ import annotations

import datetime
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from pdgate.facts.parse.logline import LogLine, parse_log
from pdgate.facts.shell import HostUnreachable, Shells
from pdgate.inventory.connection import Connection
from pdgate.inventory.model import Deployment
from pdgate.serving.record import Record

ANSI = re.compile(r"\x1b\[[\d;]*m")
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
FINGERPRINT = 256


class LogUnavailable(Exception):
    """The log cannot be read; the message names host and path."""


@dataclass(frozen=True)
class LogMark:
    """A place in a log file: inode and size in bytes, and a checksum of what stands before it (a file cut and grown again shows)."""

    path: str
    inode: str
    size: int
    before: str = ""


@dataclass(frozen=True)
class LogRead:
    """Lines since a mark, without colours; `gap` says why some may be missing; `end` is where to go on."""

    lines: list[str] = field(default_factory=list)
    end: LogMark | None = None
    gap: str = ""


# The engine's log may lie inside its container's own mounts; an engine process of the host leads there.
FIND = f"""
find_log() {{
  path=$1
  [ -r "$path" ] && return 0
  for pid in $(grep -alE 'vllm|VLLM' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
    [ -r "/proc/$pid/root$path" ] && path="/proc/$pid/root$path" && return 0
  done
  return 1
}}
before() {{ # FILE SIZE: checksum of the last bytes before SIZE
  if [ "$2" -gt {FINGERPRINT} ]; then from=$(($2 - {FINGERPRINT} + 1)) count={FINGERPRINT}; else from=1 count=$2; fi
  tail -c +$from "$1" | head -c $count | cksum | cut -d' ' -f1
}}
where() {{ set -- "$1" $(stat -c '%i %s' "$1"); echo "$2 $3 $(before "$1" $3)"; }}
part() {{ # FILE FROM TO: these bytes, and a line's end where the file has none yet
  [ "$3" -gt "$2" ] && tail -c +$(($2 + 1)) "$1" | head -c $(($3 - $2))
  echo
}}
since() {{ # PATH INODE SIZE BEFORE
  find_log "$1" || {{ echo '@@log unreadable'; return; }}
  set -- "$1" "$2" "$3" "$4" $(where "$path")
  if [ "$5" = "$2" ] && [ "$6" -ge "$3" ] && [ "$(before "$path" $3)" = "$4" ]; then
    echo "@@log same $5 $6 $7"; part "$path" $3 $6; return
  fi
  if [ "$5" != "$2" ]; then
    for old in "$path"* "$(dirname "$path")"/*; do
      [ "$(stat -c %i "$old" 2>/dev/null)" = "$2" ] || continue
      echo "@@log rotated $5 $6 $7"; part "$old" $3 $(stat -c %s "$old"); part "$path" 0 $6; return
    done
    echo "@@log lost $5 $6 $7"
  else
    echo "@@log cut $5 $6 $7"
  fi
  part "$path" 0 $6
}}
"""
GAPS = {
    "same": "",
    "rotated": "",
    "lost": "was replaced and the old file is not beside it: lines between may be lost",
    "cut": "was truncated: lines before that are lost",
}


def mark(shells: Shells, connection: Connection, paths: list[str]) -> dict[str, LogMark | LogUnavailable]:
    """Where each log of a host ends now, in one remote call; a log that cannot be read gets the reason."""
    script = FIND + "".join(f'find_log {shlex.quote(path)} && where "$path" || echo unreadable\n' for path in paths)
    try:
        lines = shells.run(connection, script).stdout.splitlines()
    except HostUnreachable as error:
        return {path: LogUnavailable(str(error)) for path in paths}
    marks: dict[str, LogMark | LogUnavailable] = {}
    for path, line in zip(paths, [*lines, *["unreadable"] * len(paths)], strict=False):
        words = line.split()
        marks[path] = LogMark(path, words[0], int(words[1]), words[2]) if len(words) == 3 else _unreadable(connection, path)
    return marks


def since(shells: Shells, connection: Connection, starts: list[LogMark]) -> dict[str, LogRead | LogUnavailable]:
    """Lines written after each mark, in one remote call; across a rotation too, and with the gap named where lines may be lost."""
    script = FIND + "".join(f"since {shlex.quote(start.path)} {start.inode} {start.size} {start.before or 0}\n" for start in starts)
    try:
        output = shells.run(connection, script).stdout
    except HostUnreachable as error:
        return {start.path: LogUnavailable(str(error)) for start in starts}
    found: dict[str, LogRead | LogUnavailable] = {}
    for start, text in zip(starts, re.split(r"^@@log ", output, flags=re.MULTILINE)[1:], strict=False):
        head, _, body = text.partition("\n")
        words = head.split()
        if len(words) != 4:
            found[start.path] = _unreadable(connection, start.path)
            continue
        gap = f"{connection.name}: {start.path} {GAPS[words[0]]}" if GAPS[words[0]] else ""
        lines = [line for line in ANSI.sub("", body).replace("\r", "\n").splitlines() if line.strip()]
        found[start.path] = LogRead(lines, LogMark(start.path, words[1], int(words[2]), words[3]), gap)
    return found


def _unreadable(connection: Connection, path: str) -> LogUnavailable:
    return LogUnavailable(f"{connection.name}: {path} is missing or not readable on the host")


def logs_of(deployment: Deployment) -> dict[str, tuple[str, str | None]]:
    """Every unit that logs: its name to (host, path or None)."""
    units = {engine.name: (engine.host, engine.log) for engine in deployment.engines}
    return units | {f"proxy {proxy.name}": (proxy.host, proxy.log) for proxy in deployment.proxies}


class LogBook:
    """Follows the logs of all engines and proxies from the moment it is made; what it read is kept in `folder`."""

    def __init__(self, deployment: Deployment, shells: Shells, folder: Path) -> None:
        self.deployment, self.shells, self.folder = deployment, shells, folder
        self.unknown: dict[str, str] = {}
        self._marks: dict[str, LogMark] = {}
        for host, units in self._by_host().items():
            found = mark(shells, deployment.hosts[host].connection, list(units.values()))
            for unit, path in units.items():
                place = found[path]
                if isinstance(place, LogUnavailable):
                    self.unknown[unit] = str(place)
                else:
                    self._marks[unit] = place

    def _by_host(self) -> dict[str, dict[str, str]]:
        hosts: dict[str, dict[str, str]] = {}
        for unit, (host, path) in logs_of(self.deployment).items():
            if path is None:
                self.unknown[unit] = f"{unit}: the inventory names no log ({'pd_proxy_log' if unit.startswith('proxy') else 'pd_log'})"
            else:
                hosts.setdefault(host, {})[unit] = path
        return hosts

    def read(self) -> dict[str, list[str]]:
        """New lines by unit since the last time; a unit whose lines are missing or may be incomplete is in `unknown`."""
        fresh: dict[str, list[str]] = {}
        for host, units in self._by_host().items():
            starts = {unit: self._marks[unit] for unit in units if unit in self._marks}
            if not starts:
                continue
            found = since(self.shells, self.deployment.hosts[host].connection, list(starts.values()))
            for unit, start in starts.items():
                part = found.get(start.path, LogUnavailable(f"{host}: {start.path} was not read"))
                if isinstance(part, LogUnavailable):
                    self.unknown[unit] = str(part)
                    continue
                if part.gap:
                    self.unknown[unit] = part.gap
                fresh[unit] = part.lines
                if part.end is not None:
                    self._marks[unit] = part.end
                self._keep(unit, part.lines)
        return fresh

    def _keep(self, unit: str, lines: list[str]) -> None:
        if lines:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', unit)}.log").open("a") as out:
                out.writelines(line + "\n" for line in lines)


@dataclass(frozen=True)
class Logs:
    """Lines of a window by unit, and the units whose lines are missing or incomplete, with the reason."""

    lines: dict[str, list[str]]
    unknown: dict[str, str]
    day: datetime.date

    def entries(self, unit: str) -> list[LogLine]:
        return parse_log(unit, self.lines.get(unit, []), self.day)


def attribute(records: list[Record], logs: Logs) -> list[Record]:
    """Records with the decode engine whose log names their request, where exactly one does."""
    mentions: dict[str, set[str]] = {}
    for unit, lines in logs.lines.items():
        if unit.startswith("proxy "):
            continue
        for line in lines:
            if "KV cache transfer for request" in line or "Mooncake transfer failed" in line:
                for found in UUID.findall(line):
                    mentions.setdefault(found, set()).add(unit)
    named = []
    for record in records:
        ids = UUID.findall(record.served_id)
        units = mentions.get(ids[0], set()) if ids else set()
        named.append(record.model_copy(update={"engine": next(iter(units))}) if len(units) == 1 else record)
    return named
