"""One TP worker: it owns its side-channel port and its data ports, holds KV blocks, sends and pulls them.

Side channel as vllm-ascend 0.23.0's `mooncake_connector.py`: ZMQ ROUTER on P, REQ on D, msgpack arrays
`(b"get_meta_msg", "")` and `(b"done_recving_msg", request_id, {port: {num, host}})`, `ACK`. The data path is the lab's own:
real bytes over TCP, paced.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq
import zmq.asyncio

from lab.engine.model import block_bytes
from lab.engine.settings import Settings, hits
from lab.engine.vlog import VLog, emit
from lab.engine.wire import Message, PeerGone, Pipe

FILE = "mooncake_connector.py"
RPC_RANGE = (15000, 17000)
RECEIVE_TRIES, RECEIVE_TIMEOUT_MS = 3, 1000


class AnotherEngine(OSError):
    """P answers, under another engine id than the request names (vllm-ascend 0.23.0: kept under that id, and a KeyError for ours)."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told at fork."""

    name: str  # Worker_DP0_TP1
    tp_rank: int
    tp_size: int
    device: int
    host_ip: str
    listen_port: int | None  # its port of the group, where its role binds one
    adxl_base: int
    engine_id: str


class Worker:
    def __init__(self, spec: WorkerSpec, settings: Settings, pipe: Pipe) -> None:
        self.spec, self.settings, self.pipe = spec, settings, pipe
        self.log = VLog(spec.name)
        self.blocks: dict[int, bytes] = {}
        self.context = zmq.asyncio.Context()
        self.block_bytes = settings.block_size * settings.kv_bytes_per_token // spec.tp_size
        self.rpc_port = self.data_port = 0
        self.metas: dict[tuple[str, int, str], dict[str, Any]] = {}
        self.sockets: dict[tuple[str, int], list[zmq.asyncio.Socket]] = {}  # to P, by its side channel, while nobody uses them
        self.signals: set[asyncio.Task[None]] = set()
        self.failed_pulls = 0
        self.link_lost = False
        self.started = time.strftime("%Y%m%d%H%M%S")

    async def run(self) -> None:
        setproctitle.setproctitle(f"VLLM::{self.spec.name}")
        server = await self._open_data_ports()
        tasks = [asyncio.create_task(self.pipe.serve(self.handle))]
        if self.spec.listen_port is not None:
            router = self._bind_side_channel(self.spec.listen_port)
            if router is not None:
                tasks.append(asyncio.create_task(self._side_channel(router)))
        await self.pipe.opened.wait()
        self.pipe.notify("ready", rank=self.spec.tp_rank)
        try:
            await asyncio.gather(*tasks)
        except PeerGone:
            server.close()

    # -- ports ---------------------------------------------------------------------------------------------------

    async def _open_data_ports(self) -> asyncio.Server:
        """TE RPC port and ADXL port, drawn at random from their ranges as Mooncake draws them."""
        low, high = self.spec.adxl_base + self.spec.device * 100, self.spec.adxl_base + (self.spec.device + 1) * 100
        server = None
        for _ in range(500):
            self.data_port = random.randint(low, high)
            try:
                server = await asyncio.start_server(self._send_blocks, self.spec.host_ip, self.data_port)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        assert server is not None, f"no free port between {low} and {high}"
        self._rpc = socket.socket()
        for _ in range(500):
            self.rpc_port = random.randint(*RPC_RANGE)
            try:
                self._rpc.bind((self.spec.host_ip, self.rpc_port))
                break
            except OSError:
                continue
        self._rpc.listen()
        emit(f"I{time.strftime('%m%d %H:%M:%S')}.000000 {self.rpc_port} transfer_engine.cpp:96] Transfer Engine RPC using P2P "
              f"handshake, listening on {self.spec.host_ip}:{self.rpc_port}")  # fmt: skip
        return server

    def _bind_side_channel(self, port: int) -> zmq.asyncio.Socket | None:
        if "daemon_keeps_port" in self.settings.misbehave:
            keep_port(self.spec.host_ip, port)
        path = f"tcp://{self.spec.host_ip}:{port}"
        where = f"tp_rank={self.spec.tp_rank}, pp_rank=0"
        self.log.info(f"{FILE}:303", f"KVCacheSendingThread started listening on path: {path}. Thread: {where}, pcp_rank=0")
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        try:
            router.bind(path)
        except zmq.ZMQError as error:
            if "ignores_taken_port" in self.settings.misbehave:
                return None
            self.log.error(
                f"{FILE}:323",
                f"Mooncake KVCacheSendingThread encountered exception. Thread: {where}, listening_path={path}. "
                f"Error: {error} (addr='{path}')",
            )
            self.log.error(
                "multiproc_executor.py:822",
                "WorkerProc hit an exception.\nRuntimeError: KV Cache sending/receiving thread failed to start.",
            )
            sys.exit(1)
        return router

    async def _side_channel(self, router: zmq.asyncio.Socket) -> None:
        if self.settings.misbehave.get("side_channel_dies") == self.spec.tp_rank:
            await asyncio.sleep(0.2)
            router.close()  # the thread died; the engine goes on serving, and the port is anybody's
            return
        while True:
            frames = [frame for frame in await router.recv_multipart() if frame]
            if len(frames) != 2:
                self.log.error(f"{FILE}:340", f"Invalid message format in KVCacheSendingThread. {len(frames)} frames")
                continue
            identity, payload = frames
            message = msgspec.msgpack.decode(payload)
            if message[0] == b"get_meta_msg":
                self._open_communicator()
                meta = {"engine_id": self.spec.engine_id, "te_rpc_port": self.rpc_port, "num_blocks": self.settings.num_blocks,
                        "local_ip": self.spec.host_ip, "handshake_port": self.spec.listen_port, "lab_data_port": self.data_port}  # fmt: skip
                await router.send_multipart([identity, b"", msgspec.msgpack.encode(meta)])
            elif message[0] == b"done_recving_msg" and len(message) == 3:
                self.pipe.notify("sent", request=message[1], rank=self.spec.tp_rank)
                await router.send_multipart([identity, b"", b"ACK"])
            else:
                self.log.error(f"{FILE}:352", f"Connection listener received unexpected message type. {message[0]!r}")

    async def _send_blocks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = struct.unpack("<I", await reader.readexactly(4))[0]
            wanted = msgspec.msgpack.decode(await reader.readexactly(size))
            for block in wanted["blocks"]:
                await self._link()
                data = self.blocks.get(block, b"\0" * self.block_bytes)
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(len(data) / self.settings.bandwidth_bytes_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    # -- what the engine core asks ----------------------------------------------------------------------------------

    async def handle(self, message: Message) -> Any:
        if message["op"] == "write":
            for block, digest in zip(message["blocks"], message["chain"], strict=True):
                self.blocks[block] = block_bytes(digest, self.spec.tp_rank, self.block_bytes)
            return self._digest(message["blocks"])
        if message["op"] == "pull":
            return await self._pull(message)
        if message["op"] == "scrub":
            for block in message["blocks"]:
                self.blocks[block] = block_bytes(b"another request", self.spec.tp_rank, self.block_bytes)
            return None
        if message["op"] == "forced":
            self.log.error(
                f"{FILE}:233",
                f"Force freed expired request: {message['request']}. Reason: Request exceeded timeout threshold "
                f"({message['timeout']:g} seconds). Action: Resources have been forcibly released to prevent memory leak.",
            )
            return None
        raise ValueError(f"worker: unknown message {message['op']}")

    def _digest(self, blocks: list[int]) -> bytes:
        state = hashlib.sha256()
        for block in blocks:
            state.update(self.blocks.get(block, b""))
        return state.digest()

    async def _pull(self, message: Message) -> dict[str, Any]:
        """Fetch the request's blocks from the P worker of the same rank; the answer says whether they came."""
        start, misbehave = time.monotonic(), self.settings.misbehave
        port = message["port"] + self.spec.tp_rank
        reason = ""
        try:
            if not self.metas and "hang_on_first_contact" in self.settings.misbehave:
                await self._hang_if_nobody_listens(message["host"], port)
            # Kept by engine id and port, as the connector does: a known peer costs no handshake.
            peer = (message["host"], port, "any" if "keeps_dead_peer" in misbehave else message["engine_id"])
            if peer not in self.metas or "impatient_handshake" in misbehave:
                self._open_communicator()
                self.metas[peer] = msgspec.msgpack.decode(await self._shake_hands(message["host"], port))
            elif "reconnects" in self.settings.misbehave:
                self._open_communicator()
            meta = self.metas[peer]
            if meta["engine_id"] != message["engine_id"] and "keeps_dead_peer" not in misbehave:
                raise AnotherEngine(port)
            data = await asyncio.wait_for(self._read_blocks(meta, message["remote_blocks"]), misbehave.get("impatient_transfer_s", message["transfer_timeout"]))
            if hits(self.settings.misbehave.get("pulls_fail"), message["number"]):
                raise OSError(errno.ECONNRESET, "the transfer was cut")
            spoiled = self.failed_pulls and "wrong_after_a_failed_pull" in misbehave
            if not spoiled and not hits(misbehave.get("drop_pulled_kv"), message["number"]):
                for block, content in zip(message["blocks"], data, strict=True):
                    self.blocks[block] = content
            took = (time.monotonic() - start) * 1000
            self.log.info(
                f"{FILE}:974",
                f"KV cache transfer for request {message['remote_request']} took {took:.2f} ms. local_ip {self.spec.host_ip} "
                f"local_device_id {self.spec.tp_rank} remote_session_id {meta['local_ip']}:{meta['te_rpc_port']}",
            )
        except (TimeoutError, OSError, asyncio.IncompleteReadError, zmq.ZMQError) as error:
            if "hangs_on_a_refused_pull" in misbehave and isinstance(error, ConnectionRefusedError):
                await asyncio.Event().wait()
            reason = f"{type(error).__name__}: {error}"
            self.failed_pulls += 1
            why = str(error)
            if not isinstance(error, AnotherEngine):
                self.log.error(f"{FILE}:960", f"Mooncake transfer failed for request. remote_request_id={message['remote_request']}, ret=-1. ")
                why = "Mooncake transfer failed, ret: -1"
            self.log.error(f"{FILE}:725", f"Failed to transfer KV cache for request {message['remote_request']}: {why}")
        # Always sent, also after a failure: a failed pull frees P at once. The request does not wait for it.
        signal = asyncio.create_task(self._signal_done(message["host"], port, message["remote_request"]))
        self.signals.add(signal)
        signal.add_done_callback(self.signals.discard)
        return {"ok": not reason, "reason": reason, "digest": self._digest(message["blocks"])}

    def _open_communicator(self) -> None:
        """The plog of this process, as HCCL writes one; destroyed communicators would be counted there too."""
        folder = Path("/root/ascend/log/run/plog")
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%d-%H:%M:%S") + ".000.000"
        with (folder / f"plog-{os.getpid()}_{self.started}.log").open("a") as plog:
            plog.write(f"[INFO] HCCL({os.getpid()},python3):{stamp} [op_base.cc:500] [{os.getpid()}]HcclCommInitClusterInfoConfig success\n")

    async def _signal_done(self, host: str, port: int, request: str) -> None:
        try:
            await self._ask(host, port, [b"done_recving_msg", request, {port: {"num": 1, "host": host}}])
        except OSError as error:
            self.log.error(f"{FILE}:1012", f"Failed to receive ACK for request. request_id={request}, source={host}:{port}. {error}")
            if "ack_failure_is_fatal" in self.settings.misbehave:
                os._exit(1)

    async def _shake_hands(self, host: str, port: int) -> bytes:
        try:
            return await self._ask(host, port, [b"get_meta_msg", ""])
        except OSError:
            if "hangs_on_a_failed_handshake" in self.settings.misbehave:
                await asyncio.Event().wait()
            raise

    async def _link(self) -> None:
        """Nothing goes over the NPU's port while its link is down (`hccn_tool -link -s down`)."""
        state = Path(f"/var/lib/pdlab/hccn/{self.spec.device}/link")
        while state.exists() and "DOWN" in state.read_text():
            self.link_lost = True
            await asyncio.sleep(0.05)
        if self.link_lost and "link_flap_is_forever" in self.settings.misbehave:
            await asyncio.Event().wait()

    async def _hang_if_nobody_listens(self, host: str, port: int) -> None:
        """As vllm-ascend 0.23.0: the handshake fails, and cleaning up its socket blocks the thread for ever."""
        try:
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except OSError:
            await asyncio.Event().wait()

    async def _ask(self, host: str, port: int, message: list[Any]) -> bytes:
        """One REQ/REP exchange with the connector's retries; raises OSError when nobody answers.

        A socket that has brought an answer is kept for the next question, as the connector does (0.23.0, `remote_sockets`).
        """
        kept = self.sockets.setdefault((host, port), [])
        for attempt in range(1, RECEIVE_TRIES + 1):
            request = kept.pop() if kept else self._connected(host, port)
            answer: bytes | None = None
            try:
                await request.send(msgspec.msgpack.encode(message))
                if await request.poll(50 if "impatient_handshake" in self.settings.misbehave else RECEIVE_TIMEOUT_MS):
                    answer = await request.recv()
                    return answer
            finally:
                if answer is None:
                    request.close()
                else:
                    kept.append(request)
            self.log.warning(
                f"{FILE}:1050", f"Receive failed. error=Resource temporarily unavailable, attempts_left={RECEIVE_TRIES - attempt}. "
            )
        self.log.error(f"{FILE}:1058", f"Receive failed after all retries. source={host}:{port}, error=Resource temporarily unavailable. ")
        raise OSError(errno.ETIMEDOUT, f"Failed to receive data after {RECEIVE_TRIES} retries: {host}:{port}")

    def _connected(self, host: str, port: int) -> zmq.asyncio.Socket:
        request = self.context.socket(zmq.REQ)
        request.setsockopt(zmq.LINGER, 0)
        request.connect(f"tcp://{host}:{port}")
        return request

    async def _read_blocks(self, meta: dict[str, Any], blocks: list[int]) -> list[bytes]:
        await self._link()
        reader, writer = await asyncio.open_connection(meta["local_ip"], meta["lab_data_port"])
        try:
            header = msgspec.msgpack.encode({"blocks": blocks})
            writer.write(struct.pack("<I", len(header)) + header)
            return [await reader.readexactly(self.block_bytes) for _ in blocks]
        finally:
            writer.close()


def keep_port(address: str, port: int) -> None:
    """A daemon of the worker's that outlives everybody and takes the port once it is free: an orphan that holds it."""
    if os.fork() > 0:
        return
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    setproctitle.setproctitle("resource_tracker")
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    time.sleep(1)  # the worker itself comes first
    while True:
        try:
            holder.bind((address, port))
            holder.listen()
            time.sleep(10**6)
        except OSError:
            time.sleep(0.002)
