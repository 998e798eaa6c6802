"""A foreign listener on one or all ports of a KV port group, answering like a web server: field report R1."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.base import Plan, quiet_port
from pdgate.facts.model import HostFacts

# Holds the ports and answers HTTP, so that nc and curl succeed. One program for every Python since 3.6.
LISTENER = r"""
import socket, sys, threading
def serve(s):
    while True:
        c, _ = s.accept()
        try:
            c.settimeout(1); c.recv(1024)
            c.sendall(b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        except OSError:
            pass
        finally:
            c.close()
bound = []
for p in map(int, sys.argv[2:]):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((sys.argv[1], p)); s.listen(64); bound.append(s)
print("held", flush=True)
for s in bound[1:]:
    threading.Thread(target=serve, args=(s,), daemon=True).start()
serve(bound[0])
"""


@dataclass(frozen=True)
class OccupyPorts:
    """Take ports nobody listens on: before the engine starts, or between its restarts."""

    host: str
    address: str
    ports: tuple[int, ...]
    tag: str
    while_down: bool = False  # another fault takes the engine down first, so that its ports are free by then

    @property
    def name(self) -> str:
        return "occupy-ports"

    def available(self, facts: HostFacts) -> str | None:
        held = [listener.port for listener in facts.listeners.get() if listener.port in self.ports]
        if held and not self.while_down:
            return f"port {held[0]} of {self.host} is held: a port can be stolen only while its engine is down (kill it first)"
        return None

    def plan(self) -> Plan:
        undo = f"program_end {self.tag} listener; true"
        ports = ", ".join(map(str, self.ports))
        return Plan(f"a web server listens on {self.address}:{ports} of {self.host}", f"TCP ports {ports}: the KV side channel's handshake", undo)

    def inject(self) -> str:
        ports = " ".join(map(str, self.ports))
        return (
            "python=$(command -v python3 || command -v python) || { echo 'no python on the host to listen with'; exit 1; }\n"
            f"cd $PDGATE_GUARD/{self.tag} && cat > listen.py <<'PY'{LISTENER}PY\n"
            f"program_start {self.tag} listener $python listen.py {self.address} {ports}\n"
            "n=0; until grep -q held listener.out; do n=$((n + 1)); [ $n -lt 50 ] || { cat listener.out; exit 1; }; sleep 0.1; done"
        )

    def verify_applied(self) -> str:
        taken = " && ".join(f"! {{ {quiet_port(port)}; }}" for port in self.ports)
        return f"program_runs {self.tag} listener && {taken} && echo \"pid $pid listens\" || {{ echo 'the ports are not held'; exit 1; }}"

    def heal(self) -> str:
        return self.plan().undo

    def verify_healed(self) -> str:
        return f"[ ! -e $PDGATE_GUARD/{self.tag}/listener ] || {{ echo 'the listener is still noted'; exit 1; }}"
