"""The probe's bracketed output."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class RawSection:
    """Text of one section and the exit code of the command that made it; None where the probe never ended it."""

    text: str
    code: int | None

    def unknown(self) -> str | None:
        """Why the section has no value, or None if it has one."""
        if self.code is None:
            return "the probe ended inside this section"
        absent = re.search(r"^@absent (.+)$", self.text, re.MULTILINE)
        if absent:
            return f"{absent[1]} is not installed on the host"
        if self.code != 0:
            said = self.text.strip().splitlines()
            return f"exit code {self.code}" + (f": {said[-1][:200]}" if said else "")
        return None


def split_sections(output: str, nonce: str) -> tuple[dict[str, RawSection], bool]:
    """Name to section, and whether the probe reached its end."""
    sections: dict[str, RawSection] = {}
    name: str | None = None
    lines: list[str] = []
    mark = f"@@{nonce} "
    for line in output.split("\n"):
        if not line.startswith(mark):
            lines.append(line)
            continue
        words = line[len(mark) :].split(" ")
        if words[0] == "done":
            return sections, True
        if words[0] == "begin":
            name, lines = " ".join(words[1:]), []
        elif words[0] == "end" and name is not None:
            text = "\n".join(lines[:-1] if lines and not lines[-1] else lines)
            sections[name] = RawSection(text, int(words[-1]))
            name = None
    if name is not None:
        sections[name] = RawSection("\n".join(lines), None)
    return sections, False
