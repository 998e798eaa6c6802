"""What the chaos tests run inside the lab's network: a shell on a host, one fault of each kind, and everything a fault could leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chaos import phases
from chaos.aim import log_line
from chaos.experiment import Stage, run
from chaos.faults.base import IDENTIFY, Fault, Victim, victims_from
from chaos.faults.host import FewDescriptors, FillDisk, LinkDown, PlantLeftovers
from chaos.faults.network import Partition, Throttle, Toxic
from chaos.faults.ports import OccupyPorts
from chaos.faults.processes import Kill, Stall
from chaos.faults.storms import Storm
from chaos.guard import GuardFailed, Hand, clean_up, leftovers
from chaos.injection import STEPS, NotApplied, injected
from chaos.lock import Held, drop, holder, refuse_the_living, take, this_run
from chaos.single import hit
from lab.control import Lab
from pdgate.deployment import open_deployment
from pdgate.facts.model import UnknownFact
from pdgate.facts.shell import Shells
from pdgate.inventory.connection import ssh_config_text
from pdgate.serving.questions import deadline_of, golden_of, model_of

__all__ = [
    "IDENTIFY",
    "KINDS",
    "STEPS",
    "GuardFailed",
    "Held",
    "Kill",
    "NotApplied",
    "Partition",
    "Stall",
    "Toxic",
    "UnknownFact",
    "a_fault",
    "clean_up",
    "drop",
    "hand_of",
    "hit",
    "holder",
    "injected",
    "leftovers",
    "log_line",
    "phases",
    "refuse_the_living",
    "replace",
    "run",
    "stage_of",
    "state_of",
    "take",
    "this_run",
    "unlock",
    "victims_from",
]  # fmt: skip
KINDS = ("occupy", "partition", "toxic", "stall", "leftovers", "descriptors", "link", "storm", "disk", "throttle")


def hand_of(lab: Lab, folder: Path, host: str = "d0") -> Hand:
    deployment = open_deployment(lab.inventory)
    config = folder / "ssh_config"
    config.write_text(ssh_config_text([one.connection for one in deployment.hosts.values()], str(folder)))
    return Hand(deployment.hosts[host], Shells(str(config)))


def stage_of(lab: Lab, folder: Path) -> Stage:
    """What chaos/conftest.py makes of a deployment, without pytest."""
    deployment = open_deployment(lab.inventory)
    shells = hand_of(lab, folder).shells
    wish = deployment.front_host.load.model_copy(update={"rate": 10})
    book = golden_of(deployment, model_of(deployment), wish.output_tokens)
    return Stage(deployment, shells, folder, deployment.proxies[0], book, wish, deadline_of(deployment), 5.0, this_run("pdgate-test"))


def unlock(stage: Stage) -> None:
    for host in stage.deployment.hosts:
        drop(stage.hand(host), stage.owner)


def a_fault(kind: str, hand: Hand, tag: str) -> Fault:
    def victims(comm: str) -> tuple[Victim, ...]:
        pids = hand.must(f"grep -l '^{comm}' /proc/[0-9]*/comm | cut -d/ -f3 | tail -n1", "no such process").split()
        return tuple(victims_from(hand.must(IDENTIFY.format(pids=" ".join(pids)), "not identified")))

    address = str(hand.host.address)
    return {
        "occupy": lambda: OccupyPorts("d0", address, (28900, 28901), tag),
        "partition": lambda: Partition("d0", ("10.77.0.11",), tag, 30, must_meet=False),
        "toxic": lambda: Toxic("d0", address, (7003,), tag, "latency", {"latency": 200}, must_meet=False),
        "stall": lambda: Stall("d0/dp3", "d0", "core", victims(b"VLLM::EngineCore_DP3"[:15].decode())),
        "leftovers": lambda: PlantLeftovers("d0", ("/tmp/mooncake_chaos", "/dev/shm/mooncake_chaos")),
        "descriptors": lambda: FewDescriptors("d0/dp3", "d0", victims(b"VLLM::EngineCore_DP3"[:15].decode()), tag),
        "throttle": lambda: Throttle("d0", ("10.77.0.11",), tag, 1000, (7000,)),
        "storm": lambda: Storm("d0", address, 22, 20, tag),
        "disk": lambda: FillDisk("d0", "/var/log/pd"),
        "link": lambda: LinkDown("d0", 3),
    }[kind]()


STATE = "echo \"$(nft list tables; ls -d /var/lib/pdgate /tmp/mooncake_chaos /dev/shm/mooncake_chaos /var/log/pd/.pdgate-fill /etc/cron.d/pdgate-guard 2>/dev/null; grep -l storm.py /proc/[0-9]*/cmdline; cat /proc/net/tcp | awk '$4==\\\"0A\\\"{print $2}' | sort; for p in /proc/[0-9]*; do s=$(cat $p/stat 2>/dev/null); s=${s##*) }; case $s in T*) echo stopped $p;; esac; done; hccn_tool -i 3 -link -g; for p in $(grep -l '^VLLM::EngineCore_DP3' /proc/[0-9]*/cmdline | cut -d/ -f3); do prlimit --pid $p --nofile --output SOFT --noheadings; done)\""


def state_of(hand: Hand) -> str:
    """Everything a fault could leave: rules, files, listeners, stopped processes, links, limits."""
    return hand.must(STATE, "the state could not be read")
