"""A server that answers tokens at a fixed pace and writes into each when it was sent: cheap, and it knows the truth."""

from __future__ import annotations

import asyncio
import json
import time

from aiohttp import web

TOKENS, PAUSE_S = 16, 0.01


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chat = "messages" in body
    kind = "chat.completion.chunk" if chat else "text_completion"
    for index in range(TOKENS):
        await asyncio.sleep(PAUSE_S)
        text = f" {time.time():.6f}"
        said = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, "finish_reason": "length" if index == TOKENS - 1 else None, **said}
        await response.write(f"data: {json.dumps({'id': 'x', 'object': kind, 'created': 0, 'model': 'm', 'choices': [choice]})}\n\n".encode())
    usage = {"prompt_tokens": 300, "completion_tokens": TOKENS, "total_tokens": 300 + TOKENS}
    await response.write(f"data: {json.dumps({'id': 'x', 'object': kind, 'created': 0, 'model': 'm', 'choices': [], 'usage': usage})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 8192}]})


def main() -> None:
    app = web.Application(client_max_size=64 * 1024**2)
    app.add_routes([web.post("/v1/completions", answer), web.post("/v1/chat/completions", answer), web.get("/v1/models", models)])
    web.run_app(app, host="127.0.0.1", port=8123, print=None, backlog=1024)


if __name__ == "__main__":
    main()
