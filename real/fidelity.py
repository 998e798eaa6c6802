"""How true the lab is: the same scenarios on the lab and on real engines, compared.

    python -m real.fidelity capture lab > lab.json        # boots it (or uses the kept one), runs the scenarios
    python -m real.fidelity capture real > real.json
    python -m real.fidelity compare lab.json real.json > docs/fidelity.md

Scenarios, each on P and D without a proxy: a healthy hand-off; malformed JSON, an unknown model, an over-long prompt; a prefill that
nobody pulls, until P frees it by force; a decode whose P's port nobody listens on, by a decoder that knows P.
"""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from lab.control import kept, start
from pdgate.connectors import connector_of
from pdgate.deployment import open_deployment
from pdgate.facts.collect import collect
from pdgate.inventory.model import Engine
from pdgate.plugin.run import Run
from pdgate.rules.running import running_engine
from pdgate.serving.exchange import endpoint_of, fresh_prompt, served_models
from pdgate.serving.handover import decode, prefill
from pdgate.serving.logs import LogMark, mark, since

ROLES = ("prefill", "decode")
# Why a difference stands; the first pattern that matches a row gives the reason.
REASONS = [
    (
        r"TransferEngine|transfer_engine|glog|tcp_transport|Segment",
        "Mooncake's C++ lines: the lab writes one of them, its data path is its own",
    ),
    (r"throughput|Engine 000", "the periodic stats line: not emulated; /metrics is"),
    (r"GET /|POST /", "access lines: the lab leaves out /health and /metrics"),
    (
        r"(malformed JSON|unknown model|over-long prompt): 4",
        "same status and type; the words differ by version: the lab has vLLM 0.23's, the real engine here is 0.32",
    ),
    (
        r"ADXL|: other",
        "on an NPU workers listen on ADXL ports, as in the lab; the real engines here move KV over tcp ports of Mooncake's choice",
    ),
    (r"kv_fetch_by_stage|admission_rejections|cached_by_source", "new after vLLM 0.23, which the lab emulates"),
    (r"Starting vLLM server|finish req not in reqs", "open: seen in one of the two only, harmless to every check"),
    (
        r"estimated_|mm_cache|created|_bucket|_sum|_count|seconds|config_info|corrupted|http_|process_|python_",
        "not emulated: nothing judges it yet",
    ),
]


def capture(name: str) -> dict[str, Any]:
    """Run the scenarios on the embedded deployment `name`; everything seen, as plain data."""
    lab = kept(name) or start(name, [])
    try:
        lab.join()
        folder = Path(f"/proc/{lab.pid}/root/run/pdlab/fidelity-{uuid.uuid4().hex[:6]}")
        run = Run(open_deployment(lab.inventory), folder)
        run.save()
        return _scenarios(run)
    finally:
        if kept(name) is None:
            lab.stop()


def _scenarios(run: Run) -> dict[str, Any]:
    deployment = run.deployment
    p, d = (next(engine for engine in deployment.engines if engine.role == role) for role in ROLES)
    seen: dict[str, Any] = {"versions": {}, "ports": _ports(run, [p, d]), "errors": {}, "timings": {}, "logs": {}}
    marks = {engine.role: _mark(run, engine) for engine in (p, d)}
    p_end, d_end = endpoint_of(deployment, p), endpoint_of(deployment, d)
    assert p_end and d_end
    prompt = fresh_prompt("fidelity", str(p.model))
    params = prefill(p_end, prompt, uuid.uuid4().hex, 60)
    seen["handover"] = sorted(params)
    answer = decode(d_end, prompt, params, 60)
    seen["healthy"] = answer.outcome
    limit = served_models(p_end)[str(p.model)] or 4096
    for what, body in (
        ("malformed JSON", '{"model": "x", "prompt": '),
        ("unknown model", json.dumps({"model": "nope", "prompt": "x"})),
        ("over-long prompt", json.dumps({"model": p.model, "prompt": "over long " * limit})),
    ):
        seen["errors"][what] = _error(f"{p_end.url}/v1/completions", body)
    seen["errors"]["unknown path"] = _error(f"{p_end.url}/no/such/path", "{}")
    seen["timings"]["P frees an unpulled request, s after the abort timeout"] = _forced_free(run, p, marks["prefill"])
    seen["metrics"] = {role: _metrics(endpoint) for role, endpoint in (("prefill", p_end.url), ("decode", d_end.url))}
    seen["logs"] = {engine.role: _templates(_since(run, engine, marks[engine.role])) for engine in (p, d)}
    seen["start-up"] = _templates(_from_start(run, p))
    return seen


def _mark(run: Run, engine: Engine) -> LogMark:
    place = mark(run.shells, run.deployment.host_of(engine).connection, [str(engine.log)])[str(engine.log)]
    assert isinstance(place, LogMark), place
    return place


def _since(run: Run, engine: Engine, place: LogMark) -> list[str]:
    lines = since(run.shells, run.deployment.host_of(engine).connection, [place])[place.path]
    assert isinstance(lines, list), lines
    return lines


def _from_start(run: Run, engine: Engine) -> list[str]:
    place = _mark(run, engine)
    return _since(run, engine, LogMark(place.path, place.inode, 0))


def _forced_free(run: Run, p: Engine, place: LogMark) -> float:
    """Seconds beyond the abort timeout until P says that it freed a request nobody pulled."""
    endpoint = endpoint_of(run.deployment, p)
    assert endpoint
    timer = connector_of(p.connector).timer("abort", p)
    facts, _ = collect(run.deployment, run.shells)
    running = running_engine(p, facts[run.deployment.host_of(p).machine])
    assert timer and running
    timeout = timer.seconds(running.environment)
    request = prefill(endpoint, fresh_prompt("unpulled", str(p.model)), uuid.uuid4().hex, 60)["remote_request_id"]
    begun = time.monotonic()
    pattern = connector_of(p.connector).signatures.forced_free
    while time.monotonic() - begun < timeout + 30:
        time.sleep(0.2)
        if any((found := re.search(pattern, line)) and found["id"] == request for line in _since(run, p, place)):
            return round(time.monotonic() - begun - timeout, 1)
    raise AssertionError(f"{p.name} did not say that it freed the request within {timeout + 30:g} s")


def _error(url: str, body: str) -> dict[str, Any]:
    answer = requests.post(url, data=body, headers={"Content-Type": "application/json"}, timeout=60)
    try:
        error = answer.json().get("error", answer.json())
    except ValueError:
        error = {"text": answer.text[:80]}
    return {"status": answer.status_code, "type": error.get("type"), "message": normal(str(error.get("message", error)))[:90]}


def _metrics(url: str) -> dict[str, list[str]]:
    """vLLM's sample names with their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(requests.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return {name: sorted(labels) for name, labels in found.items()}


def _ports(run: Run, engines: list[Engine]) -> dict[str, list[str]]:
    """Listeners of an engine by what they are: process title and range."""
    facts, _ = collect(run.deployment, run.shells)
    found: dict[str, list[str]] = {}
    for engine in engines:
        own = facts[run.deployment.host_of(engine).machine]
        running = running_engine(engine, own)
        assert running
        rows = set()
        for listener in own.listeners.get():
            if listener.pid not in running.pids or listener.address in ("127.0.0.1", "::1"):
                continue
            process = own.process(listener.pid)
            title = "API server" if listener.pid == running.api.pid else re.sub(r"_?(DP|TP)\d*.*", "", process.comm) if process else "?"
            rows.add(f"{title}: {_range(listener.port, engine)}")
        found[engine.role] = sorted(rows)
    return found


def _range(port: int, engine: Engine) -> str:
    if port == engine.http_port:
        return "HTTP port"
    if any(claim.port == port for claim in connector_of(engine.connector).port_group(engine)):
        return "its port of the KV group"
    return "15000-17000 (RPC, data)" if 15000 <= port <= 17000 else "20000-20800 (ADXL)" if 20000 <= port <= 20800 else "other"


def normal(text: str) -> str:
    """Numbers, ids and addresses out, so that two lines of one template are equal."""
    text = re.sub(r"\b(chat)?cmpl-[\w-]+", "ID", text)
    text = re.sub(r"(Initializing Mooncake Scheduler) \S+", r"\1 ID", text)
    text = re.sub(r"\b[0-9a-f]{8}-?[0-9a-f-]{20,}\b|\b[0-9a-f]{16,}\b", "HEX", text)
    text = re.sub(r"\d+\.\d+\.\d+\.\d+(:\d+)?", "ADDR", text)
    return re.sub(r"-?\d+(\.\d+)?", "N", text).strip()


def _templates(lines: list[str]) -> list[str]:
    """`process LEVEL [file] text` of every dated line, normalised, once each."""
    found = []
    for line in lines:
        match = re.match(
            r"\((\w+?)(?:_?[DPTE]P\d+)*(?:-\d+)? pid=\d+\) (?:\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) (?:\S+ )?\S+ \[([\w.]+):\d+\] (.*)",
            line,
        )
        if match and match[4].strip():
            found.append(f"{match[1]} {match[2]} [{match[3]}] {normal(match[4])[:150]}")
    return list(dict.fromkeys(found))


def compare(ours: dict[str, Any], truth: dict[str, Any], names: tuple[str, str]) -> str:
    """The page: every row the lab emits against the real one, and what real engines emit in the scenarios that the lab does not."""
    out = ["# Fidelity of the lab", "", f"Made by `python -m real.fidelity compare` from one capture of `--hosts={names[0]}` and one of `--hosts={names[1]}`.",
           "The scenarios are in real/fidelity.py. If the two differ, the lab is wrong, unless the reason column says why it may.", ""]  # fmt: skip
    for title, key in (("Log lines in the scenarios, P", "prefill"), ("Log lines in the scenarios, D", "decode")):
        out += _rows(title, ours["logs"][key], truth["logs"][key])
    out += _rows(
        "Log lines of the start-up (only the lab's; a real start says far more)", ours["start-up"], truth["start-up"], lab_only=True
    )
    for role in ROLES:
        out += _rows(
            f"Metrics of {role}: name and labels",
            [f"{name}{{{', '.join(labels)}}}" for name, labels in ours["metrics"][role].items()],
            [f"{name}{{{', '.join(labels)}}}" for name, labels in truth["metrics"][role].items()],
        )
        out += _rows(f"Listening ports of {role} (loopback left out)", ours["ports"][role], truth["ports"][role])
    out += _rows("Errors: status, type, message", *(
        [f"{what}: {e['status']} {e['type']} {e['message']}" for what, e in side["errors"].items()] for side in (ours, truth)
    ))  # fmt: skip
    out += _rows("Keys of P's kv_transfer_params", ours["handover"], truth["handover"])
    out += ["## Timings", "", "| | lab | real |", "| --- | --- | --- |"]
    out += [f"| {what} | {value} | {truth['timings'].get(what)} |" for what, value in ours["timings"].items()]
    return "\n".join(out) + "\n"


def _rows(title: str, ours: list[str], truth: list[str], lab_only: bool = False) -> list[str]:
    both = [row for row in ours if row in truth]
    extra = [row for row in ours if row not in truth]
    lacking = [] if lab_only else [row for row in truth if row not in ours]
    out = [
        f"## {title}",
        "",
        f"{len(both)} equal, {len(extra)} only in the lab, {len(lacking)} only real.",
        "",
        "| where | what | reason |",
        "| --- | --- | --- |",
    ]
    out += [f"| both | `{_cell(row)}` | |" for row in both]
    out += [f"| lab only | `{_cell(row)}` | {_reason(row)} |" for row in extra]
    out += [f"| real only | `{_cell(row)}` | {_reason(row)} |" for row in lacking]
    return [*out, ""] if len(out) > 6 else [*out, "| – | nothing to compare | |", ""]


def _cell(row: str) -> str:
    return row.replace("\n", " ").replace("|", "/").replace("`", "'")


def _reason(row: str) -> str:
    return next((reason for pattern, reason in REASONS if re.search(pattern, row)), "open")


def main(argv: list[str]) -> None:
    if argv[:1] == ["capture"] and len(argv) == 2:
        print(json.dumps(capture(argv[1]), indent=1))
    elif argv[:1] == ["compare"] and len(argv) == 3:
        paths = [Path(name) for name in argv[1:]]
        captures = [json.loads(path.read_text()) for path in paths]
        print(compare(captures[0], captures[1], (paths[0].stem, paths[1].stem)), end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
