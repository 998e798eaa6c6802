"""The PD hand-off by hand: P's half, then D's half, so that something may happen in between.

The contract is that of vllm-ascend's and NIXL's proxies: `kv_transfer_params` with do_remote_decode goes to P, what P answers
goes to D. Upstream's MooncakeConnector answers none; its router composes them.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import requests

from pdgate.serving.client import Endpoint, Prompt, complete
from pdgate.serving.record import Record

ASK_P = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class NoHandover(Exception):
    """P did not give what D needs; the message says what it answered."""


def prefill(endpoint: Endpoint, prompt: Prompt, request_id: str, deadline_s: float) -> dict[str, Any]:
    """P's half: its `kv_transfer_params` for D. Raises NoHandover."""
    body = {**prompt.body(stream=False), "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": ASK_P}
    headers = {**endpoint.headers(), "X-Request-Id": request_id}
    try:
        answer = requests.post(f"{endpoint.url}/v1/completions", json=body, headers=headers, timeout=(5, deadline_s))
        params = answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
    except (requests.exceptions.RequestException, ValueError) as error:
        raise NoHandover(f"{endpoint.url}: {error}") from None
    if not isinstance(params, dict):
        raise NoHandover(f"{endpoint.url} answered no kv_transfer_params: HTTP {answer.status_code} {answer.text[:200]}")
    return params


def decode(endpoint: Endpoint, prompt: Prompt, params: dict[str, Any], deadline_s: float) -> Record:
    """D's half: the record of the request as its client sees it."""
    return complete(endpoint, replace(prompt, extra={**prompt.extra, "kv_transfer_params": params}), deadline_s)


def jsonl(record: Record) -> str:
    """A record as the line it is kept as."""
    return json.dumps({"kept": time.time(), **record.model_dump(mode="json")}, ensure_ascii=False) + "\n"
