"""The phases of a request's life that can be hit: what is waited for on the host, and what proves afterwards that it was there.

| phase | hit on | trigger on its host | proof |
| --- | --- | --- | --- |
| prefilling | P | its /metrics run a request | no byte had come back, and no D ever counted the request |
| prefill done | P | its log: KV is held for D; its workers stand still until D was asked | D's log has no transfer of that request |
| handshake | P, just started | the same, and D's first bytes wait on the side channel | as above; who stands still answers no handshake |
| transfer in flight | P | slowed to two seconds; bytes between P and D, beside HTTP and side channel | fewer bytes than a whole transfer moves |
| received before acknowledged | D | its log: KV has come, while P's side channel is cut | P's log gave the KV of that request up |
| decoding | D | its /metrics count new tokens | tokens had come, and the answer had not ended |
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from chaos.aim import Aim, byte_counter, bytes_moving, log_line, metric_above, unread
from chaos.experiment import Stage
from chaos.faults.base import Victim
from chaos.paths import peers_of, plain_ports, side_channel
from chaos.single import Hit, question
from pdgate.connectors import connector_of
from pdgate.facts.model import UnknownFact
from pdgate.inventory.model import Engine
from pdgate.rules.finding import NotRun
from pdgate.serving.client import complete
from pdgate.serving.exchange import front_of, unsettled
from pdgate.serving.golden import prompt_with_salt
from pdgate.serving.logs import UUID
from pdgate.serving.metrics import Sample

HELD, RECEIVED = "Delaying free of", "KV cache transfer for request"
SMALL_TRANSFER = 64 * 1024  # bytes: below this nothing can be met in the middle
ANSWERED_S = 0.3  # for P's answer to reach the proxy, and D


# -- triggers -----------------------------------------------------------------------------------------------------------------


def prefilling(stage: Stage, p: Engine, tag: str) -> Aim:
    return metric_above(local_url(stage, p), "vllm:num_requests_running", tag)


def prefill_done(stage: Stage, p: Engine, tag: str, victims: Iterable[Victim]) -> Aim:
    """P's workers stand still from the moment they hold the KV, while its answer goes out and D asks in vain; then we strike."""
    return log_line(log_with(p, HELD), HELD, tag, f"{_freeze(p, victims)}\nsleep {ANSWERED_S}")


def handshake(stage: Stage, p: Engine, tag: str, victims: Iterable[Victim]) -> Aim:
    """The same, but we strike when D's first bytes wait on the side channel: its handshake is open, and nobody answers it."""
    ports = tuple(side_channel(p))
    aim = log_line(log_with(p, HELD), HELD, tag, f"{_freeze(p, victims)}\n{unread(ports)}")
    return Aim(f"{aim.what}, then bytes on {', '.join(map(str, ports))}", aim.watch, tag)


def held_back(stage: Stage, p: Engine, tag: str) -> Aim:
    """P holds KV: the moment to stop all of it, so that D can neither be asked nor served."""
    return log_line(log_with(p, HELD), HELD, tag)


def _freeze(p: Engine, victims: Iterable[Victim]) -> str:
    workers = [victim.pid for victim in victims if victim.comm.startswith("VLLM::Worker")]
    if not workers:
        raise NotRun(f"{p.name} has no worker processes of their own: they cannot be held back while the engine answers")
    return f"kill -STOP {' '.join(map(str, workers))}"


def transfer_in_flight(stage: Stage, p: Engine, tag: str, whole: int) -> Aim:
    return bytes_moving(peers_of(stage, p), plain_ports(stage), max(SMALL_TRANSFER // 4, whole // 20), tag)


def received(stage: Stage, d: Engine, tag: str) -> Aim:
    return log_line(log_with(d, RECEIVED), RECEIVED, tag)


def decoding(stage: Stage, d: Engine, tag: str) -> Aim:
    return metric_above(local_url(stage, d), "vllm:generation_tokens_total", tag, grows=True)


def local_url(stage: Stage, engine: Engine) -> str:
    url = stage.deployment.url_of(engine)
    if url is None:
        raise NotRun(f"{engine.name}: the inventory gives no address for its HTTP, so its metrics cannot be followed")
    return url


def log_with(engine: Engine, text: str) -> str:
    """The engine's log, where its connector writes such a line at all."""
    signatures = connector_of(engine.connector).signatures
    if engine.log is None:
        raise NotRun(f"{engine.name}: no pd_log in the inventory, so nothing can be aimed by its lines")
    if (signatures.delayed_free if text == HELD else signatures.transfer_done) is None:
        raise NotRun(f"{engine.connector} logs no line '{text}': the phase cannot be seen on its host")
    return engine.log


def whole_transfer(stage: Stage, p: Engine) -> int:
    """Bytes one healthy transfer of the aimed question moves, measured on P's host; raises NotRun where it is too small to be met."""
    prompt, _ = question(stage)
    hand = stage.hand(p.host)
    counter = byte_counter(peers_of(stage, p), plain_ports(stage))
    script = (  # until so many have moved that it was no handshake, and then rested
        f"{counter}\nbase=$(moved); most=0; at=$(uptime_s); until_s=$((at + {round(stage.deadline_s) + 5}))\n"
        f"while now=$(moved); up=$(uptime_s); [ $up -lt $until_s ] && {{ [ $most -lt {SMALL_TRANSFER} ] || [ $((up - at)) -lt 2 ]; }}; do\n"
        "  [ $now -lt $base ] && base=$now; [ $((now - base)) -gt $most ] && most=$((now - base)) && at=$up\ndone; echo $most"
    )
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(hand.must, script, "bytes could not be counted", stage.deadline_s + 30.0)
        time.sleep(0.5)
        record = complete(front_of(stage.deployment, stage.proxy), prompt_with_salt(prompt, stage.book.model), stage.deadline_s)
        moved = int(counted.result().strip() or 0)
    if record.outcome != "ok":
        raise UnknownFact(f"the rehearsal of the transfer failed: {record.outcome}: {record.detail}")
    if moved < SMALL_TRANSFER:
        raise NotRun(f"{moved} bytes moved over TCP for the longest prompt: too few to meet a transfer in the middle")
    return moved


# -- proofs: each raises UnknownFact where the phase was missed or cannot be told ------------------------------------------------


def was_prefilling(stage: Stage, hit: Hit) -> None:
    if hit.record.first_byte is not None and hit.record.first_byte < hit.applied.injected[0] and hit.record.tokens:
        raise UnknownFact("phase 'prefilling' was missed: a token had come back before")
    if hit.record.outcome == "ok":
        return  # done by another P then; that the one that was hit ran it, its own metrics had said
    first, then = hit.samples
    decoders = [engine.name for engine in stage.deployment.engines if engine.serves_decode and engine.name in first]
    if not decoders or not set(decoders) <= then.keys():
        raise UnknownFact("whether the request had come to a decode engine cannot be told: no metrics")
    seen = sum(_met(then[name]) - _met(first[name]) for name in decoders)
    if seen > len(hit.earlier):
        raise UnknownFact(f"phase 'prefilling' was missed: decode engines met {seen:g} requests, and only {len(hit.earlier)} others had been asked")


def was_prefilled(stage: Stage, hit: Hit) -> None:
    request = _request_of(hit)
    for unit in [engine.name for engine in stage.deployment.engines if engine.serves_decode]:
        if unit in hit.logs.unknown:
            raise UnknownFact(f"whether D had the KV cannot be told: {hit.logs.unknown[unit]}")
        if any(request in line and RECEIVED in line for line in hit.logs.lines.get(unit, [])):
            raise UnknownFact(f"the phase was missed: {unit} had the KV of {request} before the fault took effect")


def was_in_flight(hit: Hit, whole: int) -> None:
    moved = int(hit.evidence.split()[-1])
    if moved >= 0.9 * whole:
        raise UnknownFact(f"phase 'transfer in flight' was missed: {moved} bytes had moved, a whole transfer moves {whole}")


def was_received(stage: Stage, hit: Hit) -> None:
    """P never heard of it: it gave the KV up by force, or holds it still."""
    request = _request_of(hit)
    for engine in (engine for engine in stage.deployment.engines if engine.serves_prefill):
        pattern = connector_of(engine.connector).signatures.forced_free
        if any(request in line and re.search(pattern, line) for line in hit.logs.lines.get(engine.name, [])):
            return
    if hit.settling.seconds is None and any(stage.deployment.engine(name).serves_prefill for name in unsettled(hit.settling.baseline, hit.settling.last)):
        return  # it holds it still
    raise UnknownFact(f"phase 'received before acknowledged' was missed, or cannot be told: no P gave up the KV of {request} afterwards")


def was_decoding(hit: Hit) -> None:
    if not hit.record.tokens or hit.record.tokens[0] > hit.applied.injected[1]:
        raise UnknownFact("phase 'decoding' was missed: no token had come back when the fault struck")


def was_left(hit: Hit) -> None:
    """The client left while the fault lasted, and before a token had come."""
    if hit.record.outcome != "aborted" or hit.record.text or (hit.record.end or 0) > hit.applied.healed[1]:
        raise UnknownFact(f"no client left while D waited: {hit.record.outcome}: {hit.record.detail}")


def _request_of(hit: Hit) -> str:
    found = UUID.findall(hit.evidence)
    if not found:
        raise UnknownFact(f"the line that triggered the fault names no request: {hit.evidence[:200]}")
    return found[0]


def _met(sample: Sample) -> float:
    """Requests an engine has ended or holds."""
    return (sample.total("vllm:request_success_total") or 0.0) + sample.in_hand
