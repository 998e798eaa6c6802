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
    bandwidth_bytes_s: float = 500e6
    block_size: int = 128
    num_blocks: int = 512
    max_model_len: int = 8192
    startup_s: float = 0.0
    # Misbehaviour switched on by a defect, by name; the value is the defect's own.
    misbehave: dict[str, Any] = field(default_factory=dict)


def settings_for(unit: str, path: Path = PATH) -> Settings:
    """Settings of one unit (`engine:7000`, `proxy`): the common ones, then its own."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    values = {**stored.get("common", {}), **stored.get(unit, {})}
    return Settings(**values)
