"""Messages between the processes of an engine: msgpack frames over a socket pair inherited at fork."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Message = dict[str, Any]


class PeerGone(Exception):
    """The process at the other end has ended."""


class Pipe:
    """One end of a socket pair: calls with answers, and notices without."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.opened = asyncio.Event()

    async def serve(self, handle: Callable[[Message], Awaitable[Any]]) -> None:
        """Read until the peer goes away; raises PeerGone. Each message is handled in a task of its own."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self.opened.set()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                size = struct.unpack("<I", await reader.readexactly(4))[0]
                message = msgspec.msgpack.decode(await reader.readexactly(size))
                if "re" in message:
                    future = self._waiting.pop(message["re"], None)
                    if future and not future.done():
                        future.set_result(message.get("value"))
                    continue
                task = asyncio.create_task(self._answer(handle, message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerGone())
            raise PeerGone from None

    async def _answer(self, handle: Callable[[Message], Awaitable[Any]], message: Message) -> None:
        value = await handle(message)
        if "id" in message:
            self._send({"re": message["id"], "value": value})

    async def call(self, op: str, **fields: Any) -> Any:
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._send({"op": op, "id": number, **fields})
        return await future

    def notify(self, op: str, **fields: Any) -> None:
        self._send({"op": op, **fields})

    def _send(self, message: Message) -> None:
        if self._writer is None or self._writer.is_closing():
            return
        data = msgspec.msgpack.encode(message)
        self._writer.write(struct.pack("<I", len(data)) + data)
