"""The paths between clients, proxy, P and D, as ports and addresses: HTTP, KV side channel, KV data. What is no TCP of the host cannot be hurt there."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import requests

from chaos.experiment import Stage
from pdgate.connectors import connector_of
from pdgate.facts.model import HostFacts, UnknownFact
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import NotRun
from pdgate.rules.running import need_running

ASK_S = 5.0


def port_group(engine: Engine) -> list[int]:
    """The ports planned for it; raises NotRun where its connector plans none for its role."""
    ports = [claim.port for claim in connector_of(engine.connector).port_group(engine)]
    if not ports:
        raise NotRun(f"{engine.connector} binds no side channel on {engine.role} engines")
    return ports


def side_channel(engine: Engine) -> list[int]:
    """Ports on which D talks to P about a transfer: the port group, or what the bootstrap server that holds its one port says.

    Raises NotRun where there are none, UnknownFact where the bootstrap server does not say.
    """
    group = port_group(engine)
    return group if connector_of(engine.connector).side_channel == "zmq" else registered(f"http://{engine.address}:{group[0]}/query")


def asked_on(engine: Engine) -> set[int]:
    """Its port group and its side channel, which may be another thing; nothing where its role has none."""
    return {*port_group(engine), *side_channel(engine)} if connector_of(engine.connector).binds_on(engine) else set()


def asked_end(prefills: Sequence[Engine], decoders: Sequence[Engine]) -> Engine:
    """An engine that is asked on its side channel: P as a rule, D where P writes to it layer by layer."""
    return next((engine for engine in (*prefills, *decoders) if connector_of(engine.connector).binds_on(engine)), prefills[0])


def registered(url: str) -> list[int]:
    """Ports of the workers a bootstrap server knows. Source: vllm mooncake/mooncake_utils.py, `MooncakeBootstrapServer.query` (00f4240e):
    `{dp rank: {"engine_id": …, "worker_addr": {tp rank: {pp rank: "tcp://host:port"}}}}`."""
    try:
        reply = requests.get(url, timeout=ASK_S)
        reply.raise_for_status()
        found = {urlsplit(address).port for entry in reply.json().values() for ranks in entry["worker_addr"].values() for address in ranks.values()}
    except (requests.RequestException, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnknownFact(f"{url} does not say where its workers listen: {error}") from None
    ports = sorted(port for port in found if port)
    if not ports:
        raise UnknownFact(f"{url} names no worker: none has registered")
    return ports


def http_ports(deployment: Deployment) -> tuple[int, ...]:
    """Ports clients and proxies speak HTTP on."""
    return tuple(sorted({engine.http_port for engine in deployment.engines if engine.http_port} | {proxy.port for proxy in deployment.proxies}))


def peers_of(stage: Stage, engine: Engine) -> tuple[str, ...]:
    """Addresses of the other side of a transfer; raises NotRun where it does not use the host's TCP, or none is known."""
    host = stage.deployment.host_of(engine)
    if host.platform.startswith("ascend") and not transfers_over_tcp(stage.deployment):
        raise NotRun("KV goes from NPU to NPU (RoCE, HCCS), past the host's TCP: its bytes cannot be followed there")
    wanted = "decode" if engine.serves_prefill else "prefill"
    found = {str(other.address) for other in stage.deployment.engines if getattr(other, f"serves_{wanted}") and other.address and other.address != engine.address}
    if not found:
        raise NotRun("P and D share an address, so their bytes cannot be told from others")
    return tuple(sorted(found))


def transfers_over_tcp(deployment: Deployment) -> bool:
    """Whether KV goes over the hosts' TCP, as the inventory says (pd_kv_transport), else by platform."""
    return all(host.kv_transport == "tcp" if host.kv_transport else not host.platform.startswith("ascend") for host in deployment.hosts.values())


def plain_ports(stage: Stage) -> tuple[int, ...]:
    """Ports of everything that is not KV: HTTP of engines and proxies, side channels."""
    ports = {*http_ports(stage.deployment), *(engine.dp_rpc_port for engine in stage.deployment.engines if engine.dp_rpc_port)}
    return tuple(sorted(ports.union(*map(asked_on, stage.deployment.engines))))


def data_end(prefills: Sequence[Engine], decoders: Sequence[Engine]) -> tuple[Engine, Sequence[Engine]]:
    """The engine whose ports KV connections come to, and those they come from: D fetches from P, or P writes to D."""
    pulled = connector_of(prefills[0].connector).kv_moves_by == "pull"
    return (prefills[0], decoders) if pulled else (decoders[0], prefills)


def data_ports(engine: Engine, facts: HostFacts) -> tuple[int, ...]:
    """Ports KV connections come to: what the engine's processes listen on beside HTTP, side channel and loopback."""
    running = need_running(engine, facts)
    known = {engine.http_port, engine.dp_rpc_port, *asked_on(engine)}
    found = {
        listener.port for listener in facts.listeners.get()
        if listener.pid in running.pids and listener.port not in known and not listener.address.startswith(("127.", "::1"))
    }  # fmt: skip
    if not found:
        raise NotRun(f"{engine.name} listens on no port of a data path")
    return tuple(sorted(found))
