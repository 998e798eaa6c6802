"""Log lines shaped like vLLM's: `(Worker_DP0_TP0 pid=12) INFO 08-20 10:00:00 [file.py:12] text`.

Shapes: vllm `vllm/logger.py` and `vllm/utils/system_utils.py`, as seen on vLLM 0.23 when not writing to a terminal.
"""

from __future__ import annotations

import os
import time


class VLog:
    """The logger of one process of an engine."""

    def __init__(self, process: str) -> None:
        self._prefix = f"({process} pid={os.getpid()}) "

    def _write(self, level: str, where: str, text: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        for line in text.splitlines() or [""]:
            print(f"{self._prefix}{level} {stamp} [{where}] {line}", flush=True)

    def info(self, where: str, text: str) -> None:
        self._write("INFO", where, text)

    def warning(self, where: str, text: str) -> None:
        self._write("WARNING", where, text)

    def error(self, where: str, text: str) -> None:
        self._write("ERROR", where, text)

    def uvicorn(self, text: str) -> None:
        """uvicorn's own lines bear no time."""
        print(f"{self._prefix}INFO:     {text}", flush=True)


def glog(level: str, where: str, text: str) -> None:
    """A line as Mooncake's C++ writes it: month and day, microseconds, no year."""
    now = time.time()
    print(f"{level}{time.strftime('%m%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1e6):06d} {os.getpid():>6} {where}] {text}", flush=True)
