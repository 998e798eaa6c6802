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
from lab.engine.noise import say
from lab.engine.settings import Settings, hits
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
        self.prefilling = asyncio.Semaphore(settings.prefill_slots)
        self.remote = 0  # requests with KV from elsewhere, so far
        self.aborts: list[float] = []
        self.done_signals = 0
        self.stalled = asyncio.Event()
        self.stalled.set()

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
            if "survives_worker_death" in self.settings.misbehave:
                await asyncio.Event().wait()  # waits for an answer of the dead for ever
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
            request.task.add_done_callback(lambda _: self.requests.pop(request.id, None))  # also one that never began
        elif op == "abort":
            self._abort(message["request"])
        elif op == "stats":
            return self.stats()
        return None

    def stats(self) -> dict[str, Any]:
        states = Counter(request.state for request in self.requests.values())
        return {
            "running": states["running"] + states["prefilling"], "waiting": states["waiting"] + states["deferred"] + self.ghosts,
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
            leaks = (finished == "abort" or request.state == "aborting") and self._leaks(request)
            self.requests.pop(request.id, None)
            if leaks and not request.blocks:
                self.ghosts += 1
            if request.id not in self.delayed and not leaks:
                self._release(request.blocks)

    async def _serve(self, request: Request) -> str:
        if request.kv_params.get("do_remote_prefill"):
            request.blocks = await self._allocate(self._blocks_for(request))
            digest = await self._remote_prefill(request)
        else:
            async with self.prefilling:
                request.blocks = await self._allocate(self._blocks_for(request))
                digest = await self._prefill(request)
        if request.state == "aborting":
            return "abort"
        request.state = "running"
        return await self._decode(request, digest)

    def _blocks_for(self, request: Request) -> int:
        return -(-len(request.tokens) // self.settings.block_size)

    def _leaks(self, request: Request) -> bool:
        """Whether the defect `leak_on_abort` keeps what this aborted request held: by state, prompt and answer length, or in a storm."""
        rule = self.settings.misbehave.get("leak_on_abort")
        if rule is None:
            return False
        now = time.monotonic()
        self.aborts = [at for at in self.aborts if now - at < 1.0] + [now]
        state = "deferred" if request.state == "aborting" else request.state
        return bool(
            state == rule.get("state", state) and rule.get("like", "") in " ".join(request.tokens[:40])
            and (len(self.requests) == 1 or not rule.get("alone")) and rule.get("least", 0) <= request.max_tokens <= rule.get("most", 10**9) and len(self.aborts) >= rule.get("storm", 0)
        )  # fmt: skip

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
        request.state = "prefilling"
        await asyncio.sleep(self.settings.prefill_base_s + len(request.tokens) * self.settings.prefill_per_token_s)
        chain = block_chain(request.tokens, self.settings.block_size)
        digests = await asyncio.gather(*(pipe.call("write", blocks=request.blocks, chain=chain) for pipe in self.workers))
        self.counters["local_tokens"] += len(request.tokens)
        return hashlib.sha256(b"".join(digests)).digest()

    async def _remote_prefill(self, request: Request) -> bytes:
        params = request.kv_params
        request.state = "deferred"
        self.remote += 1
        number, misbehave = self.remote, self.settings.misbehave
        if hits(misbehave.get("hang_waiting_for_kv"), number):
            await asyncio.Event().wait()
        if number == misbehave.get("stalls", {}).get("at"):
            self._stall(misbehave["stalls"]["seconds"])
        if number == misbehave.get("says", {}).get("at"):
            say(misbehave["says"]["what"], self.log)
        if hits(misbehave.get("pulls_late"), number):
            await asyncio.sleep(misbehave["pulls_late"]["seconds"])
        answers = await asyncio.gather(*(
            pipe.call(
                "pull", remote_request=params["remote_request_id"], host=params["remote_host"], port=params["remote_port"],
                engine_id=params["remote_engine_id"], remote_blocks=params["remote_block_ids"][0], blocks=request.blocks, transfer_timeout=self.spec.transfer_timeout_s, number=number,
            )
            for pipe in self.workers
        ))  # fmt: skip
        if "ghost_waiting" in self.settings.misbehave and self.ghosts == 0:
            self.ghosts = 1
        if not all(answer["ok"] for answer in answers) and not self.spec.swallows_failed_pulls and "pulls_fail" not in misbehave:
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
        await asyncio.sleep(self.settings.misbehave.get("first_token_delay_s", 0) if request.kv_params.get("do_remote_prefill") else 0)
        limit = min(request.max_tokens, answer.natural_length)
        for index in range(limit):
            if index:
                await asyncio.sleep(self.settings.itl_s)
            await self.stalled.wait()
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

    def _stall(self, seconds: float) -> None:
        """No token from anybody for a while; /health does not notice."""
        self.stalled.clear()
        asyncio.get_running_loop().call_later(seconds, self.stalled.set)

    def _sent(self, request_id: str, rank: int) -> None:
        if rank == 0:
            self.done_signals += 1
        if hits(self.settings.misbehave.get("loses_done_signals"), self.done_signals):
            return
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
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            if time.monotonic() - last > 1.5 and "deadlocks_after_a_stall" in self.settings.misbehave:
                self.stalled.clear()  # no token ever again; /health is answered by another process
            last = time.monotonic()
            for request_id, (since, blocks, _) in list(self.delayed.items()):
                kept = self.settings.misbehave.get("never_expires")
                if time.monotonic() - since > self.spec.abort_timeout_s and (not kept or len(blocks) < kept["least"]):
                    del self.delayed[request_id]
                    self._release(blocks)
                    self.workers[0].notify("forced", request=request_id, timeout=self.spec.abort_timeout_s)
                    if "recycles_at_once" in self.settings.misbehave:  # as under pressure: the blocks are another request's now
                        for pipe in self.workers:
                            pipe.notify("scrub", blocks=blocks)
                    if "dies_on_forced_free" in self.settings.misbehave:
                        self.log.error("scheduler.py:1300", "assert req_id in self.requests\nAssertionError")
                        os._exit(1)
