"""Recovery is measured from records alone, blast radius is refused in words, and every script of a fault is sound sh."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.aim import bytes_moving, log_line, metric_above
from chaos.blast import foreign_traffic, refusal
from chaos.campaign import Event, draw, reduce
from chaos.faults.base import Fault, Victim
from chaos.faults.host import FewDescriptors, FillDisk, LinkDown, PlantLeftovers
from chaos.faults.instances import RemoveInstance
from chaos.faults.network import Partition, Throttle, Toxic
from chaos.faults.ports import OccupyPorts
from chaos.faults.processes import Kill, Stall
from chaos.faults.storms import Storm
from chaos.guard import LIBRARY, posix_cksum, timed, when
from chaos.observe import Observation
from pdgate.facts.model import Listener, UnknownFact
from pdgate.rules.logs import freed_before
from pdgate.rules.recovery import Expectation, behaved, measure, parted
from pdgate.serving.logs import Logs
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record, now
from tests.build import deployment, engine, facts, host

V = (Victim(7, "123", "456", "VLLM::Worker"),)
AIMS = [
    log_line("/var/log/e.log", "Delaying free of", "t1", "kill -STOP 7"), metric_above("http://10.0.0.1:7000", "vllm:generation_tokens_total", "t1", grows=True),
    bytes_moving(("10.0.0.2",), (7000, 28000), 4096, "t1"),
]  # fmt: skip
FAULTS: list[Fault] = [
    Kill("p0", "p0", "engine", V, "restart.sh 0", 7000), Stall("d0", "d0", "core", V),
    *(Kill("p0", "p0", "engine", V, "restart.sh 0", 7000, aim) for aim in AIMS), Kill("p0", "p0", "api", V, "restart.sh 0", 7000, rest=V),
    Throttle("p0", ("10.0.0.2",), "t1", 1000, (7000,)), Storm("d0", "10.0.0.1", 1999, 300, "t1"), Storm("d0", "10.0.0.1", 1999, 40, "t1", '{"prompt": "it\'s"}'),
    OccupyPorts("p0", "10.0.0.1", (28000, 28001), "t1"), Partition("p0", ("10.0.0.2",), "t1", 30), Partition("p0", ("10.0.0.2",), "t1", 30, "in", (28000,)), Partition("p0", ("10.0.0.2",), "t1", 30, "in", (28000,), refuse=True, first=2),
    Toxic("p0", "10.0.0.1", (28000,), "t1", "latency", {"latency": 100}), PlantLeftovers("p0", ("/tmp/mooncake_x",)), FillDisk("p0", "/var/log/pd"),
    FewDescriptors("d0", "d0", V, "t1"), LinkDown("p0", 3), RemoveInstance("p0", "http://10.0.0.1:1999", "vllm-ascend", "decode", "10.0.0.2:7000", "d0"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_script_of_a_fault_is_sound_and_says_what_it_hits(fault: Fault) -> None:
    plan = fault.plan()
    assert plan.does and plan.hits
    for script in (plan.undo, timed(fault.inject()), fault.verify_applied(), fault.heal(), fault.verify_healed(), getattr(fault, "met", str)()):
        checked = subprocess.run(["sh", "-n"], input=f"{LIBRARY}\n{script}\n", capture_output=True, text=True)
        assert checked.returncode == 0, f"{checked.stderr}\n{script}"


def test_the_checksum_is_that_of_posix_cksum() -> None:
    data = b"undo this\n" * 50
    assert str(posix_cksum(data)) == subprocess.run(["cksum"], input=data, capture_output=True).stdout.decode().split()[0]


def test_the_moment_of_a_timed_script_is_known_to_the_width_of_the_remote_call() -> None:
    def run(script: str) -> tuple[int, float, float]:
        done = subprocess.run(["sh"], input=f"{LIBRARY}\n{timed(script)}", capture_output=True, text=True)
        first, last = when(100.0, done.stdout, 101.0)
        return done.returncode, first - 100.0, 101.0 - last

    code, before, behind = run("sleep 0.3; echo in vain; exit 3")
    assert code == 3 and 0.2 < before < 0.5 and behind == 0.0
    code, before, behind = run("sleep 0.2; moment; sleep 0.3")
    assert code == 0 and 0.1 < before < 0.3 and 0.2 < behind < 0.4
    assert when(100.0, "nothing of the kind", 101.0) == (100.0, 101.0)


def test_what_cannot_work_is_refused_in_words() -> None:
    held = facts(listeners=[Listener(address="0.0.0.0", port=28001, inode=1, pid=5)])
    assert "port 28001 of p0 is held" in str(OccupyPorts("p0", "10.0.0.1", (28000, 28001), "t").available(held))
    assert "past the host's TCP" in str(Toxic("p0", "10.0.0.1", (28000,), "t", "latency", path="RoCE data path").available(held))
    assert "toxic 'jam' is unknown" in str(Toxic("p0", "10.0.0.1", (28000,), "t", "jam").available(held))
    assert "no pd_restart" in str(Kill("p0", "p0", "engine", V, "", 7000).available(held))
    assert "no /instances" in str(RemoveInstance("p0", "u", "vllm-router", "decode", "x:1", "d0").available(held))


def test_the_last_healthy_engine_and_hosts_without_consent_are_refused() -> None:
    both = deployment([engine("p0"), engine("p1"), engine("d0", role="decode")], [host("p0", chaos=True), host("p1"), host("d0", chaos=True)])
    lost = ("p0",)
    assert refusal(both, "p0", lost, {"p0", "p1", "d0"}, False) is None
    assert "last healthy prefill engine" in str(refusal(both, "p0", lost, {"p0", "d0"}, False))
    assert refusal(both, "p0", lost, {"p0", "d0"}, True) is None
    assert "no pd_chaos" in str(refusal(both, "p1", lost, {"p0", "p1"}, False))
    assert "is not in test.yaml" in str(refusal(both, "elsewhere", lost, set(), False))


def sample(running: float, generated: float) -> Sample:
    names = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": 0.0, "vllm:generation_tokens_total": generated}
    return Sample(0.0, {(name, frozenset()): value for name, value in names.items()})


def test_other_peoples_traffic_is_seen() -> None:
    assert foreign_traffic({"d0": sample(0, 5)}, {"d0": sample(0, 5)}) is None
    assert "serves 2 requests" in str(foreign_traffic({"d0": sample(0, 5)}, {"d0": sample(2, 5)}))
    assert "generated tokens while we sent nothing" in str(foreign_traffic({"d0": sample(0, 5)}, {"d0": sample(0, 9)}))


# -- measuring -------------------------------------------------------------------------------------------------------------


def request(at: float, outcome: str = "ok", took: float = 0.1, late: float = 0.0) -> Record:
    return Record(prompt_id="p", url="u", scheduled=at, sent=at + late, end=at + took, outcome=outcome, detail=outcome)  # type: ignore[arg-type]


def load(bad: dict[int, str], seconds: int = 30) -> list[Record]:
    """One request every 0.1 s from 0; fault at 5 s, healing at 8 s; `bad`: outcomes by tenth of a second."""
    return [request(n / 10, bad.get(n, "ok")) for n in range(seconds * 10)]


FAULT, HEAL = (5.0, 5.02), (8.0, 8.05)


def test_detection_recovery_and_dip_are_read_from_the_records() -> None:
    seen = measure(load({n: "error" for n in range(52, 95)}), FAULT, HEAL)
    assert seen.detected_s == pytest.approx(5.2 + 0.1 - 5.02)
    assert seen.first_good_s == pytest.approx(9.5 + 0.1 - 8.05)
    assert seen.steady_s == pytest.approx(9.5 - 8.05)
    assert seen.dip == 43 and seen.uncertainty_s == pytest.approx(0.05)
    [note] = behaved("proxy", seen, Expectation(2.0), load({}))
    assert note.severity == "note" and "43 of 251 requests were not good" in note.seen
    [_, late] = behaved("proxy", seen, Expectation(1.0), load({}))
    assert "after 1.4 s" in late.seen or "after 1.5 s" in late.seen


def test_a_recovery_that_never_comes_is_said_so() -> None:
    records = load({n: "error" for n in range(52, 300)})
    seen = measure(records, FAULT, HEAL)
    assert seen.steady_s is None and seen.first_good_s is None
    assert "never within the experiment" in list(behaved("proxy", seen, Expectation(5.0), records))[1].seen


def test_wrong_and_hung_requests_are_counted_apart_from_errors() -> None:
    records = load({60: "wrong", 61: "hang", 62: "error"})
    seen = measure(records, FAULT, HEAL)
    found = [finding.expected for finding in behaved("proxy", seen, Expectation(5.0), records)][1:]
    assert found == ["no wrong answer, whatever fails", "requests that cannot be served fail within their deadline"]
    strict = [finding.expected for finding in behaved("proxy", seen, Expectation(5.0, errors_allowed=False), records)]
    assert "no request fails: the deployment can do without what was taken" in strict


def test_failures_on_connections_that_ended_by_our_hands_are_not_the_faults_and_no_more_of_them_than_ended() -> None:
    records = load({82: "error", 90: "error"})
    assert [one.sent for one in parted(records, [(FAULT[0], HEAL[1], 0, 2)])] == [8.2, 9.0]
    assert [one.sent for one in parted(records, [(FAULT[0], HEAL[1], 0, 1)])] == [8.2]
    ours = parted(records, [(FAULT[0], HEAL[1], 0, 2)])
    seen = measure([one for one in records if one not in ours], FAULT, HEAL)
    notes = list(behaved("proxy", seen, Expectation(5.0, errors_allowed=False), records, not_its_doing=ours))
    assert [one.severity for one in notes] == ["note", "note"] and "2 requests failed on connections" in notes[1].seen
    assert parted(load({60: "error", 90: "hang"}), [(FAULT[0], HEAL[1], 0, 9)]) == []  # while it lasted, or no failure that ends
    assert [one.sent for one in parted(records, [(5.0, 8.05, 0, 0), (8.5, 8.8, 1, 1)])] == [8.2, 9.0]  # one after the other, one each


def test_a_load_that_did_not_run_through_and_vague_moments_prove_nothing() -> None:
    with pytest.raises(UnknownFact, match="did not run through"):
        measure(load({}, seconds=6), FAULT, HEAL)
    vague = measure(load({}), (5.0, 7.0), HEAL)
    with pytest.raises(UnknownFact, match="too uncertain"):
        list(behaved("proxy", vague, Expectation(3.0), load({})))
    slow = measure([request(n / 10, late=1.0) for n in range(300)], FAULT, HEAL)
    assert slow.uncertainty_s == pytest.approx(1.0)


# -- campaigns -------------------------------------------------------------------------------------------------------------

SPARE = deployment(
    [engine("p0/dp0", restart="r"), engine("p0/dp1", restart="r", http_port=7001), engine("d0", role="decode", restart="r", http_port=7002)]
)  # fmt: skip


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_a_campaign_follows_from_its_seed_and_never_takes_the_last_engine(seed: int, count: int) -> None:
    events = draw(SPARE, seed, count)
    assert events == draw(SPARE, seed, count) and len(events) == count
    # d0 is the last decoder, and binds no port group: it may be slow, and no more.
    assert all(event.engine.startswith("p0") or event.kind in ("http-latency", "http-slicer") for event in events)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.sets(st.integers(0, 9), min_size=1, max_size=3))
def test_a_failing_schedule_is_reduced_to_what_fails(numbers: list[int], culprits: set[int]) -> None:
    events = [Event("stall", str(number), 1.0) for number in [*numbers, *culprits]]

    def fails(some: list[Event]) -> bool:
        return culprits <= {int(event.engine) for event in some}

    fewer = reduce(events, fails)
    assert fails(fewer) and len(fewer) == len(culprits) and [event for event in events if event in fewer][: len(fewer)]


def test_a_load_the_deployment_cannot_carry_is_no_load_to_judge_by(tmp_path: Path) -> None:
    observation = Observation.__new__(Observation)
    observation.folder, observation.plan = tmp_path, SimpleNamespace(stages=[SimpleNamespace(rate=2.0)])  # type: ignore[assignment]
    observation._slots = [SimpleNamespace(at=at) for at in (0.0, 0.5, 1.0, 1.5, 99.0)]  # type: ignore[misc]
    (tmp_path / "load").mkdir()
    lines = [{"start": now() - 10}, {"scheduled": 0, "outcome": "ok"}, {"scheduled": 0.5, "outcome": "ok"}]
    records = tmp_path / "load" / "records.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    observation.must_keep_up()
    records.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    with pytest.raises(UnknownFact, match="more than the deployment carries: 1 of 4 requests"):
        observation.must_keep_up()


def test_a_wrong_answer_whose_kv_was_given_up_before_says_so() -> None:
    some, other = "0e6485ed007c4952b1dc76c7741b1aaa", "1e6485ed007c4952b1dc76c7741b1bbb"
    p = engine("p0")
    said = f"(Worker pid=7) ERROR [mooncake_connector.py:233] Force freed expired request: cmpl-{some}-0-be52. Reason: Request exceeded timeout threshold"
    logs = Logs({"p0": [said]}, {}, datetime.date(2026, 1, 2))
    wrong = [request(1.0, "wrong").model_copy(update={"served_id": f"cmpl-{one}"}) for one in (some, other)]
    assert "the KV of 1 of these 2" in freed_before(deployment([p]), wrong, logs)
    assert freed_before(deployment([p]), wrong[1:], logs) == ""
