"""What the lab needs of the machine, and how to get what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

PROGRAMS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "unshare": "util-linux", "nsenter": "util-linux",
            "setpriv": "util-linux", "mount": "mount"}  # fmt: skip


def missing() -> list[str]:
    """One line for each thing that is not there; empty when the lab can be started."""
    if platform.system() != "Linux":
        return [f"the lab needs Linux namespaces; this is {platform.system()}. Use a Linux machine or virtual machine"]
    lines = []
    if os.geteuid() != 0:
        lines.append("root: namespaces, mounts and sshd need it; run it with sudo, or in a container started with --privileged")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)}
    if absent:
        lines.append(f"programs: apt-get install {' '.join(sorted(absent))}")
    if not lines:
        lines += _try_kernel()
    return lines


def _try_kernel() -> list[str]:
    script = ("mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r && "
              "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r && ip link add pdtest0 type veth")  # fmt: skip
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "sh", "-c", script],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if tried.returncode == 0:
        return []
    return [f"the kernel refuses namespaces, overlayfs or veth here: {tried.stderr.strip().splitlines()[-1:] or ['no reason given']}; "
            "in a container, start it with --privileged"]  # fmt: skip
