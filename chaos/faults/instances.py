"""An instance leaves and comes back behind the pull proxy while requests run (POST /instances/remove, /add)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from chaos.faults.base import Plan
from pdgate.facts.model import HostFacts

POST = """
post() {{ # PATH BODY
  if command -v curl >/dev/null; then curl -fsS --max-time 10 -H 'Content-Type: application/json' -d "$2" "{url}$1"
  else $(command -v python3 || command -v python) -c 'import sys, urllib.request as u; r = u.Request(sys.argv[1], sys.argv[2].encode(), {{"Content-Type": "application/json"}}); print(u.urlopen(r, timeout=10).read().decode())' "{url}$1" "$2"
  fi
}}
"""


@dataclass(frozen=True)
class RemoveInstance:
    """The proxy is told that an engine is gone; it gets no new requests and drains."""

    host: str  # the proxy's
    url: str
    kind: str
    role: str
    instance: str  # host:port as the proxy knows it
    target: str

    @property
    def name(self) -> str:
        return "remove-instance"

    def available(self, facts: HostFacts) -> str | None:
        return None if self.kind == "vllm-ascend" else f"a proxy of kind {self.kind} has no /instances to remove from"

    @property
    def _body(self) -> str:
        return json.dumps({"type": self.role, "instances": [self.instance]})

    def _post(self, path: str) -> str:
        return f"{POST.format(url=self.url)}post {path} '{self._body}'"

    def plan(self) -> Plan:
        return Plan(f"the proxy sends nothing to {self.target} any more", "new requests only", f"{self._post('/instances/add')} >/dev/null; true", engines=(self.target,))

    def inject(self) -> str:
        return self._post("/instances/remove")

    def verify_applied(self) -> str:
        # Asking to remove it once more lists who is left and changes nothing.
        gone = f"grep -q '\"current_{self.role}_instances\".*{self.instance}'"
        return f"n=0; while {self._post('/instances/remove')} | {gone}; do n=$((n + 1)); [ $n -lt 50 ] || {{ echo 'it does not drain'; exit 1; }}; sleep 0.2; done; echo removed"

    def heal(self) -> str:
        return self._post("/instances/add")

    def verify_healed(self) -> str:
        return f"{self._post('/instances/add')} | grep -q '{self.instance}' || {{ echo 'the proxy does not list it'; exit 1; }}"
