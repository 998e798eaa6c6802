"""Measures the lab and an acceptance run on this machine: python -m benchmarks.lab [--rounds 3]

Boot time and memory of the lab, time of a whole acceptance run, and one probe (everything, one remote exec) beside
testinfra's own socket check of an eight-port group (one remote exec a port, no owner), both over the same ssh with a
warm ControlMaster and without one. Prints medians with the range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import testinfra

from lab.control import Lab, start
from pdgate.deployment import open_deployment
from pdgate.facts.collect import collect
from pdgate.facts.shell import Shells
from pdgate.inventory.connection import ssh_config_text

ROOT = Path(__file__).resolve().parent.parent


def show(what: str, values: list[float], unit: str) -> None:
    print(f"{what:<58} {statistics.median(values):8.2f} {unit:<4} ({min(values):.2f} - {max(values):.2f}, n={len(values)})", flush=True)


def timed(action: Callable[[], object]) -> float:
    start_time = time.perf_counter()
    action()
    return time.perf_counter() - start_time


def pss_mb(root: int) -> float:
    """Proportional memory of a process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    total = 0
    for pid in family:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")))
    return total / 1024


def acceptance() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "--hosts=lab", f"--bundle={folder}/b", "-q", "-p", "no:cacheprovider"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def compare_probe(lab: Lab, rounds: int) -> None:
    lab.join()
    deployment = open_deployment(lab.inventory)
    with tempfile.TemporaryDirectory() as folder:
        for label, persist in (("warm ssh", "60"), ("new ssh each time", "0")):
            config = Path(folder) / f"ssh_config_{persist}"
            text = ssh_config_text([host.connection for host in deployment.hosts.values()], folder)
            if persist == "0":
                text = text.replace("ControlMaster auto", "ControlMaster no").replace("  ControlPath ", "  #ControlPath ")
            config.write_text(text)
            shells = Shells(str(config))
            collect(deployment, shells)
            probe = [timed(lambda shells=shells: collect(deployment, shells)) for _ in range(rounds)]  # type: ignore[misc]
            show(f"probe, 2 machines, everything, {label}", probe, "s")
            host = testinfra.get_host(f"ssh://p0?ssh_config={config}&controlpersist=0")

            def eight_ports(host: testinfra.host.Host = host) -> None:
                assert all(host.socket(f"tcp://10.77.0.11:{port}").is_listening for port in range(28000, 28008))

            eight_ports()
            show(f"testinfra, 1 machine, 8 ports without owner, {label}", [timed(eight_ports) for _ in range(rounds)], "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    boots, memory = [], []
    for _ in range(rounds):
        lab = start("lab", [])
        boots.append(lab.seconds)
        memory.append(pss_mb(lab.pid))
        lab.stop()
    show("lab boot, p0 and d0, 8 engines, 16 workers, proxy", boots, "s")
    show("lab memory (PSS)", memory, "MB")
    show("acceptance run, lab boot included", [timed(acceptance) for _ in range(rounds)], "s")
    show(
        "set-up that finds everything done",
        [timed(lambda: subprocess.run(["make", "-s", "setup"], cwd=ROOT, check=True)) for _ in range(rounds)],
        "s",
    )
    lab = start("lab", [])
    try:
        compare_probe(lab, rounds)
    finally:
        lab.stop()


if __name__ == "__main__":
    main()
