"""`npu-smi info`: A2 has one chip per NPU, A3 two with a Phy-ID column; widths vary, so cells are cut at `|`.

Sources: public captures (arthurchiao 910B1, vllm-ascend#2035, #12980, #8420). Not proven on hardware.
"""

from __future__ import annotations

import re

from pdgate.facts.model import NpuChip, NpuProcess, NpuSmi
from pdgate.facts.parse import ParseError


def parse_npu_smi(text: str) -> NpuSmi:
    version = re.search(r"npu-smi\s+(\S+)", text)
    if not version:
        raise ParseError(f"no npu-smi header in {text.strip()[:80]!r}")
    chips: list[NpuChip] = []
    processes: list[NpuProcess] = []
    first: list[str] | None = None
    in_processes = False
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0].startswith("NPU") and any("Process" in cell for cell in cells):
            in_processes = True
        elif in_processes:
            numbers = cells[0].split()
            if len(cells) >= 3 and len(numbers) == 2 and cells[1].isdigit():
                processes.append(NpuProcess(npu=int(numbers[0]), chip=int(numbers[1]), pid=int(cells[1]), name=cells[2]))
        elif len(cells) == 3:
            words = cells[0].split()
            if len(words) == 2 and words[0].isdigit() and not words[1].isdigit():
                first = cells
            elif first is not None and words and all(word.isdigit() for word in words):
                chips.append(_chip(first, cells))
                first = None
    if not chips:
        raise ParseError("no chip row in the table of npu-smi info")
    return NpuSmi(version=version[1], chips=chips, processes=processes)


def _chip(upper: list[str], lower: list[str]) -> NpuChip:
    npu, name = upper[0].split()
    ids = [int(word) for word in lower[0].split()]
    memory = re.findall(r"(\d+)\s*/\s*(\d+)", lower[2])
    used, total = memory[-1] if memory else (None, None)
    return NpuChip(
        npu=int(npu), chip=ids[0], phy_id=ids[1] if len(ids) > 1 else None, name=name, health=upper[1], bus_id=lower[1],
        hbm_used_mb=int(used) if used else None, hbm_total_mb=int(total) if total else None,
    )  # fmt: skip
