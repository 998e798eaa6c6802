"""Numbers that stand in error lines, in words. Sources: hccl_types.h, HIXL status codes (ascend-pd-facts 5.5)."""

from __future__ import annotations

import re

HCCL = {
    1: "parameter error", 2: "null pointer", 3: "memory error", 4: "internal error", 5: "not supported", 6: "not found", 7: "unavailable",
    8: "system call failed", 9: "timeout", 10: "cannot open file", 11: "TCP connect failed", 12: "RoCE connect failed",
    13: "TCP transfer failed", 14: "RoCE transfer failed", 15: "runtime call failed", 16: "driver call failed", 17: "profiling call failed",
    18: "CCE call failed", 19: "network call failed", 20: "try again", 21: "error CQE from the remote end", 22: "suspending",
    23: "operator retry failed", 24: "out of memory",
}  # fmt: skip
HIXL = {
    103900: "parameter invalid", 103901: "timeout", 103902: "not connected", 103903: "already connected", 103904: "notify failed",
    103905: "unsupported", 203900: "resources exhausted", 503900: "failed",
}  # fmt: skip
RUNTIME = {507046: "stream synchronisation timed out", 507034: "stream synchronisation timed out (vector core)"}
EVENTS = {
    "EI0006": "HCCL socket timeout", "EI0011": "QP memory", "EI0012": "SDMA task failed", "EI0013": "RoCE CQE error (status 12: retransmissions exhausted)",
    "EI0014": "an IP address is used twice", "EI0016": "TLS switch differs", "EI0019": "listen port cannot be bound",
    "EI0020": "listen address and port cannot be bound", "EJ0002": "the network port is down",
}  # fmt: skip

_HCCL_PLACES = re.compile(r"(?:Hccl\w*[^\n]{0,80}?\bret(?:urn)?\W{0,4}|hcclRet -> |\bret\[)(0x[0-9a-fA-F]+|\d+)")
_SIX = re.compile(r"\b(\d{6})\b")
_EVENT = re.compile(r"\bE[IJ]\d{4}\b")


def translate(text: str) -> list[str]:
    """What the codes in an error line mean, in the order they stand; nothing where it holds none that is known."""
    found: list[tuple[int, str]] = []
    for match in _HCCL_PLACES.finditer(text):
        value = int(match[1], 0)
        if value in HCCL:
            found.append((match.start(1), f"HCCL {match[1]}: {HCCL[value]}"))
    for match in _SIX.finditer(text):
        number = int(match[1])
        for system, table in (("HIXL", HIXL), ("ACL runtime", RUNTIME)):
            if number in table:
                found.append((match.start(), f"{system} {number}: {table[number]}"))
    found += [(match.start(), f"{match[0]}: {EVENTS[match[0]]}") for match in _EVENT.finditer(text) if match[0] in EVENTS]
    return list(dict.fromkeys(words for _, words in sorted(found)))
