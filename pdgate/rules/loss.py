"""What a request must come to whose engine or transfer was lost in a phase of its life: field report R3, as the inventory declares it."""

from __future__ import annotations

from collections.abc import Iterator

from pdgate.connectors import connector_of
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment
from pdgate.inventory.variables import Answer, Loss
from pdgate.rules.finding import Finding, note
from pdgate.rules.running import running_engine
from pdgate.serving.client import looks_whole
from pdgate.serving.record import Record

RECOMPUTABLE: tuple[Loss, ...] = ("prefilled", "handshake", "transferring", "transfer-fails")  # D is asked, and lacks only KV
WORDS: dict[Loss, str] = {"handshake": "in its handshake", "received": "received and not acknowledged", "transfer-fails": "to be transferred"}
WHY = {
    "wrong": "fluent nonsense with status 200 reaches users",
    "hang": "the client waits for ever, and D keeps the blocks of the request",
    "empty": "a 200 with nothing in it looks like an answer",
    "truncated": "an answer that stops without a word looks complete to many clients",
}


def expectation(deployment: Deployment, facts: dict[str, HostFacts], loss: Loss) -> tuple[Answer, str]:
    """What is expected of a request lost in this phase, and why: declared (pd_expect.on_loss), else by connector, version and policy."""
    declared = deployment.front_host.expect.on_loss.get(loss)
    if declared:
        return declared, f"pd_expect.on_loss.{loss} says so"
    decoders = [engine for engine in deployment.engines if engine.serves_decode]
    policies = set()
    for engine in decoders:
        running = running_engine(engine, facts[deployment.host_of(engine).machine])
        if running is None:
            raise UnknownFact(f"{engine.name} does not run, so its kv_load_failure_policy is unknown")
        policies.add(str(running.kv_config.get("kv_load_failure_policy", "fail")))
    policy = "/".join(sorted(policies))
    if loss in RECOMPUTABLE and policies == {"recompute"} and all(connector_of(engine.connector).load_failures_reported(engine) for engine in decoders):
        return "answered", "kv_load_failure_policy is recompute, and this version reports failed pulls"
    return "failed", f"{loss}: nothing is promised with kv_load_failure_policy {policy}; a clean failure in time is enough"


def became(target: str, loss: Loss, record: Record, expected: tuple[Answer, str], lost: str, good_s: float | None) -> Finding:
    """What became of the request, also where that is as it should be."""
    took = f" after {record.end - record.sent:.2f} s" if record.end is not None else ""
    again = "never good again" if good_s is None else f"good again {good_s:.2f} s after the healing"
    return note(
        target,
        f"the request that was {WORDS.get(loss, loss)} when {lost} was lost ended {record.outcome}{took}, HTTP {record.status} "
        f"(to be {expected[0]}: {expected[1]}); {again}",
    )


def ended_as_expected(target: str, loss: Loss, record: Record, expected: tuple[Answer, str], deadline_s: float, lost: str) -> Iterator[Finding]:
    """The request that was hit is answered right or fails cleanly and in time, as promised: never wrong, never silent."""
    answer, why = expected
    if record.outcome == "ok":
        return
    # Once the answer has begun, a broken connection is all that is left to say no with.
    clean = record.outcome == "error" or (record.outcome == "truncated" and not looks_whole(record))
    if clean and answer == "failed":
        return
    took = f" after {record.end - record.sent:.1f} s" if record.end is not None else ""
    yield Finding(
        target=target, expected=f"the golden answer ({why})" if answer == "answered" else f"the golden answer or a clean error within {deadline_s:g} s ({why})",
        seen=f"the request that was {WORDS.get(loss, loss)} when {lost} was lost: {record.outcome}, HTTP {record.status}{took}: {record.detail[:240]}",
        why=WHY.get(record.outcome, "a promise to clients is not kept: they see the fault"),
        remedy="retries and failover of the proxy (vllm-ascend#13165); kv_load_failure_policy: recompute on D" if clean
        else "which side waits, or lied? D's log for failed pulls and 'Deferred', the proxy's for a dead upstream (vllm-ascend#17044, #13140; vllm#35943)",
    )  # fmt: skip
