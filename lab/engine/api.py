"""The API server of a lab engine: OpenAI completions, /health, /v1/models, /metrics, with vLLM's words and codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import uuid
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from lab.engine.metrics import metrics_text
from lab.engine.model import tokenize
from lab.engine.settings import Settings, hits
from lab.engine.vlog import VLog
from lab.engine.wire import Message, PeerGone, Pipe


class Api:
    def __init__(self, args: dict[str, str], settings: Settings, core: Pipe) -> None:
        self.args, self.settings, self.core = args, settings, core
        self.model = args.get("served_model_name", args.get("model", "model"))
        self.log = VLog("APIServer")
        self.queues: dict[str, asyncio.Queue[Message]] = {}
        self.stats: dict[str, Any] = {"running": 0, "waiting": 0, "deferred": 0, "usage": 0.0, "counters": {}}
        self.prompt_tokens = self.answers = 0
        self.created = int(time.time())

    async def run(self) -> None:
        ready = asyncio.Event()

        async def from_core(message: Message) -> None:
            if message["op"] == "ready":
                ready.set()
            elif message["op"] == "token" and message["request"] in self.queues:
                self.queues[message["request"]].put_nowait(message)

        link = asyncio.create_task(self._watch_core(from_core))
        await ready.wait()
        await asyncio.sleep(self.settings.startup_s)
        port = int(self.args.get("port", "8000"))
        self.log.info("api_server.py:580", f"Starting vLLM server on http://{self.args.get('host', '0.0.0.0')}:{port}")
        self.log.uvicorn(f"Started server process [{os.getpid()}]")
        self.log.uvicorn("Waiting for application startup.")
        app = web.Application(client_max_size=64 * 1024**2, middlewares=[_not_found])
        app.add_routes([
            web.get("/health", self.health), web.get("/v1/models", self.models), web.get("/metrics", self.metrics),
            web.get("/version", self.version), web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.completions),
        ])  # fmt: skip
        runner = web.AppRunner(app, access_log_class=_access_logger(self.log), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, self.args.get("host", "0.0.0.0"), port)
        await site.start()
        self.log.uvicorn("Application startup complete.")
        if "deaf_without_descriptors" in self.settings.misbehave:
            deafness = asyncio.create_task(_deaf_once_out_of_descriptors(site))
            deafness.add_done_callback(lambda _: None)
        await link

    async def _watch_core(self, handle: Any) -> None:
        try:
            await self.core.serve(handle)
        except PeerGone:
            if "survives_core_death" in self.settings.misbehave:
                await asyncio.Event().wait()
            self.log.error("core_client.py:600", "Engine core proc EngineCore died unexpectedly, shutting down client.")
            self.log.error("async_llm.py:701", "AsyncLLM output_handler failed.")
            os._exit(1)

    # -- small endpoints ---------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if "health_503" in self.settings.misbehave else 200)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.23.0"})

    async def models(self, _: web.Request) -> web.Response:
        name = self.settings.misbehave.get("models_lists", self.model)
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "vllm", "root": self.args.get("model"),
                 "parent": None, "max_model_len": self.settings.max_model_len, "permission": []}  # fmt: skip
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, _: web.Request) -> web.Response:
        with contextlib.suppress(TimeoutError, PeerGone):  # a hung core: vLLM's gauges keep their last values too
            self.stats = await asyncio.wait_for(self.core.call("stats"), 1)
        text = metrics_text(self.model, self.args.get("data_parallel_rank", "0"), self.stats, self.prompt_tokens)
        return web.Response(text=text, content_type="text/plain")

    # -- completions -------------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("body is not an object")
        except ValueError as error:
            return _error(
                400,
                "Bad Request",
                f"[{{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error', 'ctx': {{'error': '{error}'}}}}]",
            )
        if body.get("model", self.model) != self.model:
            return _error(404, "NotFoundError", f"The model `{body['model']}` does not exist.", "model")
        chat = request.path.endswith("/chat/completions")
        complaint = _complaint(body, chat)
        if complaint:
            return _error(500 if "bad_parameters_500" in self.settings.misbehave else 400, "BadRequestError", complaint)
        tokens = tokenize(_prompt_text(body, chat))
        max_tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        if len(tokens) + max_tokens > self.settings.max_model_len:
            return _error(
                400, "BadRequestError",
                f"This model's maximum context length is {self.settings.max_model_len} tokens. However, you requested {max_tokens} output "
                f"tokens and your prompt contains {len(tokens)} input tokens, for a total of {len(tokens) + max_tokens} tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens.",
                "input_tokens",
            )  # fmt: skip
        prefix = "chatcmpl" if chat else "cmpl"
        public = f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        internal = f"{public}-0-{uuid.uuid4().hex[:8]}" if not chat else f"{public}-{uuid.uuid4().hex[:8]}"
        self.prompt_tokens += len(tokens)
        queue: asyncio.Queue[Message] = asyncio.Queue()
        self.queues[internal] = queue
        self.core.notify("add", request=internal, tokens=tokens, max_tokens=max_tokens, kv_params=body.get("kv_transfer_params"))
        finished = False
        try:
            if body.get("stream"):
                response, finished = await self._stream(request, queue, public, chat, body, len(tokens))
                return response
            answer = await self._whole(queue, public, chat, len(tokens))
            finished = True
            return answer
        finally:
            del self.queues[internal]
            if not finished:
                self.core.notify("abort", request=internal)

    async def _whole(self, queue: asyncio.Queue[Message], public: str, chat: bool, prompt_tokens: int) -> web.Response:
        parts: list[str] = []
        while True:
            token = await queue.get()
            if token.get("error"):
                return _error(500, "InternalServerError", token["error"])
            parts.append(token["text"])
            if token["finish"]:
                break
        await self._dawdle()
        text = "".join(parts)
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(parts), "total_tokens": prompt_tokens + len(parts)}
        return web.json_response({
            "id": public, "object": "chat.completion" if chat else "text_completion", "created": int(time.time()),
            "model": self.model, "usage": usage, "kv_transfer_params": token.get("kv_params"),
            "choices": [{"index": 0, "logprobs": None, "finish_reason": token["finish"], "stop_reason": None, **said}],
        })  # fmt: skip

    async def _dawdle(self) -> None:
        """Defects that end answers late: all of them, or every so many."""
        self.answers += 1
        rule = self.settings.misbehave.get("ends_late")
        if hits(rule, self.answers):
            await asyncio.sleep(rule["seconds"])

    async def _stream(
        self, request: web.Request, queue: asyncio.Queue[Message], public: str, chat: bool, body: dict[str, Any], prompt_tokens: int
    ) -> tuple[web.StreamResponse, bool]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        kind, count = "chat.completion.chunk" if chat else "text_completion", 0
        try:
            await response.prepare(request)
            while True:
                token = await queue.get()
                if token.get("error"):
                    chunk: dict[str, Any] = {
                        "error": {"message": token["error"], "type": "InternalServerError", "param": None, "code": 500}
                    }
                    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
                    return response, True
                count += 1
                said = {"delta": {"content": token["text"]}} if chat else {"text": token["text"]}
                choice = {"index": 0, "logprobs": None, "finish_reason": token["finish"], "stop_reason": None, **said}
                chunk = {"id": public, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
                if token["finish"]:
                    break
            await self._dawdle()
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
                chunk = {"id": public, "object": kind, "created": self.created, "model": self.model, "choices": [], "usage": usage}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client has left; uvicorn says nothing of it either
        return response, True


@web.middleware
async def _not_found(request: web.Request, handler: Any) -> web.StreamResponse:
    """FastAPI's words for a path that is not served."""
    if request.match_info.http_exception is not None and request.match_info.http_exception.status == 404:
        return web.json_response({"detail": "Not Found"}, status=404)
    response: web.StreamResponse = await handler(request)
    return response


def _complaint(body: dict[str, Any], chat: bool) -> str | None:
    """What vLLM's request model refuses, as far as the lab knows it."""
    if ("messages" if chat else "prompt") not in body:
        return "Either prompt or prompt_embeds must be provided and non-empty." if not chat else "Field required: messages"
    if not isinstance(body.get("max_tokens") or 1, int) or (body.get("max_tokens") is not None and body["max_tokens"] < 1):
        return f"max_tokens must be at least 1, got {body['max_tokens']}."
    if not isinstance(body.get("temperature", 1.0), int | float):
        return "1 validation error: temperature: Input should be a valid number, unable to parse string as a number"
    return None


async def _deaf_once_out_of_descriptors(site: web.TCPSite) -> None:
    """The accept loop dies of EMFILE, and nobody starts it again."""
    while True:
        try:
            os.close(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            await site.stop()
            return
        await asyncio.sleep(0.05)


def _prompt_text(body: dict[str, Any], chat: bool) -> str:
    if not chat:
        prompt = body.get("prompt", "")
        return prompt if isinstance(prompt, str) else json.dumps(prompt)
    return "\n".join(f"<|{message.get('role')}|>{message.get('content')}" for message in body.get("messages", []))


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status=status)


def _access_logger(log: VLog) -> type[AbstractAccessLogger]:
    class Uvicorn(AbstractAccessLogger):
        """uvicorn's access line."""

        def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
            peer = request.transport.get_extra_info("peername") if request.transport else None
            client = f"{peer[0]}:{peer[1]}" if peer else "-:0"
            reason = response.reason or ""
            if request.path not in ("/health", "/metrics"):
                log.uvicorn(f'{client} - "{request.method} {request.path} HTTP/1.1" {response.status} {reason}')

    return Uvicorn
