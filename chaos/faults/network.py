"""Partition by nftables, and Toxiproxy put into the path of a running deployment by an nftables redirect, on the faulted host.

A partition's elements carry a timeout of the kernel: even where everything of ours is dead, the kernel heals it.
Host rules see TCP of the host only. RoCE traffic between NPUs goes past them: such a plan says so, and is refused for the data path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chaos.faults.base import CUT, Plan, quiet_port
from pdgate.facts.model import HostFacts

TOXICS = ("latency", "bandwidth", "timeout", "reset_peer", "slicer", "limit_data", "slow_close")
API_PORT = 18474
FIRST_LISTEN = 18500
DRAIN_S = 8
SYN = "tcp flags & (syn | ack) == syn"
KEPT = "no new connection came to it while it stood, and those that stood before go past it"
RENEW_S = 3  # under load, for standing connections to be used, reset, and come back
NEEDS_NFT = "command -v nft >/dev/null || { echo 'no nft on the host'; exit 1; }"


def table(tag: str) -> str:
    return f"pdgate_{tag.replace('-', '_')}"


def few(ports: tuple[int, ...]) -> str:
    """Ports in a sentence; the guard's script has all of them."""
    return ", ".join(map(str, ports[:4])) + (f" and {len(ports) - 4} more" if len(ports) > 4 else "")


def standing(ports: Iterable[int], states: str = "01") -> str:
    """sh: this host's TCP connections to these ports of its own in these states (kernel's numbers, 01: established), a line each."""
    return f"cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -E ': [0-9A-F]+:({'|'.join(f'{port:04X}' for port in ports)}) [0-9A-F]+:[0-9A-F]+ {states}'"


def _nft(rules: list[str]) -> str:
    """sh: give the kernel these rules, all or none."""
    return f"{NEEDS_NFT}\nnft -f - <<'NFT'\n" + "\n".join(rules) + "\nNFT"


def _drop(family: str, tag: str) -> str:
    return f"nft delete table {family} {table(tag)} 2>/dev/null; true"


def _dropped(family: str, tag: str, what: str) -> str:
    return f"! nft list table {family} {table(tag)} >/dev/null 2>&1 || {{ echo 'the {what} is still there'; exit 1; }}"


def _met(family: str, tag: str, rule: str = "", nobody: str = "no packet came to the rule while it stood") -> str:
    """sh: how many packets the rules of the table (those with a word) have met; ends with 1 where none."""
    count = f"nft list table {family} {table(tag)} 2>/dev/null | grep '{rule}' | grep -o 'packets [0-9]*' | awk '{{s += $2}} END {{print s + 0}}'"
    return f"met=$({count}); [ \"$met\" -gt 0 ] && echo \"$met packets met it\" || {{ echo '{nobody}'; exit 1; }}"


@dataclass(frozen=True)
class Partition:
    """`host` and `peers` do not reach each other over TCP: inbound, outbound or both, for all ports or some.

    Packets are dropped, as by a cut cable; with `refuse` they are answered with a reset, as by a dead process; with `first` only that
    many new connections are refused (inbound), and all later ones let through.
    """

    host: str
    peers: tuple[str, ...]  # addresses
    tag: str
    seconds: int
    direction: str = "both"  # in, out, both
    ports: tuple[int, ...] = ()  # of the host; none: all but ssh and
    but: tuple[int, ...] = ()  # these, on either side
    refuse: bool = False
    first: int | None = None
    must_meet: bool = True  # a cut nobody came to is no fault

    @property
    def name(self) -> str:
        return f"refuse-{self.first or 'all'}" if self.refuse else f"partition-{self.direction}"

    def available(self, facts: HostFacts) -> str | None:
        if not self.peers:
            return "no peer address is known to be cut off"
        if self.first is not None and (not self.refuse or self.direction != "in"):
            return "only inbound connections can be refused by number"
        return None

    def plan(self) -> Plan:
        way = {"in": "from", "out": "to", "both": "from and to"}[self.direction]
        which = f"ports {few(self.ports)}" if self.ports else f"all ports but {', '.join(['ssh', *map(str, self.but)])}"
        verb = f"refuses the first {self.first} connections" if self.first else "resets TCP" if self.refuse else "drops TCP"
        return Plan(f"{self.host} {verb} {way} {', '.join(self.peers)} ({which})", "the host's TCP: HTTP and the side channel; not RoCE between NPUs", _drop("inet", self.tag))

    def inject(self) -> str:
        elements = ", ".join(f"{peer} timeout {self.seconds}s" for peer in self.peers)
        ports, spared = ", ".join(map(str, self.ports)), ", ".join(map(str, sorted({22, *self.but})))
        others = f"tcp dport != {{ {spared} }} tcp sport != {{ {spared} }}"
        port_in = f"tcp dport {{ {ports} }}" if ports else others
        port_out = f"tcp sport {{ {ports} }}" if ports else others
        name, act = table(self.tag), "counter reject with tcp reset" if self.refuse else "counter drop"
        if self.first is not None:  # by their bytes: a SYN is 60 of them on every Linux with timestamps, 52 without; a little more than the last is still less than one more
            port_in, act = f"{port_in} {SYN}", f"quota until {60 * self.first + 20} bytes {act}"
        rules = [f"add table inet {name}", f"add set inet {name} peers {{ type ipv4_addr; flags timeout; }}"]
        if self.direction in ("in", "both"):
            rules += [f"add chain inet {name} in {{ type filter hook input priority -150; }}", f"add rule inet {name} in ip saddr @peers {port_in} {act}"]
        if self.direction in ("out", "both"):
            rules += [f"add chain inet {name} out {{ type filter hook output priority -150; }}", f"add rule inet {name} out ip daddr @peers {port_out} {act}"]
        rules.append(f"add element inet {name} peers {{ {elements} }}")
        return _nft(rules)

    def verify_applied(self) -> str:
        checks = " && ".join(f"nft list set inet {table(self.tag)} peers | grep -q '{peer} '" for peer in self.peers)
        return f"{checks} && echo 'the kernel holds the rule' || {{ echo 'the rule is not there'; exit 1; }}"

    def met(self) -> str:
        return _met("inet", self.tag) if self.must_meet else "true"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return _dropped("inet", self.tag, "rule")


@dataclass(frozen=True)
class Throttle:
    """TCP between `host` and `peers` beside some ports is slowed to `kbytes_s`, also on connections that stand: it keeps a transfer open."""

    host: str
    peers: tuple[str, ...]  # addresses
    tag: str
    kbytes_s: int
    but: tuple[int, ...]  # ports, on either side, that are left alone; ssh always is

    @property
    def name(self) -> str:
        return "throttle"

    def available(self, facts: HostFacts) -> str | None:
        return None if self.peers else "no peer address is known to be slowed"

    def plan(self) -> Plan:
        return Plan(f"{self.host} exchanges at most {self.kbytes_s} KB/s with {', '.join(self.peers)}", "the host's TCP beside HTTP and side channel", _drop("inet", self.tag))

    def inject(self) -> str:
        name, ports, peers = table(self.tag), ", ".join(map(str, sorted({22, *self.but}))), ", ".join(self.peers)
        over = f"tcp dport != {{ {ports} }} tcp sport != {{ {ports} }} limit rate over {self.kbytes_s} kbytes/second burst {max(64, self.kbytes_s // 8)} kbytes counter drop"
        rules = [
            f"add table inet {name}",
            f"add chain inet {name} in {{ type filter hook input priority -150; }}", f"add rule inet {name} in ip saddr {{ {peers} }} {over}",
            f"add chain inet {name} out {{ type filter hook output priority -150; }}", f"add rule inet {name} out ip daddr {{ {peers} }} {over}",
        ]  # fmt: skip
        return _nft(rules)

    def verify_applied(self) -> str:
        return f"nft list table inet {table(self.tag)} | grep -q 'limit rate over' && echo 'the kernel holds the limit' || {{ echo 'the limit is not there'; exit 1; }}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return _dropped("inet", self.tag, "limit")


@dataclass(frozen=True)
class Toxic:
    """A Toxiproxy toxic on TCP ports of a running host: new connections to the ports go through it, standing ones do not.

    Connectors keep theirs for ever (ZMQ sockets of vllm-ascend, the pool of Mooncake's tcp transport). With `renew` Toxiproxy is put
    into the path first, hurting nobody, the standing ones are reset, and the toxic comes once they came back through it.
    """

    host: str
    address: str
    ports: tuple[int, ...]
    tag: str
    toxic: str
    attributes: dict[str, int] = field(default_factory=dict)
    path: str = "HTTP"
    server: str = "toxiproxy-server"
    stream: str = "downstream"
    must_meet: bool = True
    renew: bool = False

    @property
    def name(self) -> str:
        return f"toxic-{self.toxic}"

    def available(self, facts: HostFacts) -> str | None:
        if self.toxic not in TOXICS:
            return f"toxic '{self.toxic}' is unknown; Toxiproxy has {', '.join(TOXICS)}"
        if "RoCE" in self.path or "HCCS" in self.path:
            return "this transfer runs between NPUs, past the host's TCP: nftables and Toxiproxy cannot touch it"
        if not self.ports:
            return "no port of that path is known"
        busy = [listener.port for listener in facts.listeners.get() if listener.port == API_PORT or FIRST_LISTEN <= listener.port < FIRST_LISTEN + len(self.ports)]
        return f"port {busy[0]} of {self.host} is needed for toxiproxy and held" if busy else None

    def plan(self) -> Plan:
        # The effect ends first. Connections that go through toxiproxy may end in peace, for a while: one that is cut with its
        # redirect can leave a client that only reads waiting for ever (seen), which would be our doing.
        ours = range(FIRST_LISTEN, FIRST_LISTEN + len(self.ports))
        undo = (
            f"{self.relieve()}\n"
            f"n=0; while {standing(ours, '0[1458]')} >/dev/null && [ $n -lt {DRAIN_S * 10} ]; do n=$((n + 1)); sleep 0.1; done\n"
            f"echo \"{CUT} $({standing(ours)} | wc -l)\"\n"
            f"program_end {self.tag} toxiproxy && sleep 0.3\n{_drop('ip', self.tag)}"
        )
        values = ", ".join(f"{key} {value}" for key, value in self.attributes.items())
        hits = f"TCP connections to {few(self.ports)}, those that stood after one reset" if self.renew else f"new TCP connections to {few(self.ports)}"
        return Plan(f"{self.toxic} ({values or 'defaults'}) on {self.host}:{few(self.ports)}", f"{self.path}: {hits}", undo)

    def inject(self) -> str:
        proxies: list[dict[str, Any]] = [
            {"name": f"p{port}", "listen": f"{self.address}:{FIRST_LISTEN + n}", "upstream": f"{self.address}:{port}", "enabled": True}
            for n, port in enumerate(self.ports)
        ]
        toxic = json.dumps({"name": "pdgate", "type": self.toxic, "stream": self.stream, "toxicity": 1.0, "attributes": self.attributes})
        name = table(self.tag)
        rules = [f"add table ip {name}", f"add chain ip {name} through {{ type nat hook prerouting priority -100; }}"]
        # First packets alone: where nobody tracked connections so far, the kernel takes the next packet of an old one for a new one's.
        rules += [f"add rule ip {name} through ip daddr {self.address} tcp dport {port} {SYN} counter redirect to :{FIRST_LISTEN + n}" for n, port in enumerate(self.ports)]
        toxics = "\n".join(["asked=", *(f"ask POST /proxies/p{port}/toxics '{toxic}' >/dev/null & asked=\"$asked $!\"" for port in self.ports), "wait $asked"])
        first, then = toxics, _nft(rules)
        if self.renew:
            rules.append(f"add chain ip {name} stand {{ type filter hook input priority -150; }}")
            rules += [f'add rule ip {name} stand iifname != "lo" ip daddr {self.address} tcp dport {port} counter reject with tcp reset' for port in self.ports]
            first = f"echo \"{CUT} $({standing(self.ports)} | wc -l)\"\n{_nft(rules)}"
            then = f"sleep {RENEW_S}\nmoment\n{toxics}"
        return (
            f"{NEEDS_NFT}\nserver=$(command -v {self.server}) || {{ echo 'no {self.server} on the host (pd_toxiproxy)'; exit 1; }}\n"
            f"cd $PDGATE_GUARD/{self.tag}\n"
            f"cat > config.json <<'JSON'\n{json.dumps(proxies)}\nJSON\n"
            f"program_start {self.tag} toxiproxy $server -host 127.0.0.1 -port {API_PORT} -config config.json\n"
            f"{ASK}"
            "n=0; until ask GET /version ''; do n=$((n + 1)); [ $n -lt 50 ] || { cat toxiproxy.out; exit 1; }; sleep 0.1; done\n"
            f"{first}\n{then}"
        )

    def verify_applied(self) -> str:
        listed = " && ".join(f"ask GET /proxies/p{port}/toxics '' | grep -q '\"{self.toxic}\"'" for port in self.ports)
        return (
            f"{ASK}program_runs {self.tag} toxiproxy && {listed} && nft list table ip {table(self.tag)} | grep -c redirect\\ to >/dev/null "
            f"&& echo 'toxiproxy holds the toxic, nftables redirects to it' || {{ echo 'the toxic or the redirect is not there'; exit 1; }}"
        )

    def heal(self) -> str:
        return self.plan().undo

    def met(self) -> str:
        return _met("ip", self.tag, "redirect", KEPT) if self.must_meet else "true"

    def relieve(self) -> str:
        """Old connections pass through unhurt, then new ones are direct again; the rest of the undo may take its time.

        The redirect is stepped over, not taken out: flushing its chain cuts the connections that go through it, and tells their
        clients nothing (seen on kernel 6.18).
        """
        toxics = "\n".join(f"ask DELETE /proxies/p{port}/toxics/pdgate '' >/dev/null" for port in self.ports)
        return f"{ASK}{toxics}\nnft flush chain ip {table(self.tag)} stand 2>/dev/null\nnft insert rule ip {table(self.tag)} through accept 2>/dev/null; true"

    def verify_healed(self) -> str:
        return (
            f"{_dropped('ip', self.tag, 'redirect')}\n"
            f"n=0; until {quiet_port(API_PORT)}; do n=$((n + 1)); [ $n -lt 20 ] || {{ echo 'toxiproxy is still there'; exit 1; }}; sleep 0.1; done"
        )


# Toxiproxy's API from sh: curl, wget or python, whichever the host has.
ASK = f"""
ask() {{ # METHOD PATH BODY
  if command -v curl >/dev/null; then curl -fsS --max-time 5 -X "$1" ${{3:+-d "$3"}} "http://127.0.0.1:{API_PORT}$2"
  else $(command -v python3 || command -v python) -c 'import sys, urllib.request as u; m, p, b = sys.argv[1:]; print(u.urlopen(u.Request("http://127.0.0.1:{API_PORT}" + p, b.encode() or None, method=m), timeout=5).read().decode())' "$1" "$2" "$3"
  fi 2>/dev/null
}}
"""
