"""The port group is judged by who owns it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdgate.connectors import CONNECTORS, parse_version, transfer_engine_ranges
from pdgate.facts.model import Container, Listener, NpuSmi, PortSettings, UnknownFact
from pdgate.rules import ports
from pdgate.rules.finding import NotRun
from tests.build import deployment, engine, facts, process, running_prefill


def listeners_with(*changed: Listener) -> list[Listener]:
    kept = {listener.port: listener for listener in running_prefill().listeners.get()}
    return list({**kept, **{listener.port: listener for listener in changed}}.values())


def test_a_healthy_group_raises_nothing() -> None:
    own = running_prefill()
    assert list(ports.owned_by_their_workers(engine(), own)) == []
    assert list(ports.on_the_right_address(engine(), own)) == []


def test_the_stolen_port_of_report_r1_names_its_owner() -> None:
    seen = running_prefill(
        listeners=listeners_with(Listener(address="0.0.0.0", port=28001, inode=9, pid=99)),
        processes=[*running_prefill().processes.get(), process(99, argv=["/usr/sbin/grafana", "server"])],
    )
    (finding,) = ports.owned_by_their_workers(engine(), seen)
    assert "28001" in finding.seen and "pid 99" in finding.seen and "grafana" in finding.seen


def test_a_worker_of_another_engine_is_foreign_too() -> None:
    seen = running_prefill(
        listeners=listeners_with(Listener(address="10.0.0.1", port=28001, inode=9, pid=99)),
        processes=[*running_prefill().processes.get(), process(99, 1, comm="VLLM::Worker_TP")],
    )
    (finding,) = ports.owned_by_their_workers(engine(), seen)
    assert "orphaned" in finding.seen


def test_a_missing_worker_is_named_with_its_slot() -> None:
    seen = running_prefill(listeners=[one for one in running_prefill().listeners.get() if one.port != 28001])
    (finding,) = ports.owned_by_their_workers(engine(), seen)
    assert "nobody listens on port 28001" in finding.seen and "TP 1 (device 1)" in finding.expected


def test_one_worker_on_two_ports_is_wrong() -> None:
    seen = running_prefill(listeners=listeners_with(Listener(address="10.0.0.1", port=28001, inode=9, pid=12)))
    (finding,) = ports.owned_by_their_workers(engine(), seen)
    assert "both are held by" in finding.seen


def test_the_device_npu_smi_tells_must_be_that_of_the_slot() -> None:
    table = NpuSmi.model_validate({
        "version": "24", "chips": [{"npu": n, "chip": 0, "phy_id": None, "name": "910B", "health": "OK", "bus_id": "x"} for n in range(2)],
        "processes": [{"npu": 1, "chip": 0, "pid": 12, "name": "w"}, {"npu": 0, "chip": 0, "pid": 13, "name": "w"}],
    })  # fmt: skip
    found = list(ports.owned_by_their_workers(engine(), running_prefill(npu=table)))
    assert [finding.seen.rpartition(" ")[2] for finding in found] == ["1", "0"]


def test_without_owners_the_group_is_unknown_not_fine() -> None:
    seen = running_prefill(listeners=listeners_with(Listener(address="10.0.0.1", port=28000, inode=2, pid=None)))
    with pytest.raises(UnknownFact, match="needs root"):
        list(ports.owned_by_their_workers(engine(), seen))


def test_a_decode_engine_binds_no_group() -> None:
    with pytest.raises(NotRun):
        list(ports.owned_by_their_workers(engine(role="decode"), running_prefill()))


def test_before_start_any_listener_is_in_the_way() -> None:
    seen = facts(listeners=[Listener(address="127.0.0.1", port=28001, inode=1, pid=5)], processes=[process(5)])
    (finding,) = ports.is_free(engine(), seen)
    assert "127.0.0.1:28001" in finding.seen


def test_a_loopback_group_is_on_the_wrong_address() -> None:
    seen = running_prefill(listeners=listeners_with(Listener(address="127.0.0.1", port=28001, inode=9, pid=13)))
    assert list(ports.owned_by_their_workers(engine(), seen)) == []
    (finding,) = ports.on_the_right_address(engine(), seen)
    assert "127.0.0.1" in finding.seen


@pytest.mark.parametrize(
    ("version", "last"), [("0.3.6", 17000), ("0.3.7.post2", 28000), ("0.3.8.post1", 20800), ("0.3.11.post1", 20800), (None, 28000)]
)
def test_the_reserved_range_follows_the_mooncake_version(version: str | None, last: int) -> None:
    assert max(reserved.last for reserved in transfer_engine_ranges("ascend-a2", parse_version(version))) == last


def test_a_group_inside_the_reserved_range_is_named() -> None:
    one = engine(kv_port=20800)
    found = list(ports.outside_reserved_ranges(one, deployment([one]), None))
    assert [finding.seen for finding in found] == ["20800"]  # inclusive: the last port can itself be drawn


def test_the_ephemeral_range_matters_unless_reserved() -> None:
    one = engine(kv_port=36000)
    assert list(ports.outside_the_ephemeral_range(one, running_prefill()))
    kept = PortSettings(ephemeral=(32768, 60999), reserved=[(36000, 36001)])
    assert not list(ports.outside_the_ephemeral_range(one, running_prefill(ports=kept)))


def test_a_published_port_is_taken_even_if_nobody_listens() -> None:
    grafana = Container(id="1", name="grafana", pid=0, network="bridge", image="g", published=[("0.0.0.0", 28001)])
    (finding,) = ports.apart_from_container_mappings(engine(), running_prefill(containers=[grafana]))
    assert "grafana" in finding.seen


def test_http_and_rpc_ports_inside_the_group_collide() -> None:
    one = engine(http_port=28001, dp_rpc_port=28000)
    assert len(list(ports.apart_from_other_ports(one, deployment([one])))) == 2


@given(tp=st.integers(1, 8), dp=st.integers(1, 8), first=st.integers(0, 8), version=st.sampled_from(["0.13.0", "0.18.0", "0.23.0", "9.9"]))
def test_groups_of_consecutive_ranks_tile_without_gap_or_overlap(tp: int, dp: int, first: int, version: str) -> None:
    connector = CONNECTORS["MooncakeConnectorV1"]
    ranks = [
        engine(f"p0/dp{rank}", tp=tp, devices=(), dp_ranks=(rank,), dp_size=first + dp, versions={"vllm_ascend": version})
        for rank in range(first, first + dp)
    ]
    claimed = [claim.port for one in ranks for claim in connector.port_group(one)]
    assert claimed == list(range(28000 + first * tp, 28000 + (first + dp) * tp))


def test_examples_of_the_field_reports() -> None:
    v1 = CONNECTORS["MooncakeConnectorV1"]
    r1 = v1.port_group(engine(tp=8, devices=(), kv_port=30002))
    assert [claim.port for claim in r1] == list(range(30002, 30010))
    r2 = [v1.port_group(engine(f"p/dp{n}", dp_ranks=(n,), dp_size=4, devices=(), kv_port=30000)) for n in range(4)]
    assert [[claim.port for claim in group] for group in r2] == [[30000, 30001], [30002, 30003], [30004, 30005], [30006, 30007]]
