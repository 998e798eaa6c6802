"""One request is hit in a chosen phase of its life: what does its client see, is the KV given back, does the deployment serve again?"""

import itertools

import pytest

from chaos import phases
from chaos.experiment import aftermath, killing
from chaos.faults.network import Partition, Throttle
from chaos.paths import peers_of, plain_ports, side_channel
from chaos.single import asked_now, hit
from pdgate.plugin import check
from pdgate.rules import loss, recovery

HURT_S = 1.0
LONGER_THAN_RETRIES_S = 4.0  # a D that still asks when P is back would meet another P


@pytest.fixture
def ended_well(stage, deployment, judge):
    """Judge a hit: the request, the deployment after it, KV, and that nobody else died."""

    def run(found, phase, lost):
        expected = loss.expectation(deployment, found.before, phase)
        judge(itertools.chain(
            [loss.became(f"proxy {stage.proxy.name}", phase, found.record, expected, lost.name, found.good_s)],
            loss.ended_as_expected(f"proxy {stage.proxy.name}", phase, found.record, expected, stage.deadline_s, lost.name),
            recovery.good_again(f"proxy {stage.proxy.name}", found.good_s, stage.wish.restart_s + stage.wish.recovery_s, lost.name),
            aftermath(stage, found),
        ))  # fmt: skip

    return run


@pytest.fixture
def strike(stage):
    """Kill an engine when its aim sees the phase: (engine, aim from engine, tag and victims) -> what was hit."""

    def run(name, engine, aimed, holds=(), hurt_s=HURT_S, **how):
        return hit(stage, name, killing(stage, engine, aimed=aimed), hurt_s=hurt_s, holds=holds, **how)

    return run


@check("recovery.hit.prefilling", severity="critical", reference="field report R3", waivable=False)
def test_a_request_whose_prefill_engine_dies_while_it_prefills(stage, prefills, strike, ended_well):
    p = asked_now(stage, prefills)
    found = strike("recovery.hit.prefilling", p, lambda tag, _: phases.prefilling(stage, p, tag))
    phases.was_prefilling(stage, found)
    ended_well(found, "prefilling", p)


@pytest.mark.smoke
@check("recovery.hit.prefilled", severity="critical", reference="vllm-ascend#17044", waivable=False)
def test_a_request_whose_prefill_engine_dies_once_it_has_prefilled(stage, prefills, strike, ended_well):
    p = asked_now(stage, prefills)
    found = strike("recovery.hit.prefilled", p, lambda tag, victims: phases.prefill_done(stage, p, tag, victims))
    phases.was_prefilled(stage, found)
    ended_well(found, "prefilled", p)


@check("recovery.hit.handshake", severity="critical", reference="docs/track-record.md", waivable=False)
def test_a_request_whose_prefill_engine_dies_during_the_handshake(stage, prefills, strike, ended_well):
    p = asked_now(stage, prefills)
    # Met anew: a D that knows its peer shakes no hand.
    found = strike("recovery.hit.handshake", p, lambda tag, victims: phases.handshake(stage, p, tag, victims), anew=p, hurt_s=LONGER_THAN_RETRIES_S)
    phases.was_prefilled(stage, found)
    ended_well(found, "handshake", p)


@pytest.mark.smoke
@check("recovery.hit.transferring", severity="critical", reference="field report R3; vllm-ascend#17044", waivable=False)
def test_a_request_whose_prefill_engine_dies_in_mid_transfer(stage, prefills, strike, ended_well):
    p = asked_now(stage, prefills)
    whole = phases.whole_transfer(stage, p)

    def slowed(facts, tag):  # so that it lasts two seconds, whatever the network is
        return Throttle(p.host, peers_of(stage, p), tag, max(256, whole // 2 // 1024), plain_ports(stage))

    found = strike("recovery.hit.transferring", p, lambda tag, _: phases.transfer_in_flight(stage, p, tag, whole), holds=[slowed])
    phases.was_in_flight(found, whole)
    ended_well(found, "transferring", p)


@check("recovery.hit.received", severity="critical", reference="vllm#50425", waivable=False)
def test_a_decode_engine_dies_with_kv_it_has_not_acknowledged_and_prefill_gets_its_blocks_back(stage, prefills, decoders, strike, ended_well):
    d = asked_now(stage, decoders)
    ports = tuple(port for p in prefills for port in side_channel(p) if p.host == prefills[0].host)

    def unacknowledged(facts, tag):
        return Partition(prefills[0].host, (str(d.address),), tag, 60, "in", ports)

    found = strike("recovery.hit.received", d, lambda tag, _: phases.received(stage, d, tag), holds=[unacknowledged])
    phases.was_received(stage, found)
    ended_well(found, "received", d)


@check("recovery.hit.decoding", severity="critical", reference="field report R3; vllm-ascend#13140", waivable=False)
def test_a_request_whose_decode_engine_dies_while_it_decodes(stage, decoders, strike, ended_well):
    d = asked_now(stage, decoders)
    found = strike("recovery.hit.decoding", d, lambda tag, _: phases.decoding(stage, d, tag))
    phases.was_decoding(found)
    ended_well(found, "decoding", d)
