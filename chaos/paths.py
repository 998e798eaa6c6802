"""The paths between clients, proxy, P and D, as ports and addresses: HTTP, KV side channel, KV data. What is no TCP of the host cannot be hurt there."""

from __future__ import annotations

from chaos.experiment import Stage
from pdgate.connectors import connector_of
from pdgate.facts.model import HostFacts
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import NotRun
from pdgate.rules.running import need_running


def side_channel(engine: Engine) -> list[int]:
    ports = [claim.port for claim in connector_of(engine.connector).port_group(engine)]
    if not ports:
        raise NotRun(f"{engine.connector} binds no side channel on {engine.role} engines")
    return ports


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
    ports = {engine.http_port for engine in stage.deployment.engines if engine.http_port} | {proxy.port for proxy in stage.deployment.proxies}
    ports |= {engine.dp_rpc_port for engine in stage.deployment.engines if engine.dp_rpc_port}
    for engine in stage.deployment.engines:
        ports |= {claim.port for claim in connector_of(engine.connector).port_group(engine)}
    return tuple(sorted(ports))


def data_ports(engine: Engine, facts: HostFacts) -> tuple[int, ...]:
    """Ports KV is fetched from (or pushed to): what the engine's processes listen on beside HTTP, side channel and loopback."""
    running = need_running(engine, facts)
    known = {engine.http_port, engine.dp_rpc_port, *(claim.port for claim in connector_of(engine.connector).port_group(engine))}
    found = {
        listener.port for listener in facts.listeners.get()
        if listener.pid in running.pids and listener.port not in known and not listener.address.startswith(("127.", "::1"))
    }  # fmt: skip
    if not found:
        raise NotRun(f"{engine.name} listens on no port of a data path")
    return tuple(sorted(found))
