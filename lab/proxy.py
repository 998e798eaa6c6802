"""The lab's proxy: endpoints, scores, retries and log lines of vllm-ascend's pull proxy, without its bugs unless a defect asks.

Source of behaviour: vllm-ascend `examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py` (v0.23.0, main):
prefill first and awaited whole, `kv_transfer_params` copied to the decoder, P's score released with D's first bytes, the same
backend tried again. Where v0.23.0 answers 500 to a client's mistake or 200 with nothing when a decoder fails, the healthy lab
answers cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import resource
import struct
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from lab.balancer import Balancer, Instance, prefill_score
from lab.engine.settings import Settings, hits, settings_for

log = logging.getLogger("load_balance_proxy_server_example")
SIOCOUTQ = 0x5411  # bytes the client has not taken yet (linux/sockios.h)


class UpstreamError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Proxy:
    def __init__(self, prefillers: list[str], decoders: list[str], settings: Settings, max_retries: int = 3) -> None:
        self.balancer = Balancer(prefillers, decoders)
        self.misbehave = settings.misbehave
        self.max_retries = max_retries
        self.number = 0
        self.clients: dict[str, list[web.Request]] = {}  # by decoder
        self.engine_ids: dict[int, str] = {}
        self.session: aiohttp.ClientSession | None = None

    async def start(self, app: web.Application) -> None:
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.misbehave.get("gives_up_after_s")), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        pools = self.balancer.pools
        log.info("Initialized %s prefill clients and %s decode clients in worker 1.", len(pools["prefill"]), len(pools["decode"]))

    # -- small endpoints ---------------------------------------------------------------------------------------------

    async def healthcheck(self, _: web.Request) -> web.Response:
        pools = self.balancer.pools
        return web.json_response({
            "status": "ok", "prefill_instances": len(pools["prefill"]), "decode_instances": len(pools["decode"]),
            "request_num": self.balancer.requests,
        })  # fmt: skip

    async def models(self, _: web.Request) -> web.Response:
        assert self.session
        async with self.session.get(f"{self.balancer.pools['prefill'][0].url}/v1/models") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def instances(self, request: web.Request) -> web.Response:
        """`{"type": "prefill", "instances": "host:port" | [...]}`, to be added or removed while requests run."""
        adding = request.path.endswith("/add")
        body = await request.json()
        role, named = body.get("type"), body.get("instances", [])
        if role not in self.balancer.pools:
            return _error(400, "Bad Request", f"Instance type {role} is not supported.")
        done = []
        for place in [named] if isinstance(named, str) else named:
            if not adding and "drops_what_it_removes" in self.misbehave:
                for waiting in self.clients.get(f"http://{place}", []):
                    if waiting.transport:
                        waiting.transport.abort()  # type: ignore[attr-defined]
            changed = (self.balancer.add if adding else self.balancer.remove)(role, f"http://{place}")
            done += [place] if changed else []
        log.info("%s %s instances %s.", "Added" if adding else "Start to taint", role, done)
        pools = {f"current_{name}_instances": [one.url.removeprefix("http://") for one in pool] for name, pool in self.balancer.pools.items()}
        return web.json_response({"message": f"{'add' if adding else 'remove'} {role} instances: {done}.", **pools})

    # -- completions -------------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.number += 1
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError("the body is not an object")
        except ValueError as error:
            if "malformed_json_500" in self.misbehave:
                return web.Response(status=500, text="Internal Server Error")
            return _error(400, "Bad Request", f"JSON decode error: {error}")
        if refusal := self._refuses(len(raw)):
            return refusal
        self.balancer.requests += 1
        leaks = False
        try:
            return await self._handle(request, body, len(raw), self.number)
        except _LeftInPrefill:
            leaks = "leaks_on_cancel" in self.misbehave
            raise asyncio.CancelledError from None
        finally:
            self.balancer.requests -= 0 if leaks else 1

    def _refuses(self, size: int) -> web.Response | None:
        limit = self.misbehave.get("refuses", {})
        if hits(self.misbehave.get("fails"), self.number):
            return web.Response(status=500, text="Internal Server Error")
        if limit and self.balancer.requests >= limit["above"] and size >= limit.get("bytes", 0):
            return _error(503, "Service Unavailable", "too many requests in flight")
        return None

    async def _handle(self, request: web.Request, body: dict[str, Any], size: int, number: int) -> web.StreamResponse:
        request_id = str(uuid.uuid4())
        headers = {"X-Request-Id": request_id, "Authorization": request.headers.get("Authorization", "Bearer None")}
        instance = self.balancer.pools["prefill"][0] if "first_prefiller_only" in self.misbehave else None
        if instance is None:
            instance = self.balancer.pick("prefill")
        else:
            instance.in_flight += 1
        score = prefill_score(size)
        instance.active_kv_cache += score
        held = [score]  # released once: with D's first bytes, or when it is over

        def release() -> None:
            if held:
                instance.active_kv_cache = max(0.0, instance.active_kv_cache - held.pop())

        try:
            params = await self._prefill(instance, request.path, body, headers)
        except asyncio.CancelledError:
            if "leaks_on_cancel" not in self.misbehave:
                release()
            raise _LeftInPrefill from None
        except UpstreamError as error:
            release()
            return self._forward(error)
        except aiohttp.ClientError as error:
            release()
            if "hangs_on_a_lost_prefill" in self.misbehave:
                await asyncio.Event().wait()
            log.error("Error occurred in disagg prefill proxy server - %s endpoint: %s", request.path.removeprefix("/v1"), error)
            return web.Response(status=500, text="Internal Server Error")
        finally:
            self.balancer.finish(instance)
        if params and "keeps_old_engine_id" in self.misbehave:
            params["remote_engine_id"] = self.engine_ids.setdefault(params["remote_port"], params["remote_engine_id"])
        forwarded = dict(body)
        if params and "kv_params_dropped" not in self.misbehave:
            forwarded["kv_transfer_params"] = params
        try:
            return await self._decode(request, forwarded, size, headers, release, number)
        finally:
            release()

    def _forward(self, error: UpstreamError) -> web.Response:
        rule = self.misbehave.get("client_errors_become_500")
        if rule and error.status == rule["status"] and rule.get("saying", "") in error.body:
            return web.Response(status=500, text="Internal Server Error")
        return web.Response(status=error.status, text=error.body, content_type="application/json")

    async def _prefill(self, instance: Instance, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        asked = {key: value for key, value in body.items() if key != "stream_options"}
        asked |= {"stream": False, "min_tokens": 1, "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None}}  # fmt: skip
        # The healthy lab lets P see what is wrong with max_tokens; upstream overwrites it in any case.
        if not isinstance(asked.get("max_tokens"), int) or asked["max_tokens"] >= 1:
            asked["max_tokens"] = 1
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        assert self.session
        for attempt in range(1, self.max_retries + 1):
            try:
                async with self.session.post(instance.url + path, json=asked, headers=headers) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        params: dict[str, Any] | None = json.loads(text).get("kv_transfer_params")
                        return params
                    if answer.status < 500 or attempt == self.max_retries:
                        raise UpstreamError(answer.status, text)
                    log.warning("Attempt %s failed for %s: HTTP %s for url '%s'", attempt, path, answer.status, instance.url + path)
            except aiohttp.ClientError as error:
                if attempt == self.max_retries:
                    raise
                log.warning("Attempt %s failed for %s: %s", attempt, path, error)
            await asyncio.sleep(0.001 * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _decode(
        self, request: web.Request, body: dict[str, Any], size: int, headers: dict[str, str], release: Any, number: int
    ) -> web.StreamResponse:
        instance = self.balancer.pick("decode")
        instance.active_tokens += size
        self.clients.setdefault(instance.url, []).append(request)
        if hits(self.misbehave.get("double_release"), number):
            instance.active_tokens -= size
        response: web.StreamResponse | None = None
        assert self.session
        if hits(self.misbehave.get("doubles"), number):
            async with self.session.post(instance.url + request.path, json={**body, "stream": False}, headers=headers) as first:
                await first.read()
        # Leaving this block closes the upstream connection, which vLLM takes as an abort.
        try:
            async with self.session.post(instance.url + request.path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, text=await answer.text(), content_type="application/json")
                response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
                await response.prepare(request)
                if hits(self.misbehave.get("empty_200"), number):
                    await response.write_eof()
                    return response
                await self._pass_on(request, answer, response, release, hits(self.misbehave.get("cuts"), number))
                return response
        except (aiohttp.ClientConnectionResetError, asyncio.CancelledError):  # of the client's connection
            log.info("Streaming from decoder %s was cancelled; releasing request %s resources", instance.url, headers["X-Request-Id"])
            raise asyncio.CancelledError from None
        except aiohttp.ClientError as error:
            what = headers["X-Request-Id"]
            log.error("Error during streaming from decoder %s: %s while handling request %s; releasing prefiller KV", instance.url, error, what)
            if "hangs_on_reset" in self.misbehave:
                await asyncio.Event().wait()
            if response is None:
                return _error(502, "BadGateway", f"decoder {instance.url}: {error}")
            if "ends_politely" in self.misbehave:
                await response.write_eof()
                return response
            if request.transport:
                request.transport.close()  # the client sees a broken stream, not a silent end
            return response
        finally:
            instance.active_tokens -= size
            self.clients[instance.url].remove(request)
            self.balancer.finish(instance)

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse, release: Any, cut: bool
    ) -> None:
        chunks, stuck_since = 0, None
        async for chunk in answer.content.iter_any():
            release()
            await response.write(chunk)
            chunks += 1
            if cut and chunks >= 3 and answer.content_type == "text/event-stream":
                break  # ends politely, without [DONE]
            if "drops_slow_readers" in self.misbehave and request.transport:
                stuck_since = (stuck_since or time.monotonic()) if _not_taken(request.transport) else None
                if stuck_since and time.monotonic() - stuck_since > 0.5:
                    request.transport.abort()  # type: ignore[attr-defined]
                    return
        await response.write_eof()


class _LeftInPrefill(Exception):
    """The client went away while P computed."""


def _not_taken(transport: asyncio.BaseTransport) -> bool:
    """Whether the client's side of the connection is full: its window is closed and we hold bytes for it."""
    sock = transport.get_extra_info("socket")
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), SIOCOUTQ, b"\0\0\0\0"))[0] > 0


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)


def _app(proxy: Proxy) -> web.Application:
    @web.middleware
    async def unknown_path(request: web.Request, handler: Any) -> web.StreamResponse:
        """FastAPI's words for a path that is not served."""
        if request.match_info.http_exception is not None and request.match_info.http_exception.status == 404:
            return web.json_response({"detail": "Not Found"}, status=200 if "unknown_path_200" in proxy.misbehave else 404)
        response: web.StreamResponse = await handler(request)
        return response

    app = web.Application(client_max_size=64 * 1024**2, middlewares=[unknown_path])
    app.add_routes([
        web.post("/v1/completions", proxy.completions), web.post("/v1/chat/completions", proxy.completions),
        web.get("/healthcheck", proxy.healthcheck), web.get("/v1/models", proxy.models),
        web.post("/instances/add", proxy.instances), web.post("/instances/remove", proxy.instances),
    ])  # fmt: skip
    app.on_startup.append(proxy.start)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(prog="load_balance_proxy_server_example.py")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-retries", type=int, default=3)
    for role in ("prefiller", "decoder"):
        parser.add_argument(f"--{role}-hosts", nargs="+", default=[])
        parser.add_argument(f"--{role}-ports", nargs="+", type=int, default=[])
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [%(name)s] %(message)s")
    urls = [[f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
            for hosts, ports in ((args.prefiller_hosts, args.prefiller_ports), (args.decoder_hosts, args.decoder_ports))]  # fmt: skip
    settings = settings_for("proxy")
    _odd_starts(settings)
    proxy = Proxy(urls[0], urls[1], settings, args.max_retries)
    web.run_app(_app(proxy), host=args.host, port=args.port, print=lambda *_: None, handler_cancellation=True, backlog=1024)


def _odd_starts(settings: Settings) -> None:
    """Defects of the start: a lock file nobody takes away, few file descriptors."""
    if few := settings.misbehave.get("few_descriptors"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    lock = Path("/run/proxy.lock")
    if lock.exists() and "keeps_a_lock" in settings.misbehave:
        raise SystemExit(f"{lock} exists: another proxy runs")
    lock.touch()


if __name__ == "__main__":
    main()
