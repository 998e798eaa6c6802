"""One OpenAI-style request with a deadline. 200 proves nothing: the outcome comes from what was said, and how it ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

from pdgate.serving.record import Outcome, Record

CONNECT_S = 5.0
BODY_KEPT = 4096


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the OpenAI API."""

    url: str
    api_key_env: str | None = None

    def headers(self) -> dict[str, str]:
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class Prompt:
    """A greedy completion request. `id` names it in records and golden answers."""

    id: str
    text: str
    model: str
    max_tokens: int = 16
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, stream: bool) -> dict[str, Any]:
        return {
            "model": self.model, "prompt": self.text, "max_tokens": self.max_tokens, "temperature": 0, "seed": 0,
            "stream": stream, **self.extra,
        }  # fmt: skip


def complete(endpoint: Endpoint, prompt: Prompt, deadline_s: float) -> Record:
    """A non-streaming completion; never raises for what the server does."""
    return post(endpoint, "/v1/completions", json.dumps(prompt.body(stream=False)), prompt.id, deadline_s)


def post(endpoint: Endpoint, path: str, body: str, prompt_id: str, deadline_s: float) -> Record:
    """Post a raw body, whole or broken JSON alike, and read the answer as a completion."""
    url, sent = endpoint.url + path, time.time()
    draft: dict[str, Any] = {"prompt_id": prompt_id, "url": url, "scheduled": sent, "sent": sent}
    headers = {"Content-Type": "application/json", **endpoint.headers()}
    try:
        # Streamed reading, so that a body that trickles for ever meets the deadline too.
        with requests.post(url, data=body.encode(), headers=headers, timeout=(CONNECT_S, deadline_s), stream=True) as answer:
            draft |= {"status": answer.status_code, "first_byte": time.time()}
            text = _read_all(answer, sent + deadline_s)
    except _Late:
        return _record(draft, "hang", f"the answer did not end within {deadline_s:g} s")
    except requests.exceptions.ConnectTimeout:
        return _record(draft, "error", f"no connection within {CONNECT_S:g} s")
    except requests.exceptions.Timeout:
        return _record(draft, "hang", f"no answer within {deadline_s:g} s")
    except requests.exceptions.RequestException as error:
        outcome: Outcome = "truncated" if "first_byte" in draft else "error"
        return _record(draft, outcome, _reason(error))
    draft["body"] = text[:BODY_KEPT]
    return _judge_whole(draft, text)


def _judge_whole(draft: dict[str, Any], text: str) -> Record:
    if draft["status"] != 200:
        return _record(draft, "error", f"HTTP {draft['status']}: {text[:300]}")
    if not text.strip():
        return _record(draft, "empty", "HTTP 200 with an empty body")
    try:
        choice = json.loads(text)["choices"][0]
        said = choice.get("text", choice.get("message", {}).get("content")) or ""
        finish = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return _record(draft, "error", f"HTTP 200, but not a completion: {text[:300]}")
    draft |= {"text": said, "finish_reason": finish}
    if not said:
        return _record(draft, "empty", "HTTP 200 with no text")
    if finish is None:
        return _record(draft, "truncated", "no finish_reason")
    return _record(draft, "ok", "")


def stream(endpoint: Endpoint, prompt: Prompt, deadline_s: float, stop_after: int | None = None) -> Record:
    """A streaming completion. With `stop_after` the client goes away after so many tokens, and the outcome is aborted."""
    url, sent = f"{endpoint.url}/v1/completions", time.time()
    draft: dict[str, Any] = {"prompt_id": prompt.id, "url": url, "stream": True, "scheduled": sent, "sent": sent}
    arrivals: list[float] = []
    parts: list[str] = []
    finish: str | None = None
    done = False
    try:
        with requests.post(
            url, json=prompt.body(stream=True), headers=endpoint.headers(), timeout=(CONNECT_S, deadline_s), stream=True
        ) as answer:
            draft |= {"status": answer.status_code, "first_byte": time.time()}
            if answer.status_code != 200:
                return _record(draft, "error", f"HTTP {answer.status_code}: {_read_all(answer, sent + deadline_s)[:300]}")
            for event in _events(answer, sent + deadline_s):
                if event == "[DONE]":
                    done = True
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    return _record(draft, "error", f"error inside the stream: {event[:300]}")
                for choice in chunk.get("choices", []):
                    said = choice.get("text", choice.get("delta", {}).get("content")) or ""
                    if said:
                        arrivals.append(time.time())
                        parts.append(said)
                    finish = choice.get("finish_reason") or finish
                if stop_after is not None and len(arrivals) >= stop_after:
                    draft |= {"tokens": arrivals, "text": "".join(parts)}
                    return _record(draft, "aborted", f"the client left after {len(arrivals)} tokens")
    except _Late:
        draft |= {"tokens": arrivals, "text": "".join(parts)}
        return _record(draft, "hang", f"the stream did not end within {deadline_s:g} s ({len(arrivals)} tokens so far)")
    except requests.exceptions.ConnectTimeout:
        return _record(draft, "error", f"no connection within {CONNECT_S:g} s")
    except requests.exceptions.RequestException as error:
        draft |= {"tokens": arrivals, "text": "".join(parts)}
        if isinstance(error, requests.exceptions.Timeout) or "Read timed out" in str(error):
            return _record(draft, "hang", f"silence for {deadline_s:g} s after {len(arrivals)} tokens")
        return _record(draft, "truncated" if arrivals or "status" in draft else "error", _reason(error))
    except ValueError as error:
        return _record(draft, "error", f"an event of the stream is not JSON: {error}")
    draft |= {"tokens": arrivals, "text": "".join(parts), "finish_reason": finish}
    if not parts:
        return _record(draft, "empty", "HTTP 200 and a stream without a token")
    if not done or finish is None:
        missing = "[DONE]" if not done else "finish_reason"
        return _record(draft, "truncated", f"the stream ended without {missing} after {len(parts)} tokens")
    return _record(draft, "ok", "")


class _Late(Exception):
    pass


def _read_all(answer: requests.Response, deadline: float) -> str:
    body = b""
    for chunk in answer.iter_content(65536):
        body += chunk
        if time.time() > deadline:
            raise _Late
    return body.decode(errors="replace")


def _events(answer: requests.Response, deadline: float) -> Iterator[str]:
    for line in answer.iter_lines(chunk_size=1):
        if time.time() > deadline:
            raise _Late
        if line.startswith(b"data:"):
            yield line[5:].decode(errors="replace").strip()


def _record(draft: dict[str, Any], outcome: Outcome, detail: str) -> Record:
    return Record.model_validate({**draft, "end": time.time(), "outcome": outcome, "detail": detail})


def _reason(error: Exception) -> str:
    """The innermost telling part of requests' nested wording."""
    text = str(error)
    for marker in ("Connection refused", "Name or service not known", "certificate verify failed", "Connection reset by peer"):
        if marker in text:
            return marker
    return text[:300]
