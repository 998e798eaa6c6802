"""Pace and misbehaviour of the lab's engines and proxy, read from one JSON file on the lab host."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = Path("/etc/pdlab/settings.json")


@dataclass(frozen=True)
class Settings:
    """Times in seconds, sizes in bytes."""

    prefill_base_s: float = 0.02
    prefill_per_token_s: float = 0.0001
    itl_s: float = 0.01
    kv_bytes_per_token: int = 512
    bandwidth_bytes_s: float = 20e6
    prefill_slots: int = 2  # prompts computed at the same time; the others wait
    block_size: int = 128
    num_blocks: int = 512
    max_model_len: int = 8192
    startup_s: float = 0.0
    # Misbehaviour switched on by a defect, by name; the value is the defect's own.
    misbehave: dict[str, Any] = field(default_factory=dict)


def hits(window: dict[str, int] | None, number: int) -> bool:
    """Whether request `number` lies in a defect's window: {"from": 10, "to": 40, "every": 5}; no window, no hit."""
    if not window:
        return False
    start = window.get("from", 1)
    return start <= number <= window.get("to", 10**9) and (number - start) % window.get("every", 1) == 0


def settings_for(unit: str, path: Path = PATH) -> Settings:
    """Settings of one unit (`engine:7000`, `proxy`): the common ones, then its own."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    values = {**stored.get("common", {}), **stored.get(unit, {})}
    return Settings(**values)
