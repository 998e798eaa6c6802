"""The engine core: requests from waiting to finished, KV blocks, delayed free on P, remote prefill on D."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import setproctitle

from lab.engine.model import Answer, block_chain
from lab.engine.settings import Settings
from lab.engine.vlog import VLog
from lab.engine.wire import Message, PeerGone, Pipe

FILE = "mooncake_connector.py"


@dataclass(frozen=True)
class CoreSpec:
    """What the core is told at fork."""

    name: str
    engine_id: str
    dp_rank: int
    tp_size: int
    role: str
    host_ip: str
    side_channel: int  # port of TP rank 0
    abort_timeout_s: float
    transfer_timeout_s: float
    load_failure_policy: str
    swallows_failed_pulls: bool = False  # vllm-ascend#17044
    max_num_seqs: int = 64


@dataclass
class Request:
    id: str
    tokens: list[str]
    max_tokens: int
    kv_params: dict[str, Any]
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    generated: int = 0
    task: asyncio.Task[None] | None = None


class LoadFailed(Exception):
    """The KV of the prompt could not be pulled, and the policy is to fail."""


class Core:
    def __init__(self, spec: CoreSpec, settings: Settings, api: Pipe, workers: list[Pipe]) -> None:
        self.spec, self.settings, self.api, self.workers = spec, settings, api, workers
        self.log = VLog(spec.name)
        self.free = list(range(settings.num_blocks))
        self.requests: dict[str, Request] = {}
        self.delayed: dict[str, tuple[float, list[int], set[int]]] = {}  # request -> since, blocks, ranks that have sent
        self.seats = asyncio.Semaphore(spec.max_num_seqs)
        self.freed = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.ghosts = 0

    async def run(self) -> None:
        setproctitle.setproctitle(f"VLLM::{self.spec.name}")
        self.log.info(f"{FILE}:1260", f"Initializing Mooncake Scheduler {self.spec.engine_id}")
        ready = asyncio.Semaphore(0)

        async def from_worker(message: Message) -> Any:
            if message["op"] == "ready":
                ready.release()
            elif message["op"] == "sent":
                self._sent(message["request"], message["rank"])

        watchers = [asyncio.create_task(self._watch_worker(pipe, from_worker)) for pipe in self.workers]
        for _ in self.workers:
            await ready.acquire()
        api = asyncio.create_task(self.api.serve(self.handle))
        await self.api.opened.wait()
        self.api.notify("ready")
        try:
            await asyncio.gather(api, self._expire(), *watchers)
        except PeerGone:
            # The API server is gone. As in vLLM, the core and its workers stay, orphaned, and hold their ports.
            await asyncio.gather(self._expire(), *watchers)

    async def _watch_worker(self, pipe: Pipe, handle: Any) -> None:
        try:
            await pipe.serve(handle)
        except PeerGone:
            self.log.error("multiproc_executor.py:246", "Worker proc died unexpectedly, shutting down executor.")
            self.log.error("core.py:1004", "EngineCore encountered a fatal error.")
            os._exit(1)

    # -- calls from the API server -----------------------------------------------------------------------------------

    async def handle(self, message: Message) -> Any:
        op = message["op"]
        if op == "add":
            request = Request(message["request"], message["tokens"], message["max_tokens"], message["kv_params"] or {})
            self.requests[request.id] = request
            request.task = asyncio.create_task(self._run(request))
        elif op == "abort":
            self._abort(message["request"])
        elif op == "stats":
            return self.stats()
        return None

    def stats(self) -> dict[str, Any]:
        states = Counter(request.state for request in self.requests.values())
        return {
            "running": states["running"], "waiting": states["waiting"] + states["deferred"] + self.ghosts,
            "deferred": states["deferred"] + self.ghosts, "usage": 1 - len(self.free) / self.settings.num_blocks,
            "counters": dict(self.counters),
        }  # fmt: skip

    def _abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.task is None:
            return
        if request.state == "deferred":
            request.state = "aborting"  # D keeps its blocks until the transfer has ended
            return
        request.task.cancel()

    # -- a request's life --------------------------------------------------------------------------------------------

    async def _run(self, request: Request) -> None:
        finished = "abort"
        try:
            async with self.seats:
                finished = await self._serve(request)
        except LoadFailed as error:
            finished = "error"
            self.api.notify("token", request=request.id, error=str(error))
        except asyncio.CancelledError:
            pass
        finally:
            self.counters[f"success:{finished}"] += 1
            self.requests.pop(request.id, None)
            if request.id not in self.delayed and not (finished == "abort" and "keep_blocks_after_abort" in self.settings.misbehave):
                self._release(request.blocks)

    async def _serve(self, request: Request) -> str:
        count = -(-len(request.tokens) // self.settings.block_size)
        request.blocks = await self._allocate(count)
        if request.kv_params.get("do_remote_prefill"):
            digest = await self._remote_prefill(request)
        else:
            digest = await self._prefill(request)
        if request.state == "aborting":
            return "abort"
        request.state = "running"
        return await self._decode(request, digest)

    async def _allocate(self, count: int) -> list[int]:
        while len(self.free) < count:
            self.freed.clear()
            await self.freed.wait()
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _release(self, blocks: list[int]) -> None:
        self.free += blocks  # the bytes stay until somebody else writes there
        self.freed.set()

    async def _prefill(self, request: Request) -> bytes:
        request.state = "running"
        await asyncio.sleep(self.settings.prefill_base_s + len(request.tokens) * self.settings.prefill_per_token_s)
        chain = block_chain(request.tokens, self.settings.block_size)
        digests = await asyncio.gather(*(pipe.call("write", blocks=request.blocks, chain=chain) for pipe in self.workers))
        self.counters["local_tokens"] += len(request.tokens)
        return hashlib.sha256(b"".join(digests)).digest()

    async def _remote_prefill(self, request: Request) -> bytes:
        params = request.kv_params
        request.state = "deferred"
        if "hang_waiting_for_kv" in self.settings.misbehave:
            await asyncio.Event().wait()
        answers = await asyncio.gather(*(
            pipe.call(
                "pull", remote_request=params["remote_request_id"], host=params["remote_host"], port=params["remote_port"],
                engine_id=params["remote_engine_id"], remote_blocks=params["remote_block_ids"][0], blocks=request.blocks, transfer_timeout=self.spec.transfer_timeout_s,
            )
            for pipe in self.workers
        ))  # fmt: skip
        if "ghost_waiting" in self.settings.misbehave and self.ghosts == 0:
            self.ghosts = 1
        if not all(answer["ok"] for answer in answers) and not self.spec.swallows_failed_pulls:
            return await self._load_failed(request)
        self.counters["external_tokens"] += len(request.tokens)
        self.counters["external_queries"] += len(request.tokens)
        return hashlib.sha256(b"".join(answer["digest"] for answer in answers)).digest()

    async def _load_failed(self, request: Request) -> bytes:
        affected = len(request.tokens)
        if self.spec.load_failure_policy == "recompute":
            self.log.warning("scheduler.py:2204", f"Recovered from KV load failure: 1 request(s) rescheduled ({affected} tokens affected).")
            return await self._prefill(request)
        self.log.error(
            "scheduler.py:2189",
            f"Failing 1 request(s) due to KV load failure (failure_policy=fail, {affected} tokens affected). Request IDs: {{'{request.id}'}}",
        )
        raise LoadFailed("Internal server error")

    async def _decode(self, request: Request, digest: bytes) -> str:
        answer = Answer(digest)
        limit = min(request.max_tokens, answer.natural_length)
        for index in range(limit):
            if index:
                await asyncio.sleep(self.settings.itl_s)
            request.generated += 1
            self.counters["generation_tokens"] += 1
            last = index == limit - 1
            finish = ("length" if limit == request.max_tokens else "stop") if last else None
            extra = self._delay_free(request) if last and request.kv_params.get("do_remote_decode") and finish == "length" else None
            self.api.notify("token", request=request.id, text=answer.next(), finish=finish, kv_params=extra)
        return "length" if limit == request.max_tokens else "stop"

    # -- delayed free on P -------------------------------------------------------------------------------------------

    def _delay_free(self, request: Request) -> dict[str, Any]:
        self.log.info(f"{FILE}:1900", f"Delaying free of {len(request.blocks)} blocks for request {request.id}")
        self.delayed[request.id] = (time.monotonic(), request.blocks, set())
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.spec.engine_id,
            "remote_block_ids": [request.blocks], "remote_request_id": request.id, "remote_host": self.spec.host_ip,
            "remote_port": self.spec.side_channel, "remote_ptp_size": self.spec.tp_size, "remote_pcp_size": 1,
            "remote_dcp_size": 1, "last_token_id": 0, "num_prompt_blocks": len(request.blocks),
            "remote_multi_nodes_meta_mapping": {
                "0": {"host": self.spec.host_ip, "engine_id": self.spec.engine_id, "handshake_port": self.spec.side_channel}
            },
            "remote_block_size": self.settings.block_size, "remote_prefill_cached_tokens": 0,
        }  # fmt: skip

    def _sent(self, request_id: str, rank: int) -> None:
        held = self.delayed.get(request_id)
        if held is None:
            self.log.warning(
                f"{FILE}:199",
                f"MooncakeConnector finish req not in reqs to process. request_id={request_id}. Possible cause: Request was already "
                "completed or not properly tracked. Check: Verify request lifecycle and tracking logic.",
            )
            return
        held[2].add(rank)
        if len(held[2]) == self.spec.tp_size:
            del self.delayed[request_id]
            self._release(held[1])

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for request_id, (since, blocks, _) in list(self.delayed.items()):
                if time.monotonic() - since > self.spec.abort_timeout_s:
                    del self.delayed[request_id]
                    self._release(blocks)
                    self.workers[0].notify("forced", request=request_id, timeout=self.spec.abort_timeout_s)
