"""That a phase was hit is proved from what is left, or the experiment is invalid; what is expected then is declared."""

from __future__ import annotations

import datetime
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import phases
from chaos.faults.base import Plan
from chaos.injection import Applied
from chaos.single import Hit, asked_now
from pdgate.facts.model import UnknownFact
from pdgate.rules.finding import NotRun
from pdgate.rules.loss import ended_as_expected
from pdgate.rules.recovery import each_in_time, left_out_in_time, said_why
from pdgate.serving.exchange import Settling
from pdgate.serving.load import LoadPrompt
from pdgate.serving.logs import Logs
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record
from tests.build import deployment, engine, host

IDENT = "270f82b6-18dc-4f09-b7f0-90fe6a8f0001"
HELD = f"Delaying free of 18 blocks for request cmpl-{IDENT}-0-aa"
STAGE: Any = SimpleNamespace(deployment=deployment([engine("p0"), engine("d0", role="decode", http_port=7001)], [host("p0"), host("d0")]))


def record(outcome: str = "error", tokens: tuple[float, ...] = (), sent: float = 9.0, end: float = 10.2, detail: str = "") -> Record:
    return Record(prompt_id="p", url="u", scheduled=sent, sent=sent, end=end, outcome=outcome, tokens=list(tokens), detail=detail)  # type: ignore[arg-type]


def sample(ended: float, running: float = 0) -> Sample:
    values = {"vllm:request_success_total": ended, "vllm:num_requests_running": running, "vllm:num_requests_waiting": 0.0}
    return Sample(0.0, {(name, frozenset()): value for name, value in values.items()})


def hit(hurt: Record, evidence: str = HELD, lines: dict[str, list[str]] | None = None, unknown: dict[str, str] | None = None, **more: Any) -> Hit:
    applied = Applied("kill", Plan("kill", "processes", ""), injected=(10.0, 10.05), healed=(11.0, 11.05))
    logs = Logs(lines or {}, unknown or {}, datetime.date(2026, 1, 1))
    found = Hit("n", hurt, [record("ok")], applied, evidence, 1.0, Settling({}, {}, 1.0, 5.0), {}, {}, logs, ({"d0": sample(5)}, {"d0": sample(6)}))
    return replace(found, **more)


def test_prefilling_is_missed_where_a_decode_engine_met_one_request_too_many() -> None:
    phases.was_prefilling(STAGE, hit(record()))
    with pytest.raises(UnknownFact, match="was missed: decode engines met 2 requests"):
        phases.was_prefilling(STAGE, hit(record(), samples=({"d0": sample(5)}, {"d0": sample(6, running=1)})))
    with pytest.raises(UnknownFact, match="cannot be told: no metrics"):
        phases.was_prefilling(STAGE, hit(record(), samples=({"d0": sample(5)}, {})))


def test_prefill_done_is_missed_where_decode_logged_the_transfer_or_its_log_is_lost() -> None:
    phases.was_prefilled(STAGE, hit(record(), lines={"d0": ["INFO: other"]}))
    with pytest.raises(UnknownFact, match="was missed: d0 had the KV"):
        phases.was_prefilled(STAGE, hit(record(), lines={"d0": [f"KV cache transfer for request cmpl-{IDENT}-0-aa took 3 ms"]}))
    with pytest.raises(UnknownFact, match="cannot be told: d0: log was truncated"):
        phases.was_prefilled(STAGE, hit(record(), unknown={"d0": "d0: log was truncated"}))
    with pytest.raises(UnknownFact, match="names no request"):
        phases.was_prefilled(STAGE, hit(record(), evidence="Delaying free of something"))


def test_a_transfer_is_in_flight_while_part_of_it_has_moved() -> None:
    phases.was_in_flight(hit(record(), evidence="bytes 40000"), 100_000)
    with pytest.raises(UnknownFact, match="95000 bytes had moved, a whole transfer moves 100000"):
        phases.was_in_flight(hit(record(), evidence="bytes 95000"), 100_000)


def test_received_and_not_acknowledged_is_what_prefill_gave_up_by_force_or_still_holds() -> None:
    came = f"KV cache transfer for request cmpl-{IDENT}-0-aa took 3 ms"
    phases.was_received(STAGE, hit(record(), evidence=came, lines={"p0": [f"Force freed expired request: cmpl-{IDENT}-0-aa. Reason: timeout"]}))
    with pytest.raises(UnknownFact, match="was missed, or cannot be told"):
        phases.was_received(STAGE, hit(record(), evidence=came))
    held = Sample(0.0, {("vllm:kv_cache_usage_perc", frozenset()): 0.5})
    phases.was_received(STAGE, hit(record(), evidence=came, settling=Settling({"p0": sample(1)}, {"p0": held}, None, 5.0)))


def test_decoding_needs_a_token_before_the_shot_and_leaving_needs_a_client_that_left() -> None:
    phases.was_decoding(hit(record("truncated", tokens=(9.9,))))
    with pytest.raises(UnknownFact, match="no token had come back"):
        phases.was_decoding(hit(record()))
    phases.was_left(hit(record("aborted")))
    with pytest.raises(UnknownFact, match="no client left"):
        phases.was_left(hit(record("ok")))


def test_a_phase_that_cannot_be_seen_on_a_host_is_not_run() -> None:
    with pytest.raises(NotRun, match="NixlConnector logs no line"):
        phases.held_back(STAGE, engine("p0", connector="NixlConnector", log="/var/log/e.log"), "t")
    with pytest.raises(NotRun, match="no worker processes"):
        phases.prefill_done(STAGE, engine("p0", log="/var/log/e.log"), "t", [])
    with pytest.raises(NotRun, match="no pd_log"):
        phases.received(STAGE, engine("d0", role="decode", log=None), "t")


def outcome_of(hurt: Record, answer: str = "failed", loss: str = "prefilled") -> list[str]:
    return [finding.seen for finding in ended_as_expected("proxy", loss, hurt, (answer, "declared"), 6.0, "p0")]  # type: ignore[arg-type]


def test_a_lost_request_may_fail_cleanly_and_never_lies() -> None:
    assert outcome_of(record("ok")) == [] and outcome_of(record("error")) == []
    assert outcome_of(record("truncated", detail="('Connection broken: IncompleteRead')")) == []
    for lie in (record("wrong"), record("hang"), record("empty"), record("truncated", detail="the stream ended without [DONE] after 3 tokens")):
        assert len(outcome_of(lie)) == 1
    assert "error" in outcome_of(record("error"), "answered")[0]


def test_engines_in_turn_and_silent_ones_are_held_to_their_promises() -> None:
    assert list(each_in_time({"p0": 3.0}, 4.0)) == []
    assert [finding.seen for finding in each_in_time({"p0": 9.0, "p1": None}, 4.0)] == ["after 9.0 s", "not at all"]
    window = ((10.0, 10.1), (20.0, 20.1))
    good = [record("ok", sent=10 + n / 2) for n in range(20)]
    assert list(left_out_in_time("proxy", good, *window, 3.0)) == []
    assert "1 of 14 requests" in next(left_out_in_time("proxy", [*good, record("error", sent=15.0)], *window, 3.0)).seen
    with pytest.raises(UnknownFact, match="no request was sent"):
        list(left_out_in_time("proxy", [], *window, 3.0))


def test_an_engine_that_cannot_have_its_port_names_it() -> None:
    p = engine("p0")
    assert list(said_why(p, ["ZMQError: Address already in use (addr='tcp://10.0.0.1:28000')"], "")) == []
    assert len(list(said_why(p, ["INFO: up"], ""))) == 1
    with pytest.raises(UnknownFact, match="p0: log was truncated"):
        list(said_why(p, None, "p0: log was truncated"))


def test_the_engine_a_request_alone_goes_to_is_seen_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [engine("p0/dp0"), engine("p0/dp1", http_port=7001)]
    looks = iter([{"p0/dp0": generated(5), "p0/dp1": generated(5)}, {"p0/dp0": generated(5), "p0/dp1": generated(6)}])
    golden = SimpleNamespace(shortest=LoadPrompt(id="p", text="hello"), model="m")
    stage: Any = SimpleNamespace(deployment=None, proxy=None, book=golden, deadline_s=1.0)
    for name, stand_in in {"front_of": lambda *_: None, "complete": lambda *_: record("ok"), "observe": lambda _: (next(looks), {}), "POLL_S": 0}.items():
        monkeypatch.setattr(f"chaos.single.{name}", stand_in)
    assert asked_now(stage, pair).name == "p0/dp1"
    same = {"p0/dp0": generated(5)}
    monkeypatch.setattr("chaos.single.observe", lambda _: (same, {}))
    with pytest.raises(UnknownFact, match="none of p0/dp0, p0/dp1 counted a token"):
        asked_now(stage, pair)


def generated(tokens: float) -> Sample:
    return Sample(0.0, {("vllm:generation_tokens_total", frozenset()): tokens})
