"""The KV port group: free before start, held by its own workers afterwards, out of everybody's way."""

from __future__ import annotations

from collections.abc import Iterator

from pdgate.connectors import PortClaim, connector_of, parse_version, transfer_engine_ranges
from pdgate.facts.model import HostFacts, Process, UnknownFact
from pdgate.inventory.model import Deployment, Engine
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.running import (
    RunningEngine,
    describe,
    listeners_on,
    need_running,
    owner_of,
    running_engine,
)  # fmt: skip

STOLEN = (
    "the port answers, so nc and curl succeed, but its owner is not the worker: D waits for KV that nobody sends "
    "and requests hang until the abort timeout"
)


def group_of(engine: Engine) -> list[PortClaim]:
    """The engine's port group; raises NotRun where its role binds none."""
    claims = connector_of(engine.connector).port_group(engine)
    if not claims:
        raise NotRun(f"{engine.connector} binds no port group on a {engine.role} engine")
    return claims


def identity_group(engine: Engine) -> list[int]:
    """The ports that name the engine to its peers, whether or not its role binds them."""
    connector = connector_of(engine.connector)
    binder = engine.model_copy(update={"role": "both"})
    return [claim.port for claim in connector.port_group(binder)]


def is_free(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """Before start: nobody listens on any port of the group, whatever the address."""
    for claim in group_of(engine):
        for listener in listeners_on(facts, claim.port):
            yield Finding(
                target=engine.name,
                expected=f"port {claim.port} of the group is free",
                seen=f"{listener.address}:{claim.port} is held by {_owner_words(facts, listener.pid)}",
                why="the worker cannot bind its side channel: the engine fails to start, or hangs on older versions",
                remedy=f"stop that process or give the group another pd_kv_port; look first: ss -tlnp sport = :{claim.port}",
            )


def owned_by_their_workers(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """Every port of the group is held by that engine's own worker: by process, not by name and not by reachability."""
    claims = group_of(engine)
    running = running_engine(engine, facts)
    holders: dict[int, int] = {}
    for claim in claims:
        listeners = listeners_on(facts, claim.port)
        if not listeners:
            yield _missing(engine, claim, facts, running)
            continue
        owners = [(listener, owner_of(facts, listener)) for listener in listeners]
        foreign = [(listener, owner) for listener, owner in owners if running is None or owner.pid not in running.pids]
        if foreign:
            listener, owner = foreign[0]
            yield Finding(
                target=engine.name,
                expected=f"port {claim.port} is held by the worker of {_slot_words(claim)} of {engine.name}",
                seen=f"{listener.address}:{claim.port} is held by {describe(facts, owner)}",
                why=STOLEN,
                remedy=f"move that process off the group, then restart {engine.name}; the group is {claims[0].port}-{claims[-1].port}",
            )
            continue
        owner = owners[0][1]
        yield from _wrong_worker(engine, claim, owner, holders, facts)
        holders[owner.pid] = claim.port


def _wrong_worker(engine: Engine, claim: PortClaim, owner: Process, holders: dict[int, int], facts: HostFacts) -> Iterator[Finding]:
    """One worker, one port; and where npu-smi tells which device a worker sits on, the device of that slot."""
    connector = connector_of(engine.connector)
    if connector.holder == "worker" and owner.pid in holders:
        yield Finding(
            target=engine.name,
            expected=f"ports {holders[owner.pid]} and {claim.port} are held by two workers",
            seen=f"both are held by {describe(facts, owner)}",
            why="one worker answers for another's KV, and D reads the wrong shard",
            remedy=f"restart {engine.name} and read its log from the start",
        )
    if not facts.npu.known or claim.slot.device is None:
        return
    seats = {process.pid: _device_id(process.npu, process.chip, facts) for process in facts.npu.get().processes}
    seat = seats.get(owner.pid)
    if seat is not None and seat != claim.slot.device:
        yield Finding(
            target=engine.name,
            expected=f"port {claim.port} is held by the worker on device {claim.slot.device}",
            seen=f"{describe(facts, owner)} sits on device {seat}",
            why="the ranks of the group are not on the devices the deployment declares",
            remedy="compare ASCEND_RT_VISIBLE_DEVICES of the launch script with pd_devices",
        )


def _device_id(npu: int, chip: int, facts: HostFacts) -> int:
    for entry in facts.npu.get().chips:
        if (entry.npu, entry.chip) == (npu, chip):
            return npu if entry.phy_id is None else entry.phy_id
    return npu


def _missing(engine: Engine, claim: PortClaim, facts: HostFacts, running: RunningEngine | None) -> Finding:
    state = f"{engine.name} runs as pid {running.api.pid}" if running else f"{engine.name} is not running"
    return Finding(
        target=engine.name,
        expected=f"port {claim.port} is held by the worker of {_slot_words(claim)} of {engine.name}",
        seen=f"nobody listens on port {claim.port}; {state}",
        why="D cannot reach that rank of P: requests that need it wait and then fail",
        remedy=f"read the log of {engine.name}: 'Address already in use' or a dead worker; then restart the engine",
    )


def on_the_right_address(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """The group listens on the address peers use, not on loopback or another network."""
    claims = group_of(engine)
    running = need_running(engine, facts)
    if engine.address is None:
        raise UnknownFact(f"{engine.name}: the inventory gives no address (pd_address or an IP in ansible_host)")
    any_is_fine = connector_of(engine.connector).binds_any_address
    for claim in claims:
        own = [found for found in listeners_on(facts, claim.port) if found.pid in running.pids]
        for listener in own:
            if listener.address == engine.address or (any_is_fine and listener.any_address):
                continue
            yield Finding(
                target=engine.name,
                expected=f"port {claim.port} listens on {engine.address}",
                seen=f"it listens on {listener.address}",
                why="peers connect to the address the engine advertises; on another one they meet nobody, or a stranger",
                remedy="set VLLM_HOST_IP and HCCL_IF_IP to the business address in the launch script "
                "and check the host name's entry in /etc/hosts",
            )


def overlapping(deployment: Deployment, machine: str, facts: HostFacts) -> Iterator[Finding]:
    """No two engines of one machine share a port of their groups, as they really run (as declared where they don't)."""
    groups: dict[str, set[int]] = {}
    for engine in deployment.engines_on(machine):
        running = running_engine(engine, facts)
        groups[engine.name] = set(identity_group(_as_running(running) if running else engine))
    names = list(groups)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            shared = sorted(groups[first] & groups[second])
            if shared:
                yield Finding(
                    target=first,
                    expected=f"the port groups of {first} and {second} on {machine} are disjoint",
                    seen=f"both claim {_ranges(shared)}",
                    why="the engine that starts second cannot bind, and peers that key on the port mix the two up",
                    remedy="give one of them a pd_kv_port beyond the other's group (dp_size x tp x pp x pcp ports)",
                )


def _as_running(running: RunningEngine) -> Engine:
    """The engine with what its command line says in place of what the inventory declares."""
    args, config, engine = running.args, running.kv_config, running.engine
    update: dict[str, object] = {}
    if str(config.get("kv_port", "")).isdigit():
        update["kv_port"] = int(config["kv_port"])
    for flag, key in (("tensor_parallel_size", "tp"), ("pipeline_parallel_size", "pp")):
        if args.get(flag, "").isdigit():
            update[key] = int(args[flag])
    if args.get("data_parallel_rank", "").isdigit():
        update["dp_ranks"] = (int(args["data_parallel_rank"]),)
    # Identity only: which device a slot sits on plays no part in the port formula.
    return engine.model_copy(update={**update, "devices": ()})


def outside_reserved_ranges(engine: Engine, deployment: Deployment, facts: HostFacts | None) -> Iterator[Finding]:
    """The group stays out of the ranges Mooncake draws random listeners from."""
    connector = connector_of(engine.connector)
    if not connector.uses_transfer_engine:
        raise NotRun(f"{engine.connector} uses no Mooncake transfer engine")
    claims = group_of(engine)
    running = running_engine(engine, facts) if facts is not None and facts.listeners.known else None
    versions = running.versions if running else engine.versions
    environment = running.environment if running else {}
    platform = deployment.host_of(engine).platform
    for reserved in transfer_engine_ranges(platform, parse_version(versions.get("mooncake")), environment):
        inside = [claim.port for claim in claims if claim.port in reserved]
        if inside:
            yield Finding(
                target=engine.name,
                expected=f"no port of the group in {reserved.first}-{reserved.last}: {reserved.what}",
                seen=f"{_ranges(inside)}",
                why="a transfer engine may draw the same port at random: start-up fails now and then, and a restart 'fixes' it",
                remedy="choose a pd_kv_port above the range, 28001 or more on 8 NPUs and 36001 or more on 16",
                reference=f"{reserved.source}; vllm-ascend#14263, #8938",
            )


def outside_the_ephemeral_range(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """The group is not in the range outgoing connections draw from, or is reserved against it."""
    claims = group_of(engine)
    settings = facts.ports.get()
    first, last = settings.ephemeral
    exposed = [
        claim.port for claim in claims
        if first <= claim.port <= last and not any(low <= claim.port <= high for low, high in settings.reserved)
    ]  # fmt: skip
    if exposed:
        yield Finding(
            target=engine.name,
            expected=f"no unreserved port of the group in net.ipv4.ip_local_port_range {first}-{last}",
            seen=_ranges(exposed),
            why="any outgoing connection of the host may hold the port at the moment the engine starts",
            remedy=f"sysctl -w net.ipv4.ip_local_reserved_ports={claims[0].port}-{claims[-1].port}, or a lower pd_kv_port",
        )


def apart_from_other_ports(engine: Engine, deployment: Deployment) -> Iterator[Finding]:
    """The group meets no HTTP, DP-RPC or proxy port declared for the same machine."""
    claims = {claim.port for claim in group_of(engine)}
    machine = deployment.host_of(engine).machine
    others = [(other.http_port, f"HTTP port of {other.name}") for other in deployment.engines_on(machine)]
    others += [(other.dp_rpc_port, f"DP-RPC port of {other.host}") for other in deployment.engines_on(machine)]
    others += [(proxy.port, f"port of proxy {proxy.name}") for proxy in deployment.proxies_on(machine)]
    for port, what in dict.fromkeys(others):
        if port in claims:
            yield Finding(
                target=engine.name,
                expected=f"port {port} belongs to the KV port group alone",
                seen=f"it is also the {what}",
                why="whichever starts second cannot bind",
                remedy="move pd_kv_port or the other port; the group needs all its consecutive ports",
            )


def apart_from_container_mappings(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """No container publishes a port of the group: a mapping takes the port even when nothing inside listens."""
    claims = {claim.port for claim in group_of(engine)}
    for container in facts.containers.get():
        for address, port in container.published:
            if port in claims:
                yield Finding(
                    target=engine.name,
                    expected=f"port {port} of the group is published by no container",
                    seen=f"container {container.name} ({container.image}) publishes {address}:{port}",
                    why="connections from other hosts are redirected into that container before the worker sees them",
                    remedy=f"publish {container.name} on another port: docker ps --format '{{{{.Names}}}} {{{{.Ports}}}}'",
                )


def _slot_words(claim: PortClaim) -> str:
    slot = claim.slot
    parts = [f"DP {slot.dp_rank}", f"TP {slot.tp_rank}"]
    parts += [f"PP {slot.pp_rank}"] if slot.pp_rank else []
    parts += [f"PCP {slot.pcp_rank}"] if slot.pcp_rank else []
    return " ".join(parts) + (f" (device {slot.device})" if slot.device is not None else "")


def _owner_words(facts: HostFacts, pid: int | None) -> str:
    process = facts.process(pid) if pid is not None and facts.processes.known else None
    return describe(facts, process) if process else "a process the probe cannot see (needs root)"


def _ranges(ports: list[int]) -> str:
    """`28000-28003, 28010` for a sorted list."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and port == runs[-1][-1] + 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
