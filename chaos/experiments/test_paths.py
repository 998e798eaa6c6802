"""The network between clients, proxy, P and D is slow, cut or broken: HTTP, side channel, data path."""

import pytest

from chaos.experiment import run
from chaos.faults.network import Partition, Toxic
from pdgate.connectors import connector_of
from pdgate.plugin import check
from pdgate.rules.finding import NotRun
from pdgate.rules.recovery import Expectation

HURT_S, AFTER_S = 2.5, 5.0


def toxic(stage, engine, ports, what, path, **attributes):
    host = stage.deployment.host_of(engine)

    def make(facts, tag):
        return Toxic(engine.host, str(engine.address), tuple(ports), tag, what, attributes, path, host.toxiproxy)

    return make


@pytest.mark.smoke
@check("recovery.side-channel-slow", severity="critical", reference="field report R1", waivable=False)
def test_a_slow_side_channel_delays_and_breaks_nothing(stage, prefills, judged_by):
    ports = [claim.port for claim in connector_of(prefills[0].connector).port_group(prefills[0])]
    if not ports:
        raise NotRun(f"{prefills[0].connector} binds no side channel on prefill engines")
    make = toxic(stage, prefills[0], ports, "latency", "KV side channel", latency=100, jitter=20)
    outcome = run(stage, "recovery.side-channel-slow", make, hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s, errors_allowed=False, why="100 ms on the handshake is far below its timeouts"))


@check("recovery.http-reset", severity="critical", reference="vllm-ascend#13140", waivable=False)
def test_resets_on_a_decode_engines_http_are_errors_and_no_more(stage, decoders, judged_by):
    make = toxic(stage, decoders[0], [decoders[0].http_port], "reset_peer", "HTTP between proxy and decode engine", timeout=20)
    outcome = run(stage, "recovery.http-reset", make, hurt_s=HURT_S, after_s=AFTER_S)
    judged_by(outcome, Expectation(stage.wish.recovery_s))


@check("recovery.partition", severity="critical", reference="vllm#35943", waivable=False)
def test_prefill_and_decode_cut_off_from_each_other_fail_cleanly_and_find_back(stage, prefills, decoders, judged_by):
    p, d = prefills[0], decoders[0]
    if p.host == d.host or stage.deployment.host_of(p).machine == stage.deployment.host_of(d).machine:
        raise NotRun("P and D share a machine: there is nothing to cut between them")
    if any(stage.deployment.host_of(proxy).machine == stage.deployment.host_of(p).machine for proxy in stage.deployment.proxies):
        groups = [claim.port for engine in prefills if engine.host == p.host for claim in connector_of(engine.connector).port_group(engine)]
        if not groups:
            raise NotRun("the proxy shares P's machine and P binds no side channel: the proxy would be cut off too")
        ports = tuple(groups)  # the proxy lives beside P: only the KV side channel is cut
    else:
        ports = ()

    def make(facts, tag):
        return Partition(p.host, (str(d.address),), tag, int(HURT_S) + 20, "in", ports)

    outcome = run(stage, "recovery.partition", make, hurt_s=HURT_S, after_s=AFTER_S + stage.kv_bound_s)
    judged_by(outcome, Expectation(stage.wish.recovery_s))
