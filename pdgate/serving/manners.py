"""Clients as they come: many at the same moment, slow to read, all at once after a pause."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from pdgate.serving.client import Endpoint, Prompt, complete, events, stream, text_of
from pdgate.serving.record import Record, now

SMALL_BUFFER = 2304  # Linux's least: the window closes after a few tokens


def at_once(front: Endpoint, prompts: list[Prompt], deadline_s: float) -> list[Record]:
    """All prompts at the same moment, half of them streamed."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(stream if n % 2 else complete, front, prompt, deadline_s) for n, prompt in enumerate(prompts)]
        return [one.result() for one in asked]


def levels(most: int) -> list[int]:
    """1, 2, 4 … up to `most`, which is always among them."""
    steps = [2**n for n in range(most.bit_length()) if 2**n < most]
    return [*steps, most]


def slow_reader(front: Endpoint, prompt: Prompt, pause_s: float, deadline_s: float) -> Record:
    """Read one token, then nothing for `pause_s`, then the rest; over a connection that buffers next to nothing. Plain HTTP only."""
    parts = urlsplit(front.url)
    assert parts.hostname
    sent = now()
    draft: dict[str, Any] = {"prompt_id": prompt.id, "url": front.url + prompt.path, "api": prompt.api, "stream": True, "scheduled": sent, "sent": sent}
    arrivals: list[float] = []
    said: list[str] = []
    done = False
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.settimeout(deadline_s)
        sock.connect((parts.hostname, parts.port or 80))
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
        connection.sock = sock
        headers = {"Content-Type": "application/json", **front.headers()}
        connection.request("POST", parts.path + prompt.path, json.dumps(prompt.body(stream=True)), headers)
        answer = connection.getresponse()
        draft |= {"status": answer.status, "first_byte": now()}
        for event in events(_small_bites(answer)):
            if event == "[DONE]":
                done = True
                break
            chunk = json.loads(event)
            for choice in chunk.get("choices", []):
                if text := text_of(choice, "delta"):
                    arrivals.append(now())
                    said.append(text)
                draft["finish_reason"] = choice.get("finish_reason") or draft.get("finish_reason")
            if len(arrivals) == 1:
                time.sleep(pause_s)
        connection.close()
        outcome, detail = ("ok", "") if done else ("truncated", f"the stream ended without [DONE] after {len(arrivals)} tokens")
    except TimeoutError:
        outcome, detail = "hang", f"silence for {deadline_s:g} s after {len(arrivals)} tokens"
    except (OSError, http.client.HTTPException, ValueError) as error:
        outcome, detail = ("truncated" if arrivals else "error"), f"after {len(arrivals)} tokens: {error}"
    return Record.model_validate({**draft, "tokens": arrivals, "text": "".join(said), "end": now(), "outcome": outcome, "detail": detail})


def _small_bites(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read1(512):
        yield piece
