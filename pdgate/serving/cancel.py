"""Clients that go away in a chosen phase of a request's life, each with the proof of the phase it was hit in.

Phases: queued, prefilling, prefilled (P is done, D never comes), transferring (D has it, no token yet), decoding. Nothing on a host
is touched: the client alone decides when to leave, from what /metrics and its own socket say.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import socket
import ssl
import struct
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from pdgate.inventory.model import Deployment, Engine
from pdgate.serving.client import Endpoint, Leave, Prompt, stream
from pdgate.serving.exchange import endpoint_of, observe
from pdgate.serving.handover import NoHandover, prefill
from pdgate.serving.metrics import MetricsUnavailable, Sample, scrape
from pdgate.serving.record import Record, now

TRIES = 3
ASKED_S = 0.5  # for an engine to take a request in


@dataclass(frozen=True)
class Cancelled:
    """A request whose client left: in which phase, by what proof, or why the phase was missed."""

    phase: str
    record: Record | None
    proof: str = ""
    missed: str = ""


class Held:
    """A request that was sent and is not read; `leave` ends its connection with a reset, as a killed client would."""

    def __init__(self, endpoint: Endpoint, prompt: Prompt, deadline_s: float) -> None:
        self.endpoint, self.prompt = endpoint, prompt
        parts = urlsplit(endpoint.url)
        assert parts.hostname
        if parts.scheme == "https":
            secure = ssl.create_default_context()
            self.connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=deadline_s, context=secure
            )
        else:
            self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=deadline_s)
        self.connection.connect()
        assert self.connection.sock is not None
        self.sock: socket.socket = self.connection.sock
        self.sent = now()
        headers = {"Content-Type": "application/json", **endpoint.headers()}
        self.connection.request("POST", parts.path + prompt.path, json.dumps(prompt.body(stream=True)), headers)

    def answered(self) -> bool:
        """Whether anything came back."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def said(self) -> str:
        """The part of the answer that bears tokens, as far as it has come, still unread; headers alone say nothing."""
        if not self.answered():
            return ""
        found = re.search(r'"(?:text|content)".*', self.sock.recv(65536, socket.MSG_PEEK).decode(errors="replace"), re.DOTALL)
        return found[0] if found else ""

    def leave(self) -> Record:
        answered = self.answered()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.sock.close()
        return Record(
            prompt_id=self.prompt.id, url=self.endpoint.url + self.prompt.path, api=self.prompt.api, stream=True, scheduled=self.sent, sent=self.sent, end=now(),
            first_byte=now() if answered else None, outcome="aborted", detail="the client left" + (" after the first byte" if answered else " before the first byte"),
        )  # fmt: skip


def _seen(engines: list[tuple[Engine, Endpoint]], what: Callable[[Sample], bool]) -> Engine | None:
    for engine, endpoint in engines:
        try:
            if what(scrape(endpoint, 2)):
                return engine
        except MetricsUnavailable:
            continue
    return None


def _more_than(had: float) -> Callable[[Sample], bool]:
    return lambda sample: sample.in_hand > had


def _with_endpoints(deployment: Deployment, role: str) -> list[tuple[Engine, Endpoint]]:
    units = [(engine, endpoint_of(deployment, engine)) for engine in deployment.engines if getattr(engine, f"serves_{role}")]
    return [(engine, endpoint) for engine, endpoint in units if endpoint is not None]


def _salted(prompt: Prompt) -> Prompt:
    return replace(prompt, extra={"cache_salt": uuid.uuid4().hex})


def while_queued(deployment: Deployment, front: Endpoint, prompt: Prompt, at_once: int, deadline_s: float) -> Cancelled:
    """Send `at_once` long requests; once an engine says that some wait, everybody leaves."""
    held = _send_all(front, prompt, at_once, deadline_s)
    engines = _with_endpoints(deployment, "prefill") + _with_endpoints(deployment, "decode")
    proof = ""
    until = time.monotonic() + min(2.0, deadline_s)
    while not proof and time.monotonic() < until and not all(one.answered() for one in held):
        found = _seen(engines, lambda sample: bool((sample.waiting or 0) >= 1))
        proof = f"{found.name} said vllm:num_requests_waiting >= 1 before the {at_once} clients left" if found else ""
    records = [one.leave() for one in held]
    missed = "" if proof else f"no engine queued with {at_once} requests at once (pd_load.max_concurrency)"
    return Cancelled("queued", records[-1], proof, missed)


def _send_all(front: Endpoint, prompt: Prompt, count: int, deadline_s: float) -> list[Held]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: Held(front, _salted(prompt), deadline_s), range(count)))


def while_prefilling(deployment: Deployment, front: Endpoint, prompt: Prompt, deadline_s: float) -> Cancelled:
    """Leave once a prefill engine says that it runs the request and nothing has come back."""
    engines = _with_endpoints(deployment, "prefill")
    record = None
    for _ in range(TRIES):
        held = Held(front, _salted(prompt), deadline_s)
        proof = ""
        while not proof and not held.answered() and now() - held.sent < deadline_s:
            found = _seen(engines, lambda sample: bool((sample.running or 0) >= 1))
            proof = f"{found.name} said vllm:num_requests_running >= 1, no byte had come back" if found else ""
        record = held.leave()
        if proof and record.first_byte is None:
            return Cancelled("prefilling", record, proof)
    return Cancelled("prefilling", record, missed=f"P was done before its metrics showed the request, {TRIES} times: the prompt is too short for this deployment")


def once_prefilled(deployment: Deployment, prompt: Prompt, deadline_s: float) -> Cancelled:
    """P answers, and nobody ever takes its KV to D."""
    engine, endpoint = _with_endpoints(deployment, "prefill")[0]
    sent = now()
    try:
        params = prefill(endpoint, _salted(prompt), uuid.uuid4().hex, deadline_s)
    except NoHandover as error:
        return Cancelled("prefilled", None, missed=f"{engine.connector} hands over through its router only: {error}")
    record = Record(prompt_id=prompt.id, url=endpoint.url, scheduled=sent, sent=sent, end=now(), outcome="aborted", detail="P was done, D was never asked")
    return Cancelled("prefilled", record, f"{engine.name} answered kv_transfer_params ({', '.join(sorted(params))[:120]})")


def while_transferring(deployment: Deployment, prompt: Prompt, deadline_s: float, after_s: float = 0.01) -> Cancelled:
    """P's half, then D's; the client leaves before D's first token."""
    (p, p_endpoint), (d, d_endpoint) = _with_endpoints(deployment, "prefill")[0], _with_endpoints(deployment, "decode")[0]
    record = None
    for attempt in range(TRIES):
        salted = _salted(prompt)
        try:
            params = prefill(p_endpoint, salted, uuid.uuid4().hex, deadline_s)
        except NoHandover as error:
            return Cancelled("transferring", None, missed=f"{p.connector} hands over through its router only: {error}")
        before, _ = observe(deployment)
        held = Held(d_endpoint, replace(salted, extra={**salted.extra, "kv_transfer_params": params}), deadline_s)
        if attempt == 0:  # a busy engine may not have it yet
            more = _more_than(before[d.name].in_hand if d.name in before else 0)
            until = time.monotonic() + ASKED_S
            while time.monotonic() < until and not _seen([(d, d_endpoint)], more):
                pass
        else:  # that took too long: by the clock
            time.sleep(after_s / 2**attempt)
        record = held.leave()
        time.sleep(0.3)
        after, _ = observe(deployment)
        if d.name in before and d.name in after and after[d.name].generated_tokens == before[d.name].generated_tokens:
            return Cancelled("transferring", record, f"{d.name} was asked with P's kv_transfer_params and generated no token")
    return Cancelled("transferring", record, missed=f"{d.name} answered before the client could leave, {TRIES} times: the transfer is too fast to be met from here")


def while_decoding(front: Endpoint, prompt: Prompt, deadline_s: float, reset: bool) -> Cancelled:
    """Leave after two tokens, with FIN, or with RST in the pause between two chunks."""
    record = stream(front, _salted(prompt), deadline_s, leave=Leave(after_tokens=2, reset=reset))
    missed = "" if record.outcome == "aborted" else f"the request did not get as far as its second token: {record.outcome}: {record.detail}"
    return Cancelled("between chunks" if reset else "decoding", record, f"{len(record.tokens)} tokens had come", missed)


def storm(front: Endpoint, prompt: Prompt, count: int, deadline_s: float) -> list[Record]:
    """`count` streams at once whose clients all leave after their first token or 0.2 s."""
    with ThreadPoolExecutor(count) as pool:
        leaves = [Leave(after_tokens=1, reset=True) if n % 2 else Leave(after_s=0.2, reset=True) for n in range(count)]
        return list(pool.map(lambda leave: stream(front, _salted(prompt), deadline_s, leave=leave), leaves))
