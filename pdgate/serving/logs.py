"""What an engine logged since a moment: by byte offset, so that neither clocks nor zones matter."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from pdgate.facts.shell import HostUnreachable, Shells
from pdgate.inventory.connection import Connection

ANSI = re.compile(r"\x1b\[[\d;]*m")


class LogUnavailable(Exception):
    """The log cannot be read; the message names host and path."""


@dataclass(frozen=True)
class LogMark:
    """A place in a log file: its inode (rotation shows) and size in bytes."""

    path: str
    inode: str
    size: int


# The engine's log may lie inside its container's own mounts; an engine process of the host leads there.
FIND = """
find_log() {
  path=$1
  [ -r "$path" ] && return 0
  for pid in $(grep -alE 'vllm|VLLM' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
    [ -r "/proc/$pid/root$path" ] && path="/proc/$pid/root$path" && return 0
  done
  return 1
}
"""
MARK = 'find_log {path} && stat -c "%i %s" "$path" || echo unreadable\n'
SINCE = 'echo "@@log"; find_log {path} && stat -c "%i %s" "$path" && tail -c +{start} "$path" || echo unreadable; echo\n'


def mark(shells: Shells, connection: Connection, paths: list[str]) -> dict[str, LogMark | LogUnavailable]:
    """Where each log of a host ends now, in one remote call; a log that cannot be read gets the reason."""
    script = FIND + "".join(MARK.format(path=shlex.quote(path)) for path in paths)
    try:
        lines = shells.run(connection, script).stdout.splitlines()
    except HostUnreachable as error:
        return {path: LogUnavailable(str(error)) for path in paths}
    marks: dict[str, LogMark | LogUnavailable] = {}
    for path, line in zip(paths, [*lines, *["unreadable"] * len(paths)], strict=False):
        words = line.split()
        marks[path] = LogMark(path, words[0], int(words[1])) if len(words) == 2 else _unreadable(connection, path)
    return marks


def since(shells: Shells, connection: Connection, starts: list[LogMark]) -> dict[str, list[str] | LogUnavailable]:
    """Lines written after each mark, without colours, in one remote call; rotation and truncation are reasons, not silence."""
    script = FIND + "".join(SINCE.format(path=shlex.quote(start.path), start=start.size + 1) for start in starts)
    try:
        output = shells.run(connection, script).stdout
    except HostUnreachable as error:
        return {start.path: LogUnavailable(str(error)) for start in starts}
    found: dict[str, list[str] | LogUnavailable] = {}
    for start, part in zip(starts, output.split("@@log\n")[1:], strict=False):
        first, _, rest = part.partition("\n")
        words = first.split()
        if len(words) != 2:
            found[start.path] = _unreadable(connection, start.path)
        elif words[0] != start.inode or int(words[1]) < start.size:
            found[start.path] = LogUnavailable(f"{connection.name}: {start.path} was rotated or truncated during the check")
        else:
            found[start.path] = ANSI.sub("", rest).replace("\r", "\n").splitlines()
    return found


def _unreadable(connection: Connection, path: str) -> LogUnavailable:
    return LogUnavailable(f"{connection.name}: {path} is missing or not readable on the host")
