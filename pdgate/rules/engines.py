"""The engines that run are the engines the inventory declares; P was complete before D started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

from pdgate.facts.model import HostFacts, Interval, LogFacts, UnknownFact
from pdgate.facts.parse.vllm_args import parse_serve_args
from pdgate.inventory.model import Deployment, Engine, Host
from pdgate.rules.finding import Finding, NotRun
from pdgate.rules.running import describe, need_running, running_engine

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def is_running(engine: Engine, deployment: Deployment, facts: HostFacts) -> Iterator[Finding]:
    """A vLLM serves the engine's HTTP port, in the container it belongs to."""
    running = running_engine(engine, facts)
    declared = deployment.host_of(engine).container
    if running is None:
        yield Finding(
            target=engine.name,
            expected=f"a vLLM listens on HTTP port {engine.http_port}",
            seen="nobody listens there",
            why="the engine is down: its share of the traffic fails, and other checks of it cannot run",
            remedy=f"read its log{f' {engine.log}' if engine.log else ''} from the start and restart it",
        )
        return
    if declared and facts.containers.known:
        container = facts.container_of(running.api.pid)
        if container is None or container.name != declared:
            yield Finding(
                target=engine.name,
                expected=f"the engine runs in container {declared}",
                seen=f"port {engine.http_port} is served by {describe(facts, running.api)}",
                why="another process answers in the engine's name",
                remedy="stop the stray process, or correct pd_container",
            )


def has_no_orphans(host: Host, facts: HostFacts) -> Iterator[Finding]:
    """No engine core or worker lives on without its API server, holding devices, memory and ports."""
    by_pid = {process.pid: process for process in facts.processes.get()}
    listeners = facts.listeners.get()
    for process in by_pid.values():
        if not process.comm.startswith("VLLM::"):
            continue
        line = facts.lineage(process.pid)
        if any(parse_serve_args(ancestor.argv) is not None for ancestor in line):
            continue
        ports = sorted(listener.port for listener in listeners if listener.pid == process.pid)
        held = f", holding port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}" if ports else ""
        yield Finding(
            target=host.name,
            expected="every engine core and worker has its API server above it",
            seen=f"{describe(facts, process)}{held}",
            why="nothing serves through it any more, and the next start meets its ports: 'Address already in use'",
            remedy=f"end it once you have its logs: kill {process.pid}",
        )


def runs_as_declared(engine: Engine, facts: HostFacts) -> Iterator[Finding]:
    """Role, connector, ports, parallel sizes and model on the command line are those of the inventory."""
    running = need_running(engine, facts)
    args, config = running.args, running.kv_config
    if not config:
        yield _differs(engine, "--kv-transfer-config", engine.connector, "none: this engine transfers no KV")
        return
    pairs = [
        ("kv_connector", engine.connector, config.get("kv_connector")),
        ("kv_role", ROLES[engine.role], config.get("kv_role")),
        ("--tensor-parallel-size", str(engine.tp), args.get("tensor_parallel_size", "1")),
        ("--pipeline-parallel-size", str(engine.pp), args.get("pipeline_parallel_size", "1")),
    ]
    if engine.kv_port is not None and "kv_port" in config:
        pairs.append(("kv_port", str(engine.kv_port), config.get("kv_port")))
    if engine.model is not None:
        served = args.get("served_model_name") or args.get("model")
        pairs.append(("--served-model-name", engine.model, served))
    if engine.dp_mode == "external" and "data_parallel_rank" in args:
        pairs.append(("--data-parallel-rank", str(engine.dp_ranks[0]), args["data_parallel_rank"]))
    if "data_parallel_size" in args:
        pairs.append(("--data-parallel-size", str(engine.dp_size), args["data_parallel_size"]))
    for key, declared, seen in pairs:
        if str(seen) != declared:
            yield _differs(engine, key, declared, str(seen))


def _differs(engine: Engine, key: str, declared: str, seen: str) -> Finding:
    return Finding(
        target=engine.name,
        expected=f"{key} is {declared}, as the inventory declares",
        seen=seen,
        why="every other judgement of this engine rests on the declaration, and its peers on the same values",
        remedy="correct the inventory or the launch script, whichever is wrong",
    )


def prefill_was_complete_first(deployment: Deployment, facts: dict[str, HostFacts]) -> Iterator[Finding]:
    """Every P had said 'Application startup complete' before any D was started (clocks and their doubt included)."""
    complete: dict[str, Interval] = {}
    started: dict[str, Interval] = {}
    for engine in deployment.engines:
        own = facts[deployment.host_of(engine).machine]
        running = running_engine(engine, own)
        if running is None:
            continue  # engines.running reports it
        if engine.role == "prefill":
            complete[engine.name] = _startup_complete(engine, deployment, facts)
        elif engine.role == "decode":
            begun = running.api.started
            started[engine.name] = _ours(Interval(low=begun - 0.1, high=begun + 0.1), own)
    if not complete or not started:
        raise NotRun("no prefill engine and decode engine run beside each other")
    last_p = max(complete, key=lambda name: complete[name].low)
    first_d = min(started, key=lambda name: started[name].high)
    late = complete[last_p].low - started[first_d].high
    if late > 0:
        yield Finding(
            target=first_d,
            expected=f"decode starts after {last_p} has completed",
            seen=f"{first_d} was started at least {late:.0f} s before {last_p} said 'Application startup complete'",
            why="D meets ports that are not owned yet; first requests wait and time out",
            remedy="start P first, wait for 'Application startup complete' and the port group, then start D",
        )


def _startup_complete(engine: Engine, deployment: Deployment, facts: dict[str, HostFacts]) -> Interval:
    """When the engine's last start-up completed, in the controller's clock."""
    own = facts[deployment.host_of(engine).machine]
    if engine.log is None:
        raise UnknownFact(f"{engine.name}: no pd_log in the inventory, so its start-up cannot be dated")
    log = own.logs[engine.log].get() if engine.log in own.logs else None
    if log is None:
        raise UnknownFact(f"{engine.name}: {engine.log} was not collected")
    stamps = [stamp for line in log.started if (stamp := log_time(line, log, own.clock.get().utc_offset)) is not None]
    if not stamps or not any("Application startup complete" in line for line in log.started):
        raise UnknownFact(f"{engine.name}: {engine.log} has no dated start-up with 'Application startup complete'")
    # uvicorn's own line bears no time: the nearest vLLM line above it does, within the second or two.
    return _ours(Interval(low=stamps[-1], high=stamps[-1] + 3), own)


def _ours(host_time: Interval, facts: HostFacts) -> Interval:
    offset = facts.clock.get().offset_s
    return Interval(low=host_time.low - offset.high, high=host_time.high - offset.low)


STAMP = re.compile(r"\b(\d{2})-(\d{2}) (\d{2}):(\d{2}):(\d{2})\b")


def naive_log_time(line: str, modified: float) -> datetime | None:
    """vLLM's `MM-DD HH:MM:SS`, which has neither year nor zone, with the year that brings it nearest to the file's mtime."""
    found = STAMP.search(re.sub(r"\x1b\[[\d;]*m", "", line))
    if not found:
        return None
    month, day, hour, minute, second = (int(part) for part in found.groups())
    near = datetime.fromtimestamp(modified, UTC).replace(tzinfo=None)
    candidates = []
    for year in (near.year - 1, near.year, near.year + 1):
        try:
            candidates.append(datetime(year, month, day, hour, minute, second))
        except ValueError:
            continue
    return min(candidates, key=lambda stamp: abs(stamp - near), default=None)


def log_time(line: str, log: LogFacts, utc_offset: str) -> float | None:
    """Epoch seconds, in the host's clock, of a log line written in the zone `utc_offset`."""
    naive = naive_log_time(line, log.modified)
    if naive is None:
        return None
    return naive.replace(tzinfo=parse_utc_offset(utc_offset)).timestamp()


def parse_utc_offset(text: str) -> timezone:
    sign = -1 if text.startswith("-") else 1
    return timezone(sign * timedelta(hours=int(text[1:3]), minutes=int(text[3:5])))
