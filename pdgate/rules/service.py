"""What the tokens say, not what /health says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdgate.connectors import connector_of
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import Finding
from pdgate.rules.running import running_engine
from pdgate.serving.exchange import Exchange, Settling, unsettled
from pdgate.serving.record import Record


def answers_health(target: str, status: int | None, detail: str) -> Iterator[Finding]:
    """/health answers 200."""
    if status != 200:
        yield Finding(
            target=target, expected="GET /health answers 200", seen=detail,
            why="the engine says of itself that it cannot serve",
            remedy="read its log; a dead EngineCore shows as 503, a dead API server as a refused connection",
        )  # fmt: skip


def serves_the_model(engine: Engine, models: dict[str, int | None]) -> Iterator[Finding]:
    """/v1/models names the declared model."""
    if engine.model is None:
        raise UnknownFact(f"{engine.name}: no pd_model in the inventory")
    if engine.model not in models:
        yield Finding(
            target=engine.name, expected=f"model {engine.model} in /v1/models", seen=", ".join(models) or "no model",
            why="requests for the declared model get 404 from this engine",
            remedy="correct --served-model-name in the launch script, or pd_model in the inventory",
        )  # fmt: skip


def answer_is_golden(target: str, record: Record, golden: Record | None) -> Iterator[Finding]:
    """The answer through P and D is D's own answer to the same prompt, greedy, token for token."""
    if record.outcome != "ok":
        yield Finding(
            target=target, expected="a complete answer through the proxy", seen=f"{record.outcome}: {record.detail}",
            why=WHY_OUTCOME[record.outcome], remedy=f"nobody listens at {record.url}: is pd_proxy_port right, does the proxy run?"
            if record.detail == "Connection refused" else "read the logs of the proxy and of the engines it chose, in that order",
        )  # fmt: skip
        return
    if golden is None or golden.outcome != "ok":
        said = "no decode engine could be asked" if golden is None else f"{golden.outcome}: {golden.detail}"
        raise UnknownFact(f"the golden answer could not be learned from a decode engine alone: {said}")
    if record.text != golden.text:
        yield Finding(
            target=target,
            expected=f"the golden answer {golden.text[:80]!r}",
            seen=f"HTTP 200 with {record.text[:80]!r} (prompt {record.prompt_id})",
            why="D decoded over KV that is not the prompt's: fluent nonsense with status 200",
            remedy="look for 'Mooncake transfer failed' in D's log; see vllm-ascend#17044, #15420, #7711",
        )


WHY_OUTCOME = {
    "empty": "the decoder failed before its first token and the proxy had already answered 200 (vllm-ascend#13140)",
    "truncated": "the decoder died in mid-stream and nobody told the client",
    "hang": "the request waits for KV that never comes; clients see silence, not an error",
    "error": "the deployment cannot serve one short request",
    "aborted": "the request was not carried through",
    "wrong": "the answer is not the model's",
}


def kv_moved(deployment: Deployment, exchange: Exchange) -> Iterator[Finding]:
    """D counted prompt tokens from an external KV transfer, and logged the transfer where its connector does."""
    if exchange.record.outcome != "ok":
        raise UnknownFact("no answer came back, so no transfer can be proved (see service.request.golden)")
    decoders = [engine for engine in deployment.engines if engine.serves_decode]
    moved = {engine.name: _delta(exchange, engine.name, "external_tokens") for engine in decoders}
    measured = {name: tokens for name, tokens in moved.items() if tokens is not None}
    if not measured:
        reasons = [why for key, why in exchange.unknown.items() if key.startswith("metrics ")]
        raise UnknownFact("no decode engine counts external KV tokens: " + ("; ".join(reasons) or "metric absent in this version"))
    receivers = [name for name, tokens in measured.items() if tokens > 0]
    if not receivers:
        yield Finding(
            target=decoders[0].name,
            expected="a decode engine counts prompt tokens from external_kv_transfer",
            seen=f"0 on {', '.join(measured)}; the answer was computed without P's KV",
            why="the deployment is not disaggregated: D prefills everything itself, and P's work is thrown away",
            remedy="check that the proxy passes kv_transfer_params and that D's kv_role is kv_consumer",
        )
        return
    for name in receivers:
        yield from _transfer_logged(deployment.engine(name), exchange)


def _transfer_logged(engine: Engine, exchange: Exchange) -> Iterator[Finding]:
    pattern = connector_of(engine.connector).signatures.transfer_done
    if pattern is None:
        return
    if engine.name not in exchange.logs:
        raise UnknownFact(exchange.unknown.get(f"log {engine.name}", f"{engine.name}: its log was not read"))
    if not any(re.search(pattern, line) for line in exchange.logs[engine.name]):
        yield Finding(
            target=engine.name,
            expected=f"a line like /{pattern}/ in {engine.log}",
            seen=f"{len(exchange.logs[engine.name])} new lines, none of them",
            why="the metric says that KV came, the connector does not: one of the two is not telling the truth",
            remedy="check the log level and that pd_log is this engine's log",
        )


def decode_went_from_waiting_to_generating(deployment: Deployment, exchange: Exchange) -> Iterator[Finding]:
    """After the request some D has generated, and no D still holds it waiting or running."""
    decoders = [engine for engine in deployment.engines if engine.serves_decode]
    generated = {e.name: _delta(exchange, e.name, "generated_tokens") for e in decoders}
    if all(value is None for value in generated.values()):
        raise UnknownFact("no decode engine counts generated tokens; " + "; ".join(exchange.unknown.values()))
    # KV that D still holds counts too: once the client has left, a stuck request shows neither as waiting nor as running.
    after = {engine.name: exchange.after[engine.name] for engine in decoders if engine.name in exchange.after}
    stuck = unsettled({name: exchange.before[name] for name in after if name in exchange.before}, after)
    for name, state in stuck.items():
        yield Finding(
            target=name, expected="the request has left the engine", seen=state,
            why="it sits in WAITING_FOR_REMOTE_KVS: P's side channel does not answer or the transfer never ends",
            remedy="check the owners of P's port group first, then D's log for the peer it waits for",
        )  # fmt: skip
    if not stuck and exchange.record.outcome != "ok":
        raise UnknownFact("no answer came back, and no decode engine holds the request (see service.request.golden)")
    if not stuck and not any(value for value in generated.values()):
        yield Finding(
            target=decoders[0].name if decoders else deployment.name, expected="a decode engine generates tokens",
            seen=f"no token on {', '.join(generated)}", why="the answer did not come from a decode engine of this deployment",
            remedy="check the proxy's decoder list against the inventory",
        )  # fmt: skip


def _delta(exchange: Exchange, name: str, value: str) -> float | None:
    before, after = exchange.before.get(name), exchange.after.get(name)
    if before is None or after is None:
        return None
    now = getattr(after, value)
    return None if now is None else now - (getattr(before, value) or 0)


NOTICED_S = 1.0  # an engine looks for expired requests when it steps, and metrics follow


def recovery_bound(deployment: Deployment, facts: dict[str, HostFacts]) -> tuple[float, str]:
    """Seconds within which a cancelled request must have left P and D, and where the number comes from.

    Raises UnknownFact where the running P's abort timeout cannot be read.
    """
    bounds: list[tuple[float, str]] = []
    for engine in deployment.engines:
        declared = deployment.host_of(engine).expect.abort_recovery_s
        if declared is not None:
            bounds.append((declared, "pd_expect.abort_recovery_s"))
            continue
        connector = connector_of(engine.connector)
        timer = connector.timer("abort", engine) or connector.timer("lease", engine)
        if timer is None or not engine.serves_prefill:
            continue
        running = running_engine(engine, facts[deployment.host_of(engine).machine])
        if running is None:
            continue
        try:
            bounds.append((timer.seconds(running.environment) + NOTICED_S, f"{timer.variable} of {engine.name} and {NOTICED_S:g} s to notice"))
        except ValueError as error:
            raise UnknownFact(f"{engine.name}: {error}") from None
    if not bounds:
        raise UnknownFact("no bound for the recovery is known: declare pd_expect.abort_recovery_s")
    return max(bounds)


def came_back_to_baseline(target: str, record: Record, settling: Settling, origin: str) -> Iterator[Finding]:
    """After the client went away, nothing runs, nothing waits and no KV is held, on P and on D, within the bound."""
    if record.outcome != "aborted":
        raise UnknownFact(f"the request to be cancelled did not get as far as its second token: {record.outcome}: {record.detail}")
    if not settling.baseline:
        raise UnknownFact("no engine's /metrics could be read before the request")
    if settling.seconds is not None:
        return
    for name, held in unsettled(settling.baseline, settling.last).items():
        yield Finding(
            target=name,
            expected=f"back at its baseline within {settling.bound_s:g} s ({origin})",
            seen=f"still {held} after that",
            why="each abort strands KV: under real traffic the cache fills and the engine stalls",
            remedy="check that the proxy closes its upstream connection when the client goes away, and the connector's "
            "forced-free lines in P's log",
        )


def cancel_leaves_nothing(phase: str, proof: str, settling: Settling, origin: str) -> Iterator[Finding]:
    """A request whose client left in `phase` (`proof` says how that is known) holds nothing on P and D within the bound."""
    yield from _still_held(f"a request cancelled in phase '{phase}' ({proof})", settling, origin)


def kv_is_free_again(what: str, settling: Settling, origin: str) -> Iterator[Finding]:
    """After the load nothing runs, nothing waits and no KV is held, on P and on D, within the bound."""
    yield from _still_held(f"a load ({what})", settling, origin)


def _still_held(what: str, settling: Settling, origin: str) -> Iterator[Finding]:
    if not settling.baseline:
        raise UnknownFact("no engine's /metrics could be read before")
    if settling.seconds is not None:
        return
    for name, held in unsettled(settling.baseline, settling.last).items():
        yield Finding(
            target=name, expected=f"{what} leaves nothing after {settling.bound_s:g} s ({origin})", seen=f"still {held}",
            why="KV that is never freed adds up: the cache fills and the engine stalls",
            remedy="find the request in the engine's log: aborted, delayed or waiting for remote KV; see vllm-ascend#12383, #13240, vllm#50425",
        )  # fmt: skip


def is_a_clear_client_error(target: str, what: str, record: Record) -> Iterator[Finding]:
    """A bad request gets a 4xx with a message, within its deadline."""
    clear = record.status is not None and 400 <= record.status < 500 and record.outcome == "error" and record.body.strip()
    if not clear:
        seen = f"HTTP {record.status} ({record.outcome}): {record.detail or record.text[:80]!r}" if record.status else record.detail
        yield Finding(
            target=target, expected=f"{what} gets a 4xx with a message", seen=seen,
            why="clients cannot tell their own mistake from an outage, and retry what can never work",
            remedy="the proxy swallows the engine's answer; vllm-ascend#12097 and #14142 forward it in later versions",
        )  # fmt: skip


def leaves_nothing_behind(what: str, settling: Settling) -> Iterator[Finding]:
    """The refused request holds nothing on any engine."""
    if settling.seconds is not None:
        return
    for name, held in unsettled(settling.baseline, settling.last).items():
        yield Finding(
            target=name, expected=f"{what} leaves nothing on the engine", seen=f"still {held} after {settling.bound_s:g} s",
            why="every such request strands KV until the abort timeout (vllm-ascend#13929)",
            remedy="upgrade the connector, or refuse such requests before P",
        )  # fmt: skip
