"""Storms from one host of the deployment onto another's port: connections that say nothing, requests whose clients leave."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from chaos.faults.base import Plan
from pdgate.facts.model import HostFacts

# Programs for every Python since 3.6. Each says in its output file what it has done so far.
CONNECTIONS = r"""
import socket, sys, time
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = []
while True:
    while len(held) < count:
        try:
            held.append(socket.create_connection((address, port), 2))
        except OSError:
            break
    print("held", len(held), flush=True)
    time.sleep(0.1)
"""
ABORTS = r"""
import random, socket, struct, sys, threading, time
address, port, rate, body = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].encode()
head = ("POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (address, len(body))).encode()
left = [0]
def one():
    try:
        s = socket.create_connection((address, port), 2)
        s.sendall(head + body)
        time.sleep(random.uniform(0.005, 0.3))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); s.close()
        left[0] += 1
    except OSError:
        pass
while True:
    threading.Thread(target=one, daemon=True).start()
    print("held", left[0], flush=True)
    time.sleep(1 / rate)
"""


@dataclass(frozen=True)
class Storm:
    """A program on `host` that troubles `address`:`port`: `count` idle connections, or (with a `body`) `count` requests a second that are left."""

    host: str
    address: str
    port: int
    count: int
    tag: str
    body: str = ""  # JSON of the request; empty: connections only

    @property
    def name(self) -> str:
        return "abort-storm" if self.body else "connection-storm"

    def available(self, facts: HostFacts) -> str | None:
        return "no body of a request to leave" if self.body and not json.loads(self.body) else None

    def plan(self) -> Plan:
        undo = f"program_end {self.tag} storm; true"
        what = f"{self.count} requests a second whose clients leave" if self.body else f"{self.count} idle connections"
        return Plan(f"{what}, from {self.host} to {self.address}:{self.port}", "one HTTP port", undo)

    def inject(self) -> str:
        program, least = (ABORTS, 5) if self.body else (CONNECTIONS, self.count)
        return (
            "python=$(command -v python3 || command -v python) || { echo 'no python on the host to make a storm with'; exit 1; }\n"
            f"cd $PDGATE_GUARD/{self.tag} && cat > storm.py <<'PY'{program}PY\n"
            f"program_start {self.tag} storm $python storm.py {self.address} {self.port} {self.count} {shlex.quote(self.body)}\n"
            f"n=0; until set -- $(tail -n1 storm.out) && [ \"${{2:-0}}\" -ge {least} ]; do n=$((n + 1)); [ $n -lt 60 ] || {{ tail -n2 storm.out; echo 'the storm does not rise'; exit 1; }}; sleep 0.1; done"
        )

    def verify_applied(self) -> str:
        return f"program_runs {self.tag} storm && tail -n1 $PDGATE_GUARD/{self.tag}/storm.out || {{ echo 'no storm runs'; exit 1; }}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return f"[ ! -e $PDGATE_GUARD/{self.tag}/storm ] || {{ echo 'the storm is still noted'; exit 1; }}"
