"""`vllm serve` of the lab: one API server that forks an engine core that forks its workers, as the real one does."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from lab.engine import vlog
from lab.engine.api import Api
from lab.engine.core import Core, CoreSpec
from lab.engine.settings import Settings, settings_for
from lab.engine.wire import Pipe
from lab.engine.worker import Worker, WorkerSpec
from pdgate.facts.parse.vllm_args import inner_connector, kv_transfer_config, parse_serve_args

BINDING_ROLES = {"MooncakeLayerwiseConnector": ("kv_consumer", "kv_both")}


def main(argv: list[str]) -> None:
    args = parse_serve_args(argv)
    if args is None:
        sys.exit(f"usage: vllm serve MODEL [options]; got {' '.join(argv)}")
    settings = settings_for(f"engine:{args.get('port', '8000')}")
    _odd_starts(settings, args.get("port", ""))
    config = inner_connector(kv_transfer_config(args))
    mine, theirs = socket.socketpair()
    # Parents keep nothing of a child's end, so that a death shows as an end of file.
    if os.fork() == 0:
        mine.close()
        _core(args, config, settings, Pipe(theirs))
        os._exit(0)
    theirs.close()
    asyncio.run(Api(args, settings, Pipe(mine)).run())


def _odd_starts(settings: Settings, port: str) -> None:
    """Defects of the start: of a second start, of one that finds stale files, of logging."""
    vlog.DIES_ON_FULL_DISK = "dies_on_full_disk" in settings.misbehave
    mark = Path(f"/run/pdlab-started-{port}")
    if mark.exists():
        time.sleep(settings.misbehave.get("starts_again_slowly_s", 0))
    mark.touch()
    stale = [path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("mooncake*")]
    if stale and "stumbles_over_leftovers" in settings.misbehave:
        vlog.emit(f"RuntimeError: shared memory segment {stale[0]} exists: the engine failed to start")
        sys.exit(1)


def _core(args: dict[str, str], config: dict[str, Any], settings: Settings, api: Pipe) -> None:
    tp, dp_rank, dp_size = (int(args.get(key, "1" if "size" in key else "0")) for key in
                            ("tensor_parallel_size", "data_parallel_rank", "data_parallel_size"))  # fmt: skip
    suffix = f"_DP{dp_rank}" if dp_size > 1 else ""
    host_ip = os.environ.get("VLLM_HOST_IP") or os.environ.get("HCCL_IF_IP") or socket.gethostbyname(socket.gethostname())
    base = int(config.get("kv_port", 14579)) + dp_rank * tp
    binds = config.get("kv_role") in BINDING_ROLES.get(config.get("kv_connector", ""), ("kv_producer",))
    visible = [int(device) for device in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0").split(",")]
    engine_id = f"{config.get('engine_id', '0')}-{uuid.uuid4().hex}"
    ends = []
    for rank in range(tp):
        mine, theirs = socket.socketpair()
        spec = WorkerSpec(
            f"Worker{suffix}" + (f"_TP{rank}" if tp > 1 else ""), rank, tp, visible[rank % len(visible)], host_ip,
            base + rank if binds else None, int(os.environ.get("ASCEND_BASE_PORT", "20000")), engine_id,
        )  # fmt: skip
        if os.fork() == 0:
            mine.close()
            for end in ends:
                end.close()
            asyncio.run(_run_worker(spec, settings, theirs))
            os._exit(0)
        theirs.close()
        ends.append(mine)
    core = CoreSpec(
        name=f"EngineCore{suffix}", engine_id=engine_id, dp_rank=dp_rank, tp_size=tp,
        role=config.get("kv_role", ""), host_ip=host_ip, side_channel=base,
        abort_timeout_s=float(os.environ.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "480")), transfer_timeout_s=_transfer_timeout(),
        load_failure_policy=config.get("kv_load_failure_policy", "fail"),
        swallows_failed_pulls=config.get("kv_connector") == "MooncakeHybridConnector" or "swallow_failed_pulls" in settings.misbehave,
    )  # fmt: skip
    asyncio.run(_run_core(core, settings, api, [Pipe(end) for end in ends]))


async def _run_worker(spec: WorkerSpec, settings: Settings, end: socket.socket) -> None:
    await Worker(spec, settings, Pipe(end)).run()


async def _run_core(spec: CoreSpec, settings: Settings, api: Pipe, workers: list[Pipe]) -> None:
    await Core(spec, settings, api, workers).run()


def _transfer_timeout() -> float:
    """Seconds, by vllm-ascend's rule: the variable, else derived from the RDMA retry time."""
    explicit = os.environ.get("ASCEND_TRANSFER_TIMEOUT")
    if explicit:
        return int(explicit) / 1000
    retry_ms = 4.096e-3 * 2 ** int(os.environ.get("HCCL_RDMA_TIMEOUT", "20")) * int(os.environ.get("HCCL_RDMA_RETRY_CNT", "7"))
    return (retry_ms + 3000) / 1000


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) == 2 else sys.argv)
