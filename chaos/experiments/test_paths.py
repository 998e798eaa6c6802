"""The network between proxy, P and D is slow, cut or broken: HTTP, KV side channel, KV data. Each fault says which path it really hits."""

import pytest

from chaos.experiment import run
from chaos.faults.network import Partition, Toxic
from chaos.paths import asked_end, data_end, data_ports, http_ports, side_channel, transfers_over_tcp
from pdgate.plugin import check
from pdgate.rules import loss
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Expectation

HURT_S, AFTER_S = 2.0, 5.0
LONGER_THAN_RETRIES_S = 4.0  # a connector asks three times, a second each (vllm-ascend mooncake_connector.py)
HTTP, SIDE_CHANNEL, DATA = "HTTP between proxy and decode engine", "KV side channel", "KV data over TCP"
# Toxic and its attributes (milliseconds, KB/s, bytes): what slows and what breaks. Toxiproxy 2.12, README "Toxics".
SLOW_HTTP = {
    "latency": {"latency": 400}, "jitter": {"latency": 100, "jitter": 80}, "bandwidth": {"rate": 50},
    "slicer": {"average_size": 64, "size_variation": 32, "delay": 500}, "slow_close": {"delay": 300},
}  # fmt: skip
CUT_HTTP = {"reset_peer": {"timeout": 20}, "timeout": {"timeout": 200}, "limit_data": {"bytes": 300}}
CUT_SIDE_CHANNEL = {"reset_peer": {"timeout": 0}, "timeout": {"timeout": 100}}
SLOW_DATA = {"latency": {"latency": 50}, "bandwidth": {"rate": 1500}}
CUT_DATA = {"reset_peer": {"timeout": 5}, "limit_data": {"bytes": 20000}}


@pytest.fixture
def poisoned(stage, judged_by):
    """Put toxics into a path of an engine, one after the other under one load, and judge."""

    def go(name, engine, ports, toxics, path, expected, hurt_s=HURT_S):
        host = stage.deployment.host_of(engine)

        def make(kind):
            def with_facts(facts, tag):
                toxic = "latency" if kind == "jitter" else kind
                return Toxic(engine.host, str(engine.address), tuple(ports(facts[host.machine])), tag, toxic, toxics[kind], path, host.toxiproxy, renew=path != HTTP)

            return with_facts

        judged_by(run(stage, name, *map(make, toxics), hurt_s=hurt_s, after_s=AFTER_S + stage.kv_bound_s, in_turn=True), expected)

    return go


@pytest.fixture
def over_tcp(deployment):
    if not transfers_over_tcp(deployment):
        raise NotRun("KV goes from NPU to NPU (RoCE, HCCS), past the host's TCP: nftables and Toxiproxy cannot touch it (pd_kv_transport)")


def slowly(stage, why):
    return Expectation(stage.wish.recovery_s, errors_allowed=False, why=why)


@check("recovery.http-slow", severity="critical", waivable=False)
def test_a_slow_decode_engine_delays_and_breaks_nothing(stage, decoders, poisoned):
    d = decoders[0]
    poisoned("recovery.http-slow", d, lambda _: [d.http_port], SLOW_HTTP, HTTP, slowly(stage, "a few hundred milliseconds are far below every timeout"))


@check("recovery.http-cut", severity="critical", reference="vllm-ascend#13140", waivable=False)
def test_broken_connections_to_a_decode_engine_are_errors_and_no_more(stage, decoders, poisoned):
    d = decoders[0]
    poisoned("recovery.http-cut", d, lambda _: [d.http_port], CUT_HTTP, HTTP, Expectation(stage.wish.recovery_s))


@pytest.mark.smoke
@check("recovery.side-channel-slow", severity="critical", reference="field report R1", waivable=False)
def test_a_slow_side_channel_delays_and_breaks_nothing(stage, prefills, decoders, poisoned):
    end = asked_end(prefills, decoders)
    expected = slowly(stage, "100 ms on the handshake are far below its timeouts")
    poisoned("recovery.side-channel-slow", end, lambda _: side_channel(end), {"jitter": {"latency": 100, "jitter": 20}}, SIDE_CHANNEL, expected)


@check("recovery.side-channel-cut", severity="critical", reference="vllm-ascend#12383", waivable=False)
def test_a_broken_side_channel_costs_requests_and_no_engine(stage, prefills, decoders, poisoned):
    end = asked_end(prefills, decoders)
    poisoned("recovery.side-channel-cut", end, lambda _: side_channel(end), CUT_SIDE_CHANNEL, SIDE_CHANNEL, Expectation(stage.wish.recovery_s), hurt_s=LONGER_THAN_RETRIES_S)


@check("recovery.data-slow", severity="critical", waivable=False)
def test_a_slow_data_path_delays_and_breaks_nothing(stage, over_tcp, prefills, decoders, poisoned):
    end, _ = data_end(prefills, decoders)
    expected = slowly(stage, "the transfers are slower, and still far below their timeout")
    poisoned("recovery.data-slow", end, lambda facts: data_ports(end, facts), SLOW_DATA, DATA, expected)


@check("recovery.data-cut", severity="critical", reference="vllm-ascend#5660, #8427", waivable=False)
def test_broken_transfers_are_errors_and_later_answers_are_right(stage, over_tcp, prefills, decoders, poisoned):
    end, _ = data_end(prefills, decoders)
    poisoned("recovery.data-cut", end, lambda facts: data_ports(end, facts), CUT_DATA, DATA, Expectation(stage.wish.recovery_s))


@check("recovery.transfer-fails", severity="critical", reference="field report R3", waivable=False)
def test_transfers_that_fail_once_twice_always_are_retried_recomputed_or_fail_cleanly(stage, deployment, over_tcp, prefills, decoders, judged_by):
    end, others = data_end(prefills, decoders)

    def refusing(first):
        def make(facts, tag):
            ports = data_ports(end, facts[deployment.host_of(end).machine])
            return Partition(end.host, tuple(sorted({str(other.address) for other in others})), tag, int(HURT_S) + 20, "in", ports, refuse=True, first=first)

        return make

    outcome = run(
        stage, "recovery.transfer-fails", refusing(1), refusing(2), refusing(None), hurt_s=HURT_S, after_s=AFTER_S + stage.kv_bound_s, in_turn=True
    )
    answer, why = loss.expectation(deployment, outcome.before, "transfer-fails")
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=answer == "failed", why=why))


@check("recovery.partition", severity="critical", reference="vllm#35943", waivable=False)
def test_prefill_and_decode_cut_off_from_each_other_fail_cleanly_and_find_back(stage, deployment, prefills, decoders, judged_by):
    p, d = prefills[0], decoders[0]
    if deployment.host_of(p).machine == deployment.host_of(d).machine:
        raise NotRun("P and D share a machine: there is nothing to cut between them")
    beside_p = any(deployment.host_of(proxy).machine == deployment.host_of(p).machine for proxy in deployment.proxies)
    spared = http_ports(deployment) if beside_p else ()  # a proxy that lives beside P must go on reaching D

    def cut(way):
        return lambda facts, tag: Partition(p.host, (str(d.address),), tag, int(HURT_S) + 20, way, but=spared)

    outcome = run(stage, "recovery.partition", cut("in"), cut("both"), hurt_s=HURT_S, after_s=AFTER_S + stage.kv_bound_s, in_turn=True)
    judged_by(outcome, Expectation(stage.wish.recovery_s))
