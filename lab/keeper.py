"""The process that holds a lab: its own network and mounts, one child per host. When it ends, everything is gone.

Reads one JSON line of orders on stdin, answers one JSON line when the lab is up (or cannot be), and then waits. With
`keep` it goes on without its parent; otherwise the kernel kills it when the parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import requests
import yaml

from lab.defects.registry import Defect, find_defects
from lab.plan import LOGS, HostPlan, LabPlan
from pdgate.deployment import open_deployment
from pdgate.inventory.model import Engine

CLONE_NEWNS, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x00020000, 0x40000000, 1
DIR = Path("/run/pdlab")
SSHD_S, PROXY_S = 20.0, 60.0
BRIDGE = "pdlab0"
LOG_DISK = "64m"


class LabError(Exception):
    """The lab cannot be started; the message says why."""


def enter_own_namespaces() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        raise LabError(f"unshare: {os.strerror(ctypes.get_errno())}")
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    DIR.mkdir()


def run(*argv: str, stdin: str | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, input=stdin)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def write_inventory(source: Path, defects: list[Defect], pid: int) -> Path:
    """The lab's inventory as defects changed it, with this run's keys beside it."""
    inventory = yaml.safe_load(source.read_text())
    for defect in defects:
        defect.edit(inventory)
    outside = Path(f"/proc/{pid}/root{DIR}")
    inventory["all"].setdefault("vars", {}).update({
        "ansible_ssh_private_key_file": f"{outside}/key",
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={outside}/known_hosts -o ControlPath={outside}/cm-%C",
    })  # fmt: skip
    # One file: ansible follows links, and /proc/PID/root is one, so that a group_vars beside it would not be found.
    path = DIR / source.name
    path.write_text(yaml.safe_dump(inventory, sort_keys=False))
    return path


def make_keys(plan: LabPlan) -> dict[str, str]:
    for name in ("key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(DIR / name))
    host_public = " ".join((DIR / "host_key.pub").read_text().split()[:2])
    known = "".join(f"{host.address} {host_public}\n" for host in plan.hosts.values())
    (DIR / "known_hosts").write_text(known)
    return {"client_public": (DIR / "key.pub").read_text(), "host_private": (DIR / "host_key").read_text()}


def make_network(plan: LabPlan) -> None:
    """A bridge here, a network namespace with one veth for each host. All of it lives and dies with this process."""
    prefix = next(iter(plan.hosts.values())).address.rpartition(".")[0]
    lines = ["link set lo up", f"link add {BRIDGE} type bridge", f"addr add {prefix}.1/24 dev {BRIDGE}", f"link set {BRIDGE} up"]
    for index, name in enumerate(plan.hosts):
        run("ip", "netns", "add", name)
        lines += [f"link add v{index} type veth peer name eth0 netns {name}", f"link set v{index} master {BRIDGE} up"]
    run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")
    for name, host in plan.hosts.items():
        inside = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up", f"route add default via {prefix}.1"]
        run("ip", "-n", name, "-batch", "-", stdin="\n".join(inside) + "\n")


class HostProcess:
    """A running lab host and the pipe its init takes orders from."""

    def __init__(self, plan: HostPlan, keys: dict[str, str]) -> None:
        self.plan = plan
        self.upper = DIR / "hosts" / plan.name
        self.upper.mkdir(parents=True)
        (self.upper / "logs").mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={LOG_DISK}", "tmpfs", str(self.upper / "logs"))  # a file system of its own, which may fill up
        (self.upper / "plan").write_bytes(pickle.dumps(plan))
        spec = {"plan": str(self.upper / "plan"), "upper": str(self.upper), "keys": keys, "binds": own_code()}
        (self.upper / "spec.json").write_text(json.dumps(spec))
        (self.upper / "spec.json").chmod(0o600)
        argv = ["nsenter", f"--net=/run/netns/{plan.name}", "setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount", "--uts",
                "--ipc", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", "lab.host", str(self.upper / "spec.json")]  # fmt: skip
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        with (self.upper / "init.log").open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True)

    def wait_for(self, word: str) -> None:
        assert self.process.stdout
        if self.process.stdout.readline().strip() != word:
            lines = (self.upper / "init.log").read_text().strip().splitlines()
            raise LabError(f"lab host {self.plan.name} did not come up: {lines[-1] if lines else 'no reason given'}")

    def order(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.wait_for("done")

    def log_path(self, log: str | None) -> Path:
        """Where a log of the host lies, seen from here."""
        inside = (log or "/nowhere").removeprefix(f"{LOGS}/")
        return self.upper / "upper" / inside.lstrip("/") if inside.startswith("/") else self.upper / "logs" / inside

    def last_line(self, log: str | None) -> Callable[[], str]:
        """Reads the last line of a log of the host when called."""

        def read() -> str:
            path = self.log_path(log)
            lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
            return lines[-1][:300] if lines else f"(no {log})"

        return read

    def failed_to_start(self, engine: Engine) -> bool:
        """Whether the engine has said that it will not come up."""
        log = self.log_path(engine.log)
        return log.is_file() and "failed to start" in log.read_text(errors="replace")


def own_code() -> list[str]:
    """Folders the lab's programs run from; outermost first."""
    return sorted({str(path) for path in (Path(__file__).resolve().parent.parent, Path(sys.prefix), Path(sys.base_prefix))})


def boot(plan: LabPlan) -> list[HostProcess]:
    keys = make_keys(plan)
    make_network(plan)
    hosts = [HostProcess(host, keys) for host in plan.hosts.values()]
    for host in hosts:
        host.wait_for("up")
    for host in hosts:
        _wait(partial(_accepts, host.plan.address, 22), f"sshd of {host.plan.name}", SSHD_S)
    if not plan.with_engines:
        return hosts
    serves_p = [host for host in hosts if any(entry.engine.serves_prefill for entry in host.plan.engines)]
    rest = [host for host in hosts if host not in serves_p and host.plan.engines]
    for group in (serves_p, rest) if plan.prefill_first else (rest, serves_p):
        for host in group:
            host.order("launch")
        if plan.prefill_first:
            _wait_engines(plan, group)
    _wait_engines(plan, hosts)
    for host in hosts:
        host.order("services")
        host.order("proxy")
    for host in hosts:
        if host.plan.proxy_port:
            ready = partial(_accepts, host.plan.address, host.plan.proxy_port)
            _wait_or_go_on(plan, ready, f"the proxy on {host.plan.name}", PROXY_S, host.last_line(host.plan.proxy_log))
    return hosts


def _wait_engines(plan: LabPlan, hosts: list[HostProcess]) -> None:
    for host in hosts:
        for entry in host.plan.engines:
            if entry.started:
                engine = entry.engine
                _wait_or_go_on(plan, partial(_settled, host, engine), f"engine {engine.name}", plan.up_within_s, host.last_line(engine.log))
                if plan.warm_up and _accepts(host.plan.address, engine.http_port):
                    _warm_up(f"http://{host.plan.address}:{engine.http_port}", str(engine.model), plan.up_within_s)


def _settled(host: HostProcess, engine: Engine) -> bool:
    return _accepts(host.plan.address, engine.http_port) or host.failed_to_start(engine)


def _wait_or_go_on(plan: LabPlan, ready: Callable[[], bool], what: str, seconds: float, last_line: Callable[[], str]) -> None:
    try:
        _wait(ready, what, seconds)
    except LabError as error:
        if not plan.tolerate_down:
            raise LabError(f"{error}; its log ends: {last_line()}") from None


def _warm_up(url: str, model: str, seconds: float) -> None:
    """The first forward of a real engine on this machine takes seconds; requests that are measured come later."""
    body = {"model": model, "prompt": "warm up", "max_tokens": 3, "temperature": 0}
    requests.post(f"{url}/v1/completions", json=body, timeout=seconds)


def _accepts(address: str, port: int | None) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((address, port or 0)) == 0


def _wait(ready: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(f"{what} did not come up within {seconds:g} s")
        time.sleep(0.02)


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != orders["parent"]:
        sys.exit("the parent is gone")
    start = time.monotonic()
    try:
        enter_own_namespaces()
        defects = find_defects(orders["defects"])
        inventory = write_inventory(Path(orders["inventory"]), defects, os.getpid())
        module, _, function = orders["planner"].partition(":")
        plan: LabPlan = getattr(importlib.import_module(module), function)(open_deployment(str(inventory)))
        plan.with_engines = orders["phase"] == "after"
        for name, values in orders.get("settings", {}).items():
            for host in plan.hosts.values():
                host.settings.setdefault(name, {}).update(values)
        for defect in defects:
            defect.change(plan)
        hosts = boot(plan)
    except (LabError, KeyError, ValueError, RuntimeError, OSError, requests.exceptions.RequestException) as error:
        print(json.dumps({"error": str(error.args[0] if isinstance(error, KeyError) else error)}), flush=True)
        return
    answer = {"pid": os.getpid(), "inventory": f"/proc/{os.getpid()}/root{inventory}", "seconds": round(time.monotonic() - start, 2),
              "hosts": [host.plan.name for host in hosts], "defects": orders["defects"]}  # fmt: skip
    if orders["keep"]:  # nobody knows of it before; a boot whose parent was killed ends with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    print(json.dumps(answer), flush=True)
    if orders["keep"]:
        with Path(os.devnull).open("r+b") as null:
            for stream in (0, 1, 2):
                os.dup2(null.fileno(), stream)
    signal.pause()


if __name__ == "__main__":
    assert shutil.which("ip"), "iproute2 is not installed"
    main()
