"""Containers, leftovers, zone and logs."""

from __future__ import annotations

import json
import re

from pdgate.facts.model import Container, Leftover, LogFacts
from pdgate.facts.parse import ParseError


def parse_zone(text: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "offset":
            values["utc_offset"] = value
        elif key == "localtime":
            values["localtime"] = value
        elif key == "timezone" and value == "directory":
            values["timezone_is_directory"] = True
    if not re.fullmatch(r"[+-]\d{4}", str(values.get("utc_offset", ""))):
        raise ParseError(f"'date +%z' said {values.get('utc_offset')!r}")
    return values


def parse_containers(text: str) -> list[Container]:
    """`docker inspect --format` with the probe's fields: id|name|pid|network|ports json|mounts json|image."""
    containers = []
    for line in text.splitlines():
        if not line.strip():
            continue
        parts = line.split("|")
        if len(parts) < 7:
            raise ParseError(f"container line {line[:120]!r}")
        # JSON may hold '|' only inside strings; image and the first four fields cannot.
        identity, name, pid, network = parts[:4]
        ports_text, mounts_text = _two_json("|".join(parts[4:-1]), line)
        published = []
        for bindings in (ports_text or {}).values():
            for binding in bindings or []:
                published.append((binding.get("HostIp") or "0.0.0.0", int(binding["HostPort"])))
        containers.append(
            Container(
                id=identity,
                name=name.lstrip("/"),
                pid=int(pid),
                network=network,
                image=parts[-1],
                published=published,
                mounts=[mount.get("Destination", "") for mount in mounts_text or []],
            )
        )
    return containers


def _two_json(text: str, line: str) -> tuple[dict[str, list[dict[str, str]]] | None, list[dict[str, str]] | None]:
    decoder = json.JSONDecoder()
    try:
        ports, end = decoder.raw_decode(text)
        mounts, _ = decoder.raw_decode(text[end:].lstrip("|"))
    except ValueError:
        raise ParseError(f"container line {line[:120]!r}") from None
    return ports, mounts


def parse_leftovers(text: str) -> list[Leftover]:
    """`stat -c "%d:%i|%Y|%s|%F|%n"`; the same file seen through several roots counts once."""
    found: dict[str, Leftover] = {}
    for line in text.splitlines():
        parts = line.split("|", 4)
        if len(parts) == 5:
            path = re.sub(r"^/proc/\d+/root", "", parts[4]) or "/"
            found.setdefault(parts[0], Leftover(path=path, kind=parts[3], size=int(parts[2]), modified=float(parts[1])))
    return sorted(found.values(), key=lambda leftover: leftover.path)


def parse_log(text: str) -> LogFacts:
    stat = re.search(r"^@stat (\d+) (\d+) (\d+)$", text, re.MULTILINE)
    if not stat:
        raise ParseError("the log's size could not be read ('stat' missing?)")
    lines = text.split("\n")
    return LogFacts(
        size=int(stat[1]), modified=float(stat[2]), inode=int(stat[3]),
        started=[line.removeprefix("@started ") for line in lines if line.startswith("@started ")],
        tail=[line.removeprefix("@tail ") for line in lines if line.startswith("@tail ")],
    )  # fmt: skip
