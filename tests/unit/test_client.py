"""A request's outcome comes from what was said and how it ended; proved against a server that does each thing wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdgate.serving.client import Endpoint, Leave, Prompt, complete, stream
from pdgate.serving.metrics import MetricsUnavailable, scrape


def sse(*events: str) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode()


def token(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}]})


WHOLE = json.dumps({"choices": [{"text": " a b", "finish_reason": "length"}]}).encode()
METRICS = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'


class Handler(BaseHTTPRequestHandler):
    """The first path segment says what to do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, METRICS if self.path.startswith("/good") else b"<html>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        case = self.path.split("/")[1]
        if case == "hang":
            time.sleep(3)
        elif case == "trickle":
            self._head(200, None)
            for _ in range(30):
                self.wfile.write(b"data: " + token(" x").encode() + b"\n\n")
                self.wfile.flush()
                time.sleep(0.1)
        elif case == "cut":
            self._head(200, 1000)
            self.wfile.write(sse(token(" a")))
            self.wfile.flush()
            self.close_connection = True
        elif case in ANSWERS:
            self._answer(*ANSWERS[case])

    def _head(self, status: int, length: int | None) -> None:
        self.send_response(status)
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _answer(self, status: int, body: bytes) -> None:
        self._head(status, len(body))
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


ANSWERS = {
    "good": (200, WHOLE), "empty": (200, b""), "html": (200, b"<html>login</html>"), "refuse": (400, b'{"error": {"message": "no"}}'),
    "unfinished": (200, json.dumps({"choices": [{"text": "a", "finish_reason": None}]}).encode()),
    "s-good": (200, sse(token(" a"), token(" b", "length"), "[DONE]")), "s-empty": (200, b""), "s-done-only": (200, sse("[DONE]")),
    "s-no-done": (200, sse(token(" a"), token(" b", "length"))), "s-no-finish": (200, sse(token(" a"), "[DONE]")),
    "s-error": (200, sse(token(" a"), '{"error": {"message": "Internal server error"}}')), "s-garbage": (200, sse("{not json")),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


PROMPT = Prompt("p", "hello", "m")


@pytest.mark.parametrize(
    ("case", "outcome", "detail"),
    [
        ("good", "ok", ""), ("empty", "empty", "empty body"), ("html", "error", "not a completion"), ("refuse", "error", "HTTP 400"),
        ("unfinished", "truncated", "finish_reason"), ("hang", "hang", "within 1 s"), ("cut", "truncated", ""),
    ],
)  # fmt: skip
def test_whole_answers(server: str, case: str, outcome: str, detail: str) -> None:
    started = time.monotonic()
    record = complete(Endpoint(f"{server}/{case}"), PROMPT, 1)
    assert record.outcome == outcome and detail in record.detail
    assert time.monotonic() - started < 2
    assert record.end is not None and record.end >= record.sent


@pytest.mark.parametrize(
    ("case", "outcome", "detail"),
    [
        ("s-good", "ok", ""), ("s-empty", "empty", "without a token"), ("s-done-only", "empty", "without a token"),
        ("s-no-done", "truncated", "[DONE]"), ("s-no-finish", "truncated", "finish_reason"), ("s-error", "error", "inside the stream"),
        ("s-garbage", "error", "not JSON"), ("hang", "hang", "1 s"), ("trickle", "hang", "did not end"), ("cut", "truncated", ""),
        ("refuse", "error", "HTTP 400"),
    ],
)  # fmt: skip
def test_streams(server: str, case: str, outcome: str, detail: str) -> None:
    started = time.monotonic()
    record = stream(Endpoint(f"{server}/{case}"), PROMPT, 1)
    assert record.outcome == outcome and detail in record.detail, record
    assert time.monotonic() - started < 2


def test_a_client_that_leaves_is_aborted(server: str) -> None:
    record = stream(Endpoint(f"{server}/trickle"), PROMPT, 5, leave=Leave(after_tokens=2))
    assert record.outcome == "aborted" and len(record.tokens) == 2 and record.ttft is not None


def test_nobody_there_is_an_error_and_not_a_hang() -> None:
    record = complete(Endpoint("http://127.0.0.1:1"), PROMPT, 1)
    assert record.outcome == "error" and record.detail == "Connection refused"


def test_metrics_are_summed_over_engines_and_absent_ones_are_none(server: str) -> None:
    sample = scrape(Endpoint(f"{server}/good"))
    assert sample.running == 3 and sample.waiting is None
    assert sample.total("vllm:num_requests_running", engine="1") == 2


def test_a_page_that_is_no_metrics_is_unavailable(server: str) -> None:
    with pytest.raises(MetricsUnavailable, match="not Prometheus"):
        scrape(Endpoint(f"{server}/html"))
