"""hccn_tool answers, by query. Formats: driver source as in ascend-pd-facts 4.3; not proven on hardware.

Two generations are read: `[devid N]` / `[device N]` in link_stat, `name:value` in -stat, `name : value` in -stat_extra,
`dev_id:N, tls switch[…` / `device N, tls switch[…`.
"""

from __future__ import annotations

import re

from pdgate.facts.model import Device


def parse_hccn(text: str) -> list[Device]:
    """The probe's `@line DEVICE QUERY text` and `@code DEVICE QUERY code` lines; order is free, devices ran in parallel."""
    answers: dict[tuple[int, str], list[str]] = {}
    codes: dict[tuple[int, str], int] = {}
    for line in text.splitlines():
        found = re.match(r"@(line|code) (\d+) (\w+) ?(.*)", line)
        if not found:
            continue
        key = (int(found[2]), found[3])
        if found[1] == "code":
            codes[key] = int(found[4])
        else:
            answers.setdefault(key, []).append(found[4])
    devices = sorted({device for device, _ in codes} | {device for device, _ in answers})
    return [_device(device, answers, codes) for device in devices]


def _device(device: int, answers: dict[tuple[int, str], list[str]], codes: dict[tuple[int, str], int]) -> Device:
    values: dict[str, object] = {"id": device}
    failed: dict[str, str] = {}
    counters: dict[str, int] = {}
    for query, parser in PARSERS.items():
        lines = answers.get((device, query), [])
        code = codes.get((device, query))
        said = "; ".join(line.strip() for line in lines if line.strip())[:200]
        if code is None:
            failed[query] = "no answer"
        elif code != 0:
            failed[query] = f"exit code {code}: {said}"
        else:
            parsed = parser("\n".join(lines))
            if not parsed:
                failed[query] = f"not understood: {said or 'empty answer'}"
            elif query in ("stat", "stat_extra"):
                counters.update({key: value for key, value in parsed.items() if isinstance(value, int)})
            else:
                values.update(parsed)
    return Device.model_validate({**values, "counters": counters, "failed": failed})


def _link(text: str) -> dict[str, object]:
    found = re.search(r"link status\s*:\s*(\S+)", text, re.IGNORECASE)
    return {"link": found[1].upper()} if found else {}


def _net_health(text: str) -> dict[str, object]:
    found = re.search(r"net health status\s*:\s*(.+)", text, re.IGNORECASE)
    return {"net_health": found[1].strip()} if found else {}


def _netdetect(text: str) -> dict[str, object]:
    found = re.search(r"netdetect address\s*:\s*(\S+)", text, re.IGNORECASE)
    return {"netdetect": found[1]} if found else {}


def _tls(text: str) -> dict[str, object]:
    found = re.search(r"tls switch\[(\d)\]", text)
    return {"tls_switch": int(found[1])} if found else {}


def _ip(text: str) -> dict[str, object]:
    found = re.search(r"ipaddr\s*:\s*(\S+)", text)
    return {"ip": found[1]} if found else {}


def _link_stat(text: str) -> dict[str, object]:
    body = re.sub(r"^\[dev(?:id|ice) \d+\]", "", text, flags=re.MULTILINE)
    values: dict[str, object] = {}
    for key, label in (("link_up", "up"), ("link_down", "down")):
        found = re.search(rf"link {label} count\s*:\s*(\d+)", body)
        if found:
            values[key] = int(found[1])
    if values:
        values["last_changes"] = [line.strip() for line in re.findall(r"^\s+(\w{3} .*LINK (?:UP|DOWN))", body, re.MULTILINE)]
    return values


def _counters(text: str) -> dict[str, object]:
    return {name: int(value) for name, value in re.findall(r"^\s*(\w+)\s*:\s*(\d+)\s*$", text, re.MULTILINE)}


PARSERS = {
    "link": _link, "net_health": _net_health, "netdetect": _netdetect, "tls": _tls, "ip": _ip,
    "link_stat": _link_stat, "stat": _counters, "stat_extra": _counters,
}  # fmt: skip
