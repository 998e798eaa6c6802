"""/proc tables: sockets with their owners, processes, engine processes with their environment."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct

from pdgate.facts.model import EngineProcess, Identity, Listener, PortSettings, Process, Root
from pdgate.facts.parse import ParseError

LISTEN = "0A"


def parse_identity(text: str) -> Identity:
    pairs = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    try:
        # In the host's own clock, whatever it is set to: now minus uptime, finer than btime's whole seconds.
        now, uptime = pairs["uptime"].replace(".%N", "").split()[:2]
        return Identity(
            uid=int(pairs["uid"]), hostname=pairs["hostname"], kernel=pairs["kernel"], boot_id=pairs["boot_id"],
            boot_time=float(now) - float(uptime), hz=int(pairs["hz"]), netns=pairs.get("netns", ""), mntns=pairs.get("mntns", ""),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ParseError(f"identity: {error}") from None


def parse_tcp(text: str, owners: dict[int, list[int]], netns: str | None = None) -> list[Listener]:
    """Listening sockets of /proc/net/tcp and tcp6; `owners` maps a socket's inode to pids."""
    listeners = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or not fields[0].endswith(":"):
            continue
        if fields[3] != LISTEN:
            continue
        address, port = fields[1].split(":")
        inode = int(fields[9])
        pids = owners.get(inode, [])
        listeners.append(
            # Forked servers share a socket; the lowest pid is the one that opened it, as a rule.
            Listener(address=_address(address), port=int(port, 16), inode=inode, pid=min(pids, default=None), netns=netns)
        )
    return listeners


def _address(text: str) -> str:
    """`0B004D0A` or 32 hex digits, in host byte order by 32-bit words (little-endian machines)."""
    words = [struct.pack("<I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    raw = b"".join(words)
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw)
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def parse_owners(text: str) -> dict[int, list[int]]:
    """`ls -l /proc/[0-9]*/fd` to socket inode -> pids."""
    owners: dict[int, list[int]] = {}
    pid = 0
    for line in text.splitlines():
        header = re.fullmatch(r"/proc/(\d+)/fd:", line.strip())
        if header:
            pid = int(header[1])
            continue
        found = re.search(r"socket:\[(\d+)\]", line)
        if found and pid:
            pids = owners.setdefault(int(found[1]), [])
            if pid not in pids:
                pids.append(pid)
    return owners


def parse_processes(stats: str, cmdlines: str, identity: Identity) -> list[Process]:
    """`cat /proc/*/stat` (comm may hold blanks and brackets) joined with `grep '' /proc/*/cmdline`."""
    argvs: dict[int, list[str]] = {}
    for line in cmdlines.split("\n"):
        found = re.match(r"/proc/(\d+)/cmdline:(.*)", line)
        if found:
            # Retitled processes pad their title with NULs.
            argvs[int(found[1])] = found[2].rstrip("\x01").split("\x01")
    processes = []
    for line in stats.splitlines():
        found = re.match(r"(\d+) \((.*)\) (\S) (.*)", line)
        if not found:
            continue
        rest = found[4].split()
        pid = int(found[1])
        processes.append(
            Process(
                pid=pid,
                ppid=int(rest[0]),
                comm=found[2],
                state=found[3],
                argv=argvs.get(pid, []),
                started=identity.boot_time + int(rest[18]) / identity.hz,
            )
        )
    if not processes:
        raise ParseError("no process in /proc/*/stat")
    return processes


def parse_engines(text: str) -> tuple[list[EngineProcess], dict[str, Root], dict[str, str]]:
    """The `engines` section: processes, mount namespaces by id, and raw tcp tables by foreign network namespace."""
    processes: list[dict[str, object]] = []
    roots: dict[str, dict[str, object]] = {}
    tables: dict[str, list[str]] = {}
    environment: dict[str, str] = {}
    for line in text.splitlines():
        tag, _, rest = line.partition(" ")
        if tag == "@pid":
            pid, mnt, net, exe = ([*rest.split(" ", 3), ""])[:4]
            environment = {}
            processes.append({"pid": int(pid), "mntns": mnt, "netns": net, "exe": exe, "cgroup": "", "environment": environment})
            roots.setdefault(mnt, {"packages": {}})
        elif tag == "@denied":
            processes.append({"pid": int(rest), "mntns": "", "netns": "", "exe": "", "cgroup": "", "readable": False})
        elif tag == "@cgroup" and processes:
            path = rest.rpartition(":")[2]
            processes[-1]["cgroup"] = max(str(processes[-1]["cgroup"]), path, key=len)
        elif tag == "@env":
            key, _, value = rest.partition("=")
            environment[key] = value
        elif tag == "@zone":
            mnt, _, offset = rest.partition(" ")
            roots[mnt]["utc_offset"] = offset
        elif tag == "@timezone-directory":
            roots[rest]["timezone_is_directory"] = True
        elif tag == "@hccn-conf":
            roots[rest]["has_hccn_conf"] = True
        elif tag == "@package":
            mnt, _, info = rest.partition(" ")
            name, _, version = info.removesuffix(".dist-info").rpartition("-")
            packages = roots[mnt]["packages"]
            assert isinstance(packages, dict)
            packages[name.lower().replace("-", "_")] = version
        elif tag == "@tcp":
            net, _, row = rest.partition(" ")
            tables.setdefault(net, []).append(row)
    return (
        [EngineProcess.model_validate(process) for process in processes],
        {mnt: Root.model_validate(root) for mnt, root in roots.items()},
        {net: "\n".join(rows) for net, rows in tables.items()},
    )


def parse_port_settings(text: str) -> PortSettings:
    pairs = {line.split(" ", 1)[0]: line.split(" ", 1)[1].strip() for line in text.splitlines() if " " in line}
    numbers = pairs.get("ephemeral", "").split()
    if len(numbers) != 2:
        raise ParseError(f"ip_local_port_range reads {pairs.get('ephemeral')!r}")
    reserved = []
    for part in pairs.get("reserved", "").split(","):
        if part.strip():
            first, _, last = part.strip().partition("-")
            reserved.append((int(first), int(last or first)))
    return PortSettings(ephemeral=(int(numbers[0]), int(numbers[1])), reserved=reserved)


def parse_addresses(text: str) -> dict[str, list[str]]:
    """`ip -o addr show` to interface -> addresses."""
    addresses: dict[str, list[str]] = {}
    for line in text.splitlines():
        found = re.match(r"\d+:\s+(\S+)\s+inet6?\s+([0-9a-fA-F.:]+)", line)
        if found:
            addresses.setdefault(found[1].split("@")[0], []).append(found[2])
    if not addresses:
        raise ParseError("no address in the output of 'ip -o addr'")
    return addresses
