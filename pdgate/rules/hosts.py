"""What may stand in the way on a host: missing sight, leftovers of earlier runs, scripts that destroy evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Host
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.running import running_engine


def probe_sees_everything(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """The probe ran as root, so that sockets have owners and environments can be read."""
    identity = facts.identity.get()
    if not identity.is_root:
        yield Finding(
            target=host.name,
            expected="the probe runs as root",
            seen=f"it ran as uid {identity.uid}",
            why="without root, sockets have no owner and environments are unreadable: the port checks cannot be made",
            remedy="set ansible_become: true for the host (sudo without a password), or log in as root",
        )


def has_no_stale_leftovers(deployment: Deployment, host: Host, facts: HostFacts) -> Iterator[Finding]:
    """No Mooncake or Ascend file in /tmp or /dev/shm is older than the engines that run now."""
    starts = []
    for engine in deployment.engines_on(host.machine):
        running = running_engine(engine, facts)
        if running is not None:
            starts.append(running.api.started)
    oldest = min(starts, default=None)
    for leftover in facts.leftovers.get():
        if oldest is None or leftover.modified < oldest - 2:
            state = "no engine runs" if oldest is None else f"the oldest running engine is {oldest - leftover.modified:.0f} s younger"
            yield Finding(
                target=host.name,
                expected="no stale /tmp/mooncake*, /tmp/transfer_engine*, /dev/shm/mooncake*, /dev/shm/ascend*",
                seen=f"{leftover.path} ({leftover.kind}, {leftover.size} bytes); {state}",
                why="a transfer engine may attach to what a dead one left: segments and sessions that nobody serves",
                remedy=f"stop the engines, remove it (rm -r {leftover.path}), start again",
            )


# What destroys logs in a launch script. A redirect with one '>' onto the engine's log is judged against pd_log.
DESTROYERS = (
    (re.compile(r"\brm\s+(?:-\S+\s+)*\S*(?:ascend/log|plog|/log(?:s)?\b|\.log\b)"), "removes logs"),
    (re.compile(r"\bfind\b.*\b(?:log|plog)\b.*(?:-delete|-exec\s+rm)"), "removes logs"),
    (re.compile(r"\btruncate\b.*(?:log|plog)"), "truncates a log"),
    (re.compile(r"(?:^|[;&|]\s*)(?::|true|cat\s+/dev/null)?\s*>\s*\S*(?:log|plog)\S*\s*$"), "truncates a log"),
)


def launch_script_keeps_the_logs(deployment: Deployment, host: Host, facts: HostFacts) -> Iterator[Finding]:
    """No line of the launch script removes or truncates what the last run logged."""
    if host.launch is None:
        raise NotRun(f"{host.name}: no pd_launch in the inventory")
    if host.launch not in facts.launch:
        raise UnknownFact(f"{host.name}: {host.launch} was not collected")
    script = facts.launch[host.launch].get()
    logs = [engine.log for engine in deployment.engines_on(host.machine) if engine.log]
    for number, line in enumerate(script.splitlines(), start=1):
        code = line.split("#", 1)[0] if line.lstrip().startswith("#") else line
        harm = next((what for pattern, what in DESTROYERS if pattern.search(code)), None) or _overwrites(code, logs)
        if harm:
            yield Finding(
                target=host.name,
                expected="a start script that leaves earlier logs alone",
                seen=f"{host.launch} line {number} {harm}: {line.strip()}",
                why="the evidence of what failed is gone at the very moment the engine is restarted",
                remedy=f"move the logs aside instead (mv … $(date +%s)), and append with '>>'; change line {number}",
            )


def _overwrites(code: str, logs: list[str]) -> str | None:
    """A plain `>` redirect (not `>>`) onto a file in a declared log's folder."""
    for target in re.findall(r"(?<![>&\d])\d?>\s*([^\s>&|;]+)", code):
        folder = target.strip("\"'").rpartition("/")[0]
        if folder and any(log.rpartition("/")[0] == folder for log in logs):
            return "overwrites the engine's log"
    return None
