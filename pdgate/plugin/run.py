"""One run of pdgate inside pytest: what is judged, where its bundle lies, and the facts once they are there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdgate.facts.collect import collect
from pdgate.facts.model import HostFacts
from pdgate.facts.shell import Shells
from pdgate.inventory.connection import ssh_config_text
from pdgate.inventory.model import Deployment
from pdgate.serving.handover import jsonl
from pdgate.serving.record import Record
from pdgate.verdict import CheckResult, Waiver

RUN_KEY = pytest.StashKey["Run"]()
# What the run that saved the facts had judged; requests cannot be judged again from facts.
SAVED_VERDICT = "saved-verdict.json"


@dataclass
class Run:
    """The run's state; a worker of xdist builds the same from the bundle the controller made."""

    deployment: Deployment
    bundle: Path
    phase: str = "after"
    offline: bool = False
    timeout_s: float = 30.0
    waivers: list[Waiver] = field(default_factory=list)
    _facts: dict[str, HostFacts] | None = None

    def saved_results(self) -> dict[tuple[str, str], CheckResult]:
        """By check and target: what the saved run had judged."""
        path = self.bundle / SAVED_VERDICT
        checks = json.loads(path.read_text())["checks"] if path.is_file() else []
        results = [CheckResult.model_validate(check) for check in checks]
        return {(result.id, result.target): result for result in results}

    @property
    def ssh_config(self) -> str:
        return str(self.bundle / "ssh_config")

    @property
    def shells(self) -> Shells:
        return Shells(self.ssh_config, self.timeout_s)

    @property
    def facts(self) -> dict[str, HostFacts]:
        """Facts by machine, as the bundle holds them."""
        if self._facts is None:
            self._facts = load_facts(self.bundle)
        return self._facts

    def collect(self) -> dict[str, HostFacts]:
        """Probe all machines and keep facts and raw output in the bundle."""
        facts, raw = collect(self.deployment, self.shells)
        for machine, found in facts.items():
            (self.bundle / "facts" / f"{found.host}.json").write_text(found.model_dump_json(indent=1))
            (self.bundle / "raw" / f"{found.host}.probe.txt").write_text(raw[machine])
        self._facts = facts
        return facts

    def keep(self, record: Record) -> None:
        """Append a request record to the bundle's requests.jsonl."""
        with (self.bundle / "requests.jsonl").open("a") as out:
            out.write(jsonl(record))

    def save(self) -> None:
        """Lay the bundle out: what a worker, or a later `--hosts=<bundle>`, needs."""
        for folder in ("facts", "raw"):
            (self.bundle / folder).mkdir(parents=True, exist_ok=True)
        (self.bundle / "deployment.json").write_text(self.deployment.model_dump_json(indent=1))
        control = Path.home() / ".cache" / "pdgate" / "ssh"
        control.mkdir(parents=True, exist_ok=True, mode=0o700)
        connections = [host.connection for host in self.deployment.hosts.values()]
        (self.bundle / "ssh_config").write_text(ssh_config_text(connections, str(control)))
        state = {"phase": self.phase, "offline": self.offline, "timeout_s": self.timeout_s}
        state["waivers"] = [waiver.model_dump(mode="json") for waiver in self.waivers]
        (self.bundle / "run.json").write_text(json.dumps(state))


def load_run(bundle: Path) -> Run:
    """The run a bundle was laid out for."""
    state = json.loads((bundle / "run.json").read_text())
    state["waivers"] = [Waiver.model_validate(waiver) for waiver in state["waivers"]]
    return Run(load_bundle_deployment(bundle), bundle, **state)


def is_bundle(path: Path) -> bool:
    return (path / "deployment.json").is_file() and (path / "facts").is_dir()


def load_bundle_deployment(bundle: Path) -> Deployment:
    return Deployment.model_validate_json((bundle / "deployment.json").read_text())


def load_facts(bundle: Path) -> dict[str, HostFacts]:
    """Saved facts by machine."""
    found = [HostFacts.model_validate_json(path.read_text()) for path in sorted((bundle / "facts").glob("*.json"))]
    return {facts.machine: facts for facts in found}
