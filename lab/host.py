"""Pid 1 of a lab host: makes the host's own root from the machine's, starts sshd and what the plan asks for, reaps.

Runs inside fresh pid, mount, uts and ipc namespaces. The root is an overlay whose upper layer lies in memory: whatever the
host writes is gone with it, and can be listed while it lives.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.plan import LOGS, PROXY_SCRIPT, HostPlan
from lab.tools import DOCKER, HCCN_TOOL, NPU_SMI, docker_entry, docker_state, npu_smi_head

PYTHON = Path("/usr/local/python3.11")
LISTENER = Path(__file__).with_name("listener.py").resolve()


def make_root(upper: Path, binds: list[str]) -> Path:
    """Overlay the machine's root into `upper`/root and mount what a root needs, and `binds` (the lab's own code); returns it."""
    root = upper / "root"
    for name in ("upper", "work", "root"):
        (upper / name).mkdir(parents=True, exist_ok=True)
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper}/upper,workdir={upper}/work", str(root))
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("-t", "sysfs", "-o", "ro", "sysfs", str(root / "sys"))  # of this host's network; lscpu needs it too
    _mount("--rbind", "/dev", str(root / "dev"))
    for path in ("tmp", "dev/shm", "run"):
        _mount("-t", "tmpfs", "tmpfs", str(root / path))
    (root / "tmp").chmod(0o1777)
    (root / LOGS.lstrip("/")).mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(upper / "logs"), str(root / LOGS.lstrip("/")))
    for path in binds:
        inside = root / path.lstrip("/")
        if not inside.is_dir() or not any(inside.iterdir()):  # on a file system of its own, or under a folder just covered
            inside.mkdir(parents=True, exist_ok=True)
            _mount("--bind", path, str(inside))
            _mount("-o", "remount,bind,ro", str(inside))
    return root


def _mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


def furnish(plan: HostPlan, keys: dict[str, str]) -> None:
    """Write the host's files; runs inside the new root."""
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{plan.address} {plan.name}\n")
    # A home of its own: the machine's root may have shell start-up files that cost every remote call dearly.
    passwd = Path("/etc/passwd")
    passwd.write_text(re.sub(r"^(root:.*):[^:]*:([^:]*)$", r"\1:/home/root:\2", passwd.read_text(), flags=re.MULTILINE))
    Path("/home/root").mkdir(parents=True, exist_ok=True)
    _relink("/etc/localtime", f"/usr/share/zoneinfo/{plan.zone}")
    for path in ("/etc/timezone",):
        Path(path).unlink(missing_ok=True)  # openEuler has none
    files = {
        "/etc/hccn.conf": "".join(f"address_{d.id}={d.ip}\nnetmask_{d.id}=255.255.0.0\n" for d in plan.devices.values()),
        "/etc/pdlab/settings.json": json.dumps(plan.settings),
        plan.launch: plan.script(),
        "/opt/pd/restart.sh": plan.restart_script(),
        PROXY_SCRIPT: "from lab.proxy import main\n\nmain()\n",
    }
    if plan.proxy_command:
        files["/opt/pd/restart-proxy.sh"] = plan.restart_proxy_script()
    files |= plan.files
    stray = plan.stray_script()
    if stray:
        files["/opt/pd/stray.sh"] = stray
    for path, text in files.items():
        _write(path, text)
    _write("/var/log/pd/.keep", "")
    if plan.emulated:
        _python()
    for package, version in plan.packages.items():
        info = PYTHON / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / f"{package}-{version}.dist-info"
        _write(str(info / "METADATA"), f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    _tools(plan)
    for path in plan.leftovers:
        _write(path, "left by an engine that is no more\n")
        os.utime(path, (time.time() - 86400, time.time() - 86400))
    _sshd(plan, keys)


def _write(path: str, text: str, mode: int = 0o644) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(mode)


def _relink(path: str, target: str) -> None:
    Path(path).unlink(missing_ok=True)
    Path(path).symlink_to(target)


def _python() -> None:
    """A Python prefix of the host's own, as on a vLLM image, that finds the lab's code."""
    version = f"python3.{sys.version_info.minor}"
    _write(str(PYTHON / "pyvenv.cfg"), f"home = {Path(sys.base_prefix) / 'bin'}\ninclude-system-site-packages = false\n")
    site = PYTHON / "lib" / version / "site-packages"
    here = Path(__file__).resolve().parent.parent
    import aiohttp  # the interpreter's own site-packages, wherever they are

    _write(str(site / "lab.pth"), f"{here}\n{Path(aiohttp.__file__).parent.parent}\n")
    (PYTHON / "bin").mkdir(exist_ok=True)
    _relink(str(PYTHON / "bin/python3"), os.path.realpath(sys.executable))
    vllm = f"#!{PYTHON}/bin/python3\nimport sys\n\nfrom lab.engine.serve import main\n\nmain(sys.argv)\n"
    _write(str(PYTHON / "bin/vllm"), vllm, 0o755)


def _tools(plan: HostPlan) -> None:
    tools = {"hccn_tool": HCCN_TOOL, "npu-smi": NPU_SMI, "docker": DOCKER}
    for name, text in tools.items():
        if name not in plan.missing_tools:
            _write(f"/usr/local/bin/{name}", text, 0o755)
    toxiproxy = Path(__file__).resolve().parent.parent / ".cache" / "bin" / "toxiproxy-server"
    if toxiproxy.exists():
        _relink("/usr/local/bin/toxiproxy-server", str(toxiproxy))
    for device in plan.devices.values():
        for query, answer in device.answers().items():
            _write(f"/var/lib/pdlab/hccn/{device.id}/{query}", answer + "\n")
    devices = sorted(plan.devices)
    _write("/var/lib/pdlab/npu-smi.head", npu_smi_head(devices))
    _write("/var/lib/pdlab/devices", " ".join(map(str, devices)) + "\n")
    seats = ""
    for engine in (entry.engine for entry in plan.engines):
        for slot in engine.slots:
            dp = f"_DP{slot.dp_rank}" if engine.dp_size > 1 else ""
            tp = f"_TP{slot.tp_rank}" if engine.tp > 1 else ""
            seats += f"VLLM::Worker{dp}{tp} {slot.device}\n"
    _write("/var/lib/pdlab/seats", seats)


def _sshd(plan: HostPlan, keys: dict[str, str]) -> None:
    _write("/etc/ssh/lab_host_key", keys["host_private"], 0o600)
    _write("/etc/ssh/lab_authorized_keys", keys["client_public"])
    faked = _faketime(plan.clock_offset_s)
    lines = [
        "Port 22", f"ListenAddress {plan.address}", "HostKey /etc/ssh/lab_host_key", "AuthorizedKeysFile /etc/ssh/lab_authorized_keys",
        "UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no", "MaxStartups 200", "MaxSessions 200",
        "UseDNS no", "PrintMotd no", "Subsystem sftp internal-sftp",
        # As on a host whose PATH has the driver's tools.
        "SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" + "".join(f" {k}={v}" for k, v in faked.items()),
    ]  # fmt: skip
    _write("/etc/ssh/lab_sshd_config", "\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    if plan.login_user != "root":
        with Path("/etc/passwd").open("a") as passwd:
            passwd.write(f"{plan.login_user}:x:1500:1500::/tmp:/bin/sh\n")
        with Path("/etc/shadow").open("a") as shadow:
            shadow.write(f"{plan.login_user}:*:19000:0:99999:7:::\n")


def _faketime(offset_s: float) -> dict[str, str]:
    """Environment that shifts a process's clock; raises RuntimeError where libfaketime is not installed."""
    if not offset_s:
        return {}
    library = shutil.which("faketime") and next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if not library:
        raise RuntimeError("a shifted clock needs libfaketime: apt-get install faketime")
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{offset_s:+g}", "FAKETIME_NO_CACHE": "1"}


class Init:
    """Starts and reaps the host's processes."""

    def __init__(self, plan: HostPlan) -> None:
        self.plan = plan
        own = ":".join(plan.path or [f"{PYTHON}/bin"])
        self.env = {"PATH": f"{own}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/root",
                    "PYTHONDONTWRITEBYTECODE": "1", **_faketime(plan.clock_offset_s)}  # fmt: skip
        self.container: int | None = None

    def spawn(self, argv: list[str], log: str = "/dev/null") -> int:
        with Path(log).open("ab") as out:
            return subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True).pid

    def services(self, after_engines: bool) -> None:
        for listener in self.plan.listeners:
            if listener.after_engines == after_engines:
                self.spawn([sys.executable, str(LISTENER), listener.name, listener.address, str(listener.port)])

    def launch(self) -> None:
        """Start the container and, in it, the launch script."""
        enter = (
            'set -e; mkdir -p /run/ct/up /run/ct/work; '
            'mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/ct/up,workdir=/run/ct/work /etc; '
            f'ln -sfn /usr/share/zoneinfo/{self.plan.container_zone} /etc/localtime; '
            + ("mkdir -p /etc/timezone; " if self.plan.timezone_directory else "")
            + f'exec bash {self.plan.launch}'
        )  # fmt: skip
        self.container = self.spawn(["unshare", "--mount", "--propagation", "private", "sh", "-c", enter], "/var/log/pd/container.log")
        self.docker()
        if self.plan.stray_script():
            self.spawn(["bash", "/opt/pd/stray.sh"])

    def docker(self) -> None:
        entries = []
        if self.container is not None:
            ours = self.plan.container
            entries.append(docker_entry(ours.name, ours.image, self.container, ours.network, ours.published, ours.mounts))
        for other in self.plan.other_containers:
            entries.append(docker_entry(other.name, other.image, 0, other.network, other.published, other.mounts))
        _write("/var/lib/pdlab/docker.json", docker_state(entries))

    def proxy(self) -> None:
        if self.plan.proxy_command:
            self.spawn(["bash", "-c", f"exec {self.plan.proxy_command}"], self.plan.proxy_log or "/dev/null")


def main() -> None:
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    plan: HostPlan = pickle.loads(Path(spec["plan"]).read_bytes())
    root = make_root(Path(spec["upper"]), spec["binds"])
    subprocess.run(["hostname", plan.name], check=True)
    os.chroot(root)
    os.chdir("/")
    furnish(plan, spec["keys"])
    init = Init(plan)
    init.docker()
    init.spawn(["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/lab_sshd_config"], "/var/log/sshd.log")
    init.services(after_engines=False)
    print("up", flush=True)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())  # orphans of the host come to pid 1
    _reap()
    for line in sys.stdin:  # the keeper's orders; its end is ours
        order = line.strip()
        {"launch": init.launch, "proxy": init.proxy, "services": lambda: init.services(after_engines=True)}[order]()
        print("done", flush=True)
    while True:
        signal.pause()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
