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
path={path}
if [ ! -r "$path" ]; then
  for pid in $(grep -alE 'vllm|VLLM' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
    [ -r "/proc/$pid/root$path" ] && path="/proc/$pid/root$path" && break
  done
fi
[ -r "$path" ] || {{ echo unreadable; exit 3; }}
"""


def mark(shells: Shells, connection: Connection, path: str) -> LogMark:
    """Where the log ends now; raises LogUnavailable."""
    words = _run(shells, connection, path, 'stat -c "%i %s" "$path"').split()
    return LogMark(path, words[0], int(words[1]))


def since(shells: Shells, connection: Connection, start: LogMark) -> list[str]:
    """Lines written after `start`, without colours; raises LogUnavailable, also when the file was rotated or cut."""
    script = f'stat -c "%i %s" "$path"; tail -c +{start.size + 1} "$path"'
    first, _, rest = _run(shells, connection, start.path, script).partition("\n")
    inode, size = first.split()
    if inode != start.inode or int(size) < start.size:
        raise LogUnavailable(f"{connection.name}: {start.path} was rotated or truncated during the check")
    return ANSI.sub("", rest).replace("\r", "\n").splitlines()


def _run(shells: Shells, connection: Connection, path: str, script: str) -> str:
    try:
        result = shells.run(connection, FIND.format(path=shlex.quote(path)) + script)
    except HostUnreachable as error:
        raise LogUnavailable(str(error)) from None
    if result.code != 0:
        raise LogUnavailable(f"{connection.name}: {path} is missing or not readable on the host")
    return result.stdout
