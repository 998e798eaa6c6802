"""The engine that really runs where one is declared: its process tree, arguments and environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pdgate.facts.model import HostFacts, Listener, Process, UnknownFact
from pdgate.facts.parse.vllm_args import inner_connector, kv_transfer_config, parse_serve_args
from pdgate.inventory.model import Engine
from pdgate.rules.finding import NotRun

PERMISSION = "the owner of a socket is not visible; the probe needs root on the host (ansible_become: true)"


@dataclass(frozen=True)
class RunningEngine:
    """What serves the declared HTTP port of an engine."""

    engine: Engine
    facts: HostFacts
    api: Process
    pids: set[int] = field(default_factory=set)

    @cached_property
    def args(self) -> dict[str, str]:
        """Arguments of the `vllm serve` the API process or one of its ancestors is; raises UnknownFact."""
        for process in self.facts.lineage(self.api.pid):
            args = parse_serve_args(process.argv)
            if args is not None:
                return args
        raise UnknownFact(f"{self.engine.name}: no 'vllm serve' command line at pid {self.api.pid} or above: {self.api.command}")

    @cached_property
    def kv_config(self) -> dict[str, Any]:
        try:
            return inner_connector(kv_transfer_config(self.args))
        except ValueError as error:
            raise UnknownFact(f"{self.engine.name}: --kv-transfer-config cannot be read: {error}") from None

    @cached_property
    def environment(self) -> dict[str, str]:
        """The engine's environment as it was started with; raises UnknownFact where the probe could not read it."""
        known = {process.pid: process for process in self.facts.engine_processes.get()}
        # The API process first: retitled workers overwrite part of theirs.
        for pid in [self.api.pid, *sorted(self.pids)]:
            if pid in known and known[pid].readable:
                return known[pid].environment
        raise UnknownFact(f"{self.engine.name}: the environment of pid {self.api.pid} could not be read; {PERMISSION}")

    @cached_property
    def mntns(self) -> str | None:
        known = {process.pid: process for process in self.facts.engine_processes.get()}
        return known[self.api.pid].mntns if self.api.pid in known else None

    @cached_property
    def versions(self) -> dict[str, str]:
        """Installed versions: what the probe saw, else what the inventory declares. Keys as in `pd_versions`."""
        versions = dict(self.engine.versions)
        root = self.facts.roots.get().get(self.mntns or "")
        for package, version in (root.packages if root else {}).items():
            if package in ("vllm", "vllm_ascend"):
                versions[package] = version
            elif package.startswith("mooncake"):
                versions["mooncake"] = version
        return versions


def listeners_on(facts: HostFacts, port: int) -> list[Listener]:
    return [listener for listener in facts.listeners.get() if listener.port == port]


def owner_of(facts: HostFacts, listener: Listener) -> Process:
    """The process behind a listener; raises UnknownFact where it cannot be seen."""
    process = facts.process(listener.pid) if listener.pid is not None else None
    if process is None:
        raise UnknownFact(f"port {listener.port}: {PERMISSION}")
    return process


def running_engine(engine: Engine, facts: HostFacts) -> RunningEngine | None:
    """Find the engine by who holds its HTTP port; None where nobody does. Raises UnknownFact."""
    if engine.http_port is None:
        raise UnknownFact(f"{engine.name}: no pd_http_port in the inventory, so its processes cannot be found")
    listeners = listeners_on(facts, engine.http_port)
    if not listeners:
        return None
    api = owner_of(facts, listeners[0])
    return RunningEngine(engine, facts, api, facts.descendants(api.pid))


def need_running(engine: Engine, facts: HostFacts) -> RunningEngine:
    """The running engine; raises NotRun where there is none, since `engines.running` reports that."""
    running = running_engine(engine, facts)
    if running is None:
        raise NotRun(f"{engine.name} is not running (see check engines.running)")
    return running


def describe(facts: HostFacts, process: Process) -> str:
    """A process as an operator would name it: pid, command, container, and whether it lost its parent."""
    words = f"pid {process.pid} '{process.command[:100]}'"
    container = facts.container_of(process.pid)
    if container:
        words += f" in container {container.name}"
    if process.comm.startswith("VLLM::") and process.ppid == 1:
        words += " (orphaned: its API server is gone)"
    return words
