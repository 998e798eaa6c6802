"""One OpenAI-style request with a deadline. 200 proves nothing: the outcome comes from what was said, and how it ended.

Single checks and the load use the same functions, so that a record means the same thing everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import requests
import urllib3

from pdgate.serving.record import Api, Outcome, Record, now

CONNECT_S = 5.0
BODY_KEPT = 4096
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# Answers that stop as if they were whole.
NO_REASON, NO_END = "no finish_reason", "the stream ended without"


def looks_whole(record: Record) -> bool:
    """Whether a truncated answer ended politely: many clients take it for the whole one. A broken connection tells them."""
    return record.outcome == "truncated" and record.detail.startswith((NO_REASON, NO_END))


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
    """A greedy request. `id` names it in records and golden answers."""

    id: str
    text: str
    model: str
    max_tokens: int = 16
    api: Api = "completions"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, stream: bool) -> dict[str, Any]:
        asked = {"prompt": self.text} if self.api == "completions" else {"messages": [{"role": "user", "content": self.text}]}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": self.model, **asked, "max_tokens": self.max_tokens, "temperature": 0, "seed": 0, "stream": stream, **usage, **self.extra,
        }  # fmt: skip


@dataclass(frozen=True)
class Leave:
    """When the client goes away: after so many tokens or seconds, with FIN or, on `reset`, with RST."""

    after_tokens: int | None = None
    after_s: float | None = None
    reset: bool = False


def complete(
    endpoint: Endpoint, prompt: Prompt, deadline_s: float, *, leave: Leave | None = None, scheduled: float | None = None
) -> Record:
    """A non-streaming request; never raises for what the server does."""
    call = _Call(endpoint, prompt.path, deadline_s, leave, scheduled, prompt_id=prompt.id, api=prompt.api)
    return call.run(json.dumps(prompt.body(stream=False)).encode(), _whole)


def stream(
    endpoint: Endpoint, prompt: Prompt, deadline_s: float, *, leave: Leave | None = None, scheduled: float | None = None
) -> Record:
    """A streaming request; where the client leaves by plan the outcome is `aborted`."""
    call = _Call(endpoint, prompt.path, deadline_s, leave, scheduled, prompt_id=prompt.id, api=prompt.api, stream=True)
    return call.run(json.dumps(prompt.body(stream=True)).encode(), _streamed)


def post(endpoint: Endpoint, path: str, body: str, prompt_id: str, deadline_s: float) -> Record:
    """Post a raw body, whole or broken JSON alike, and read the answer as a completion."""
    return _Call(endpoint, path, deadline_s, None, None, prompt_id=prompt_id).run(body.encode(), _whole)


class _Late(Exception):
    """The deadline has passed."""


class _Left(Exception):
    """The client goes away, as planned."""


class _Call:
    """One exchange: what is known of it so far (`draft`), and when it must end."""

    def __init__(self, endpoint: Endpoint, path: str, deadline_s: float, leave: Leave | None, scheduled: float | None, **draft: Any) -> None:
        self.url = endpoint.url + path
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close", **endpoint.headers()}
        self.deadline_s, self.leave = deadline_s, leave or Leave()
        self.sent = now()
        self.until = self.sent + deadline_s
        self.leave_at = None if self.leave.after_s is None else self.sent + self.leave.after_s
        self.draft: dict[str, Any] = {"url": self.url, "scheduled": scheduled or self.sent, "sent": self.sent, **draft}
        self.said: list[str] = []
        self.arrivals: list[float] = []

    def run(self, data: bytes, read: Any) -> Record:
        try:
            with requests.post(
                self.url, data=data, headers=self.headers, timeout=(min(CONNECT_S, self.deadline_s), self._patience()), stream=True
            ) as answer:
                self.draft |= {"status": answer.status_code, "first_byte": now()}
                try:
                    outcome, detail = read(self, answer)
                except _Left:
                    if self.leave.reset and (sock := _socket_of(answer)) is not None:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raise
        except _Left:
            outcome, detail = "aborted", f"the client left after {len(self.arrivals)} tokens"
        except _Late:
            outcome, detail = "hang", f"the answer did not end within {self.deadline_s:g} s ({len(self.arrivals)} tokens so far)"
        except requests.exceptions.ConnectTimeout:
            outcome, detail = "error", f"no connection within {CONNECT_S:g} s"
        except requests.exceptions.Timeout:
            if self.leave_at is not None and now() >= self.leave_at - 0.005:
                outcome, detail = "aborted", "the client left before the first byte"
            else:
                outcome, detail = "hang", f"no answer within {self.deadline_s:g} s"
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            outcome, detail = ("truncated" if "first_byte" in self.draft else "error"), _reason(error)
        except ValueError as error:
            outcome, detail = "error", f"an event of the stream is not JSON: {error}"
        if self.arrivals or self.said:
            self.draft |= {"tokens": self.arrivals, "text": "".join(self.said)}
        return Record.model_validate({**self.draft, "end": now(), "outcome": outcome, "detail": detail})

    def _patience(self) -> float:
        """Seconds until the deadline or the planned leaving, whichever is first; raises _Late or _Left past it."""
        moment = now()
        if self.leave_at is not None and self.leave_at <= self.until:
            if moment >= self.leave_at:
                raise _Left
            return self.leave_at - moment
        if moment >= self.until:
            raise _Late
        return self.until - moment

    def chunks(self, answer: requests.Response) -> Iterator[bytes]:
        """What arrives, as it arrives; silence and trickle alike meet the deadline."""
        sock = _socket_of(answer)
        while True:
            patience = self._patience()
            with contextlib.suppress(OSError):  # closed: all that is left to read is here already
                if sock is not None:
                    sock.settimeout(patience)
            try:
                data = answer.raw.read1(65536)
            except (urllib3.exceptions.ReadTimeoutError, TimeoutError):
                self._patience()
                raise _Late from None
            if not data:
                return
            yield data

    def usage(self, document: dict[str, Any]) -> None:
        counted = document.get("usage") or {}
        if document.get("id"):
            self.draft["served_id"] = str(document["id"])
        for key in ("prompt_tokens", "completion_tokens"):
            if isinstance(counted.get(key), int):
                self.draft[key] = counted[key]


def _socket_of(answer: requests.Response) -> socket.socket | None:
    """The connection's socket, so that each read can have its own patience. urllib3 keeps it in one of two places."""
    places: list[Callable[[Any], Any]] = [lambda raw: raw.connection.sock, lambda raw: raw._fp.fp.raw._sock]
    for place in places:
        with contextlib.suppress(AttributeError):
            found = place(answer.raw)
            if isinstance(found, socket.socket):
                return found
    return None


def _whole(call: _Call, answer: requests.Response) -> tuple[Outcome, str]:
    text = b"".join(call.chunks(answer)).decode(errors="replace")
    call.draft["body"] = text[:BODY_KEPT]
    if answer.status_code != 200:
        return "error", f"HTTP {answer.status_code}: {' '.join(text.split())[:300]}"
    if not text.strip():
        return "empty", "HTTP 200 with an empty body"
    try:
        document = json.loads(text)
        choice = document["choices"][0]
        said = text_of(choice, "message")
        finish = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "error", f"HTTP 200, but not a completion: {' '.join(text.split())[:300]}"
    call.usage(document)
    call.said.append(said)
    call.draft["finish_reason"] = finish
    if not said:
        return "empty", "HTTP 200 with no text"
    return ("truncated", NO_REASON) if finish is None else ("ok", "")


def _streamed(call: _Call, answer: requests.Response) -> tuple[Outcome, str]:
    if answer.status_code != 200:
        return "error", f"HTTP {answer.status_code}: {b''.join(call.chunks(answer)).decode(errors='replace')[:300]}"
    done = False
    for event in events(call.chunks(answer)):
        at = now()
        if event == "[DONE]":
            done = True
            break
        chunk = json.loads(event)
        if not isinstance(chunk, dict) or "error" in chunk:
            return "error", f"error inside the stream: {event[:300]}"
        call.usage(chunk)
        for choice in chunk.get("choices", []):
            said = text_of(choice, "delta")
            if said:
                call.arrivals.append(at)
                call.said.append(said)
            call.draft["finish_reason"] = choice.get("finish_reason") or call.draft.get("finish_reason")
        if call.leave.after_tokens is not None and len(call.arrivals) >= call.leave.after_tokens:
            raise _Left
    if not call.said:
        return "empty", "HTTP 200 and a stream without a token"
    if not done or call.draft.get("finish_reason") is None:
        return "truncated", f"{NO_END} {'finish_reason' if done else '[DONE]'} after {len(call.arrivals)} tokens"
    return "ok", ""


def text_of(choice: dict[str, Any], chat_key: str) -> str:
    said = choice.get("text", (choice.get(chat_key) or {}).get("content"))
    return said or ""


def events(chunks: Iterator[bytes]) -> Iterator[str]:
    """The `data:` of server-sent events."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode(errors="replace").strip()
    if rest.startswith(b"data:"):
        yield rest[5:].decode(errors="replace").strip()


def _reason(error: Exception) -> str:
    """The innermost telling part of requests' nested wording."""
    text = str(error)
    for marker in ("Connection refused", "Name or service not known", "certificate verify failed", "Connection reset by peer"):
        if marker in text:
            return marker
    return text[:300]
