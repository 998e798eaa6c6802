"""Log lines shaped like vLLM's: `(Worker_DP0_TP0 pid=12) INFO 08-20 10:00:00 [file.py:12] text`.

Shapes: vllm `vllm/logger.py` and `vllm/utils/system_utils.py`, as seen on vLLM 0.23 when not writing to a terminal.
"""

from __future__ import annotations

import errno
import os
import sys
import time

DIES_ON_FULL_DISK = False  # a defect


def emit(line: str) -> None:
    """One line to standard output. A full disk costs the line and no more, as in Python's logging."""
    try:
        os.write(sys.stdout.fileno(), f"{line}\n".encode())
    except OSError as error:
        if DIES_ON_FULL_DISK and error.errno == errno.ENOSPC:
            os._exit(1)


class VLog:
    """The logger of one process of an engine."""

    def __init__(self, process: str) -> None:
        self._prefix = f"({process} pid={os.getpid()}) "

    def _write(self, level: str, where: str, text: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        for line in text.splitlines() or [""]:
            emit(f"{self._prefix}{level} {stamp} [{where}] {line}")

    def info(self, where: str, text: str) -> None:
        self._write("INFO", where, text)

    def warning(self, where: str, text: str) -> None:
        self._write("WARNING", where, text)

    def error(self, where: str, text: str) -> None:
        self._write("ERROR", where, text)

    def uvicorn(self, text: str) -> None:
        """uvicorn's own lines bear no time."""
        emit(f"{self._prefix}INFO:     {text}")


def glog(level: str, where: str, text: str) -> None:
    """A line as Mooncake's C++ writes it: month and day, microseconds, no year."""
    now = time.time()
    emit(f"{level}{time.strftime('%m%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1e6):06d} {os.getpid():>6} {where}] {text}")
