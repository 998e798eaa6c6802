"""Hitting a request in a phase of its life: the trigger waits on the faulted host, and the record proves where it hit.

The trigger follows the engine's log (tail -F, looking every 2 ms: on overlay file systems nothing wakes it) and signals in the same
shell, a few milliseconds after the line was written. That the phase was not over by then is proved afterwards from the logs of both sides; else the experiment is invalid.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pdgate.facts.model import UnknownFact
from pdgate.serving.logs import FIND, UUID, Logs

WAIT_S = 20


@dataclass(frozen=True)
class Aim:
    """Fire once a line that contains `text` (shell pattern) is written to `log`; `phase` is what it then means to hit."""

    phase: str
    log: str
    text: str
    tag: str

    def script(self) -> str:
        """sh that waits for the line and prints it; ends with 1 where none comes in time."""
        return f"""{FIND}
find_log {shlex.quote(self.log)} || {{ echo 'the log {self.log} cannot be read, so nothing can be aimed'; exit 1; }}
fifo=$PDGATE_GUARD/{self.tag}/aim; mkfifo "$fifo"; read -r from rest </proc/uptime
tail --version 2>/dev/null | grep -q GNU || {{ echo "the host's tail cannot follow in milliseconds (GNU coreutils needed): nothing can be aimed"; exit 1; }}
timeout {WAIT_S} tail -n0 -s 0.002 -F "$path" >"$fifo" 2>/dev/null & tail=$!
hit=; while read -r line; do case $line in *{self.text}*) hit=$line; break ;; esac; done <"$fifo"
"""

    def epilogue(self) -> str:
        """sh after the shot: what triggered it goes beside the guard, for the evidence."""
        return f"""
read -r to rest </proc/uptime; echo "waited $(awk "BEGIN {{print $to - $from}}") s"
kill $tail 2>/dev/null; rm -f "$fifo"
[ -n "$hit" ] || {{ echo 'no line with {self.text} in {WAIT_S} s: no request came into phase {self.phase}'; exit 1; }}
echo "$hit" >$PDGATE_GUARD/{self.tag}/hit
"""


def prefilled(log: str, tag: str) -> Aim:
    """P has computed a prompt and holds its KV for D (vllm-ascend's `Delaying free`)."""
    return Aim("prefill done", log, "Delaying\\ free\\ of", tag)


def must_have_hit(aim: Aim, evidence: str, logs: Logs, decoders: list[str]) -> str:
    """The id of the request that was hit; raises UnknownFact where it cannot be told, or D had its KV already."""
    found = UUID.findall(evidence)
    if not found:
        raise UnknownFact(f"the line that triggered the fault names no request: {evidence[:200]}")
    request = found[0]
    for unit in decoders:
        if unit in logs.unknown:
            raise UnknownFact(f"whether phase '{aim.phase}' was hit cannot be told: {logs.unknown[unit]}")
        if any(request in line and "KV cache transfer for request" in line for line in logs.lines.get(unit, [])):
            raise UnknownFact(f"phase '{aim.phase}' was missed: {unit} had the KV of {request} before the fault took effect")
    return request
