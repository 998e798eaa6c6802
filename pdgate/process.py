"""Processes of this machine, told apart by their start."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks since boot, so that a reused pid is not taken for it; empty where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
