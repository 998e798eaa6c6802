"""The lab's proxy: endpoints, scores and log lines of vllm-ascend's pull proxy, without its bugs unless a defect asks.

Source of behaviour: vllm-ascend `examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py` (v0.23.0, main):
prefill first and awaited whole, `kv_transfer_params` copied to the decoder, ties to the first instance in command-line order.
Where v0.23.0 answers 500 to a client's mistake or 200 with nothing when a decoder fails, the healthy lab answers cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import logging
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from lab.engine.settings import Settings, settings_for

log = logging.getLogger("load_balance_proxy_server_example")


@dataclass
class Instance:
    """One backend and its scores."""

    url: str
    ordinal: int
    active_tokens: float = 0.0
    active_kv_cache: float = 0.0

    def priority(self) -> float:
        return self.active_tokens + 0.3 * self.active_kv_cache


def pick(instances: list[Instance]) -> Instance:
    """The lowest priority, ties by command-line order."""
    return heapq.nsmallest(1, instances, key=lambda instance: (instance.priority(), instance.ordinal))[0]


class UpstreamError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Proxy:
    def __init__(self, prefillers: list[str], decoders: list[str], settings: Settings) -> None:
        ordinals = itertools.count()
        self.prefillers = [Instance(url, next(ordinals)) for url in prefillers]
        self.decoders = [Instance(url, next(ordinals)) for url in decoders]
        self.settings = settings
        self.requests = 0
        self.engine_ids: dict[int, str] = {}
        self.session: aiohttp.ClientSession | None = None

    async def start(self, app: web.Application) -> None:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0))
        log.info("Initialized %s prefill clients and %s decode clients in worker 1.", len(self.prefillers), len(self.decoders))

    async def healthcheck(self, _: web.Request) -> web.Response:
        return web.json_response({
            "status": "ok", "prefill_instances": len(self.prefillers), "decode_instances": len(self.decoders),
            "request_num": self.requests,
        })  # fmt: skip

    async def models(self, _: web.Request) -> web.Response:
        assert self.session
        async with self.session.get(f"{self.prefillers[0].url}/v1/models") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError("the body is not an object")
        except ValueError as error:
            if "malformed_json_500" in self.settings.misbehave:
                return web.Response(status=500, text="Internal Server Error")
            return _error(400, "Bad Request", f"JSON decode error: {error}")
        self.requests += 1
        try:
            return await self._handle(request, body, len(raw))
        finally:
            self.requests -= 1

    async def _handle(self, request: web.Request, body: dict[str, Any], size: int) -> web.StreamResponse:
        request_id = str(uuid.uuid4())
        headers = {"X-Request-Id": request_id, "Authorization": request.headers.get("Authorization", "Bearer None")}
        try:
            params = await self._prefill(request.path, body, size, headers)
        except UpstreamError as error:
            if (
                "client_errors_become_500" in self.settings.misbehave
                and error.status == self.settings.misbehave["client_errors_become_500"]
            ):
                return web.Response(status=500, text="Internal Server Error")
            return web.Response(status=error.status, text=error.body, content_type="application/json")
        except aiohttp.ClientError as error:
            log.error("Error occurred in disagg prefill proxy server - %s endpoint: %s", request.path.removeprefix("/v1"), error)
            return web.Response(status=500, text="Internal Server Error")
        if params and "keeps_old_engine_id" in self.settings.misbehave:
            params["remote_engine_id"] = self.engine_ids.setdefault(params["remote_port"], params["remote_engine_id"])
        forwarded = dict(body)
        if params and "kv_params_dropped" not in self.settings.misbehave:
            forwarded["kv_transfer_params"] = params
        return await self._decode(request, forwarded, size, headers, request_id)

    async def _prefill(self, path: str, body: dict[str, Any], size: int, headers: dict[str, str]) -> dict[str, Any] | None:
        instance = pick(self.prefillers)
        score = size / 4 * 0.0345 + 120.0745
        instance.active_kv_cache += score
        asked = {key: value for key, value in body.items() if key != "stream_options"}
        asked |= {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None}}  # fmt: skip
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        assert self.session
        try:
            async with self.session.post(instance.url + path, json=asked, headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:
                    log.warning(
                        "Attempt 1 failed for %s: HTTP %s for url '%s'", path.removeprefix("/v1"), answer.status, instance.url + path
                    )
                    raise UpstreamError(answer.status, text)
                params: dict[str, Any] | None = json.loads(text).get("kv_transfer_params")
                return params
        finally:
            instance.active_kv_cache -= score

    async def _decode(
        self, request: web.Request, body: dict[str, Any], size: int, headers: dict[str, str], request_id: str
    ) -> web.StreamResponse:
        instance = pick(self.decoders)
        instance.active_tokens += size
        response: web.StreamResponse | None = None
        assert self.session
        # Leaving this block closes the upstream connection, which vLLM takes as an abort.
        try:
            async with self.session.post(instance.url + request.path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, text=await answer.text(), content_type="application/json")
                response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (ConnectionError, asyncio.CancelledError):
            log.info("Streaming from decoder %s was cancelled; releasing request %s resources", instance.url, request_id)
            raise
        except aiohttp.ClientError as error:
            log.error(
                "Error during streaming from decoder %s: %s while handling request %s; releasing prefiller KV",
                instance.url,
                error,
                request_id,
            )
            if response is None:
                return _error(502, "BadGateway", f"decoder {instance.url}: {error}")
            if request.transport:
                request.transport.close()  # the client sees a broken stream, not a silent end
            return response
        finally:
            instance.active_tokens -= size


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="load_balance_proxy_server_example.py")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    for role in ("prefiller", "decoder"):
        parser.add_argument(f"--{role}-hosts", nargs="+", default=[])
        parser.add_argument(f"--{role}-ports", nargs="+", type=int, default=[])
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [%(name)s] %(message)s")
    urls = [[f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
            for hosts, ports in ((args.prefiller_hosts, args.prefiller_ports), (args.decoder_hosts, args.decoder_ports))]  # fmt: skip
    proxy = Proxy(urls[0], urls[1], settings_for("proxy"))
    app = web.Application(client_max_size=64 * 1024**2)
    app.add_routes([
        web.post("/v1/completions", proxy.completions), web.post("/v1/chat/completions", proxy.completions),
        web.get("/healthcheck", proxy.healthcheck), web.get("/v1/models", proxy.models),
    ])  # fmt: skip
    app.on_startup.append(proxy.start)
    web.run_app(app, host=args.host, port=args.port, print=lambda *_: None, handler_cancellation=True)


if __name__ == "__main__":
    main()
