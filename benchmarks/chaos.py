"""Measures chaos on the lab: python -m benchmarks.chaos aim|moments|silence [--rounds N]

aim      milliseconds from a trigger's moment (log line, metric, bytes) to the signal, seen from outside the lab's hosts
moments  how far the experiments' moments of fault and healing are from the lab's own truth, with d0's clock eight hours ahead
silence  false alarms of the smoke experiments on a healthy lab, run again and again
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.lab import ROOT, show
from chaos.aim import Aim, bytes_moving, log_line, metric_above
from chaos.faults.base import IDENTIFY, victims_from
from chaos.faults.processes import Kill
from chaos.guard import Hand
from lab.control import Lab, start
from pdgate.deployment import open_deployment
from pdgate.facts.shell import Shells
from pdgate.inventory.connection import ssh_config_text
from pdgate.serving.record import now

# On d0: writes a log line, says more in its metrics, and sends bytes, each when a byte comes on its port; answers with nothing.
STAGE = r"""
import http.server, socket, threading, time
value = [0]
class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"vllm:num_requests_running %d\n" % value[0]
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
threading.Thread(target=http.server.ThreadingHTTPServer(("127.0.0.1", 9100), Metrics).serve_forever, daemon=True).start()
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", 9101)); s.listen()
while True:
    c, _ = s.accept()
    def serve(c):
        while True:
            what = c.recv(1)
            if what == b"l":
                with open("/var/log/pd/bench.log", "a") as log: log.write("Delaying free of 3 blocks for request r\n")
            elif what == b"m": value[0] = 1
            elif what == b"r": value[0] = 0
            elif what == b"b": c.sendall(b"x" * 200000)
            elif not what: return
    threading.Thread(target=serve, args=(c,), daemon=True).start()
"""


def hand_on(lab: Lab, host: str, folder: Path) -> Hand:
    lab.join()
    deployment = open_deployment(lab.inventory)
    config = folder / "ssh_config"
    config.write_text(ssh_config_text([one.connection for one in deployment.hosts.values()], str(folder)))
    return Hand(deployment.hosts[host], Shells(str(config)))


def chaos_in(lab: Lab, bundle: Path, *which: str) -> list[str]:
    """The command of a chaos run inside the lab's network."""
    words = ["chaos", f"--hosts={lab.inventory}", "--chaos", f"--bundle={bundle}", "-q", "-p", "no:cacheprovider", *which]
    return [sys.executable, "-c", f"import sys, pytest; {lab.joining}; sys.exit(pytest.main({words!r}))"]


def processes(words: bytes) -> list[int]:
    """Pids, as this machine counts them, of processes whose command line holds the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_bytes().replace(b"\0", b" "):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def measure_aim(rounds: int) -> None:
    lab = start("lab", [])
    folder = Path(tempfile.mkdtemp())
    try:
        hand = hand_on(lab, "d0", folder)
        hand.must(f"mkdir -p /var/lib/pdgate; touch /var/log/pd/bench.log; cat >/tmp/stage.py <<'P'{STAGE}P\nsetsid python3 /tmp/stage.py </dev/null >/dev/null 2>&1 &\nsleep 0.5", "stage")
        control = socket.create_connection((str(hand.host.address), 9101))
        threading.Thread(target=_read_all, args=(control,), daemon=True).start()  # what nobody reads is soon not sent either
        for kind, byte in (("log line", b"l"), ("metric", b"m"), ("bytes", b"b")):
            late = []
            for number in range(rounds):
                tag = f"bench{number}"
                aim: Aim = {
                    "log line": log_line("/var/log/pd/bench.log", "Delaying free of", tag),
                    "metric": metric_above("http://127.0.0.1:9100", "vllm:num_requests_running", tag),
                    "bytes": bytes_moving(("10.77.0.1",), (), 100_000, tag),
                }[kind]
                inner = hand.must(f"mkdir -p /var/lib/pdgate/{tag}; setsid sleep {7000 + number} </dev/null >/dev/null 2>&1 & echo $!", "victim").split()[0]
                time.sleep(0.2)
                [pid] = processes(b"sleep %d" % (7000 + number))
                victims = tuple(victims_from(hand.must(IDENTIFY.format(pids=inner), "identify")))
                shot = threading.Thread(target=hand.run, args=(Kill("sleep", "d0", "api", victims, "true", None, aim).inject(), 30.0))
                shot.start()
                time.sleep(0.8)
                at = time.perf_counter()
                control.sendall(byte)
                while state(pid) not in ("gone", "Z") and shot.is_alive():
                    time.sleep(0.0002)
                late.append((time.perf_counter() - at) * 1000)
                shot.join()
                control.sendall(b"r")
                hand.run(f"rm -rf /var/lib/pdgate/{tag}")
            show(f"from the {kind} to the kill", late, "ms")
            print(f"{'':<58} {sorted(late)[int(len(late) * 0.95) - 1]:8.2f} ms   (95th percentile)", flush=True)
    finally:
        lab.stop()


def _read_all(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def measure_moments(rounds: int) -> None:
    lab = start("lab", ["clock-eight-hours-ahead"])
    errors: dict[str, list[float]] = {"fault": [], "healing": []}
    widths: list[float] = []
    try:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                bundle = Path(folder) / "b"
                run = subprocess.Popen(chaos_in(lab, bundle, "-k", "recovery.decode-stalled"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                [core] = [pid for pid in processes(b"VLLM::EngineCore_DP0") if _host_of(pid) == "d0"]
                stopped = went_on = 0.0
                while run.poll() is None and not went_on:
                    now_state = state(core)
                    if now_state == "T" and not stopped:
                        stopped = now()
                    if stopped and now_state != "T":
                        went_on = now()
                    time.sleep(0.001)
                run.wait()
                document = json.loads((bundle / "experiments" / "recovery.decode-stalled.json").read_text())
                fault = document["faults"][0]
                for what, truth, known in (("fault", stopped, fault["injected"]), ("healing", went_on, fault["healed"])):
                    errors[what].append((known[1] - truth) * 1000)
                    widths.append((known[1] - known[0]) * 1000)
        for what, values in errors.items():
            show(f"moment of the {what}: measured minus true", values, "ms")
        show("width of the interval it is known to", widths, "ms")
    finally:
        lab.stop()


def _host_of(pid: int) -> str:
    """The lab host a process lives on, by its uts name space."""
    done = subprocess.run(["nsenter", "-t", str(pid), "--uts", "hostname"], capture_output=True, text=True)
    return done.stdout.strip()


def measure_silence(rounds: int) -> None:
    lab = start("lab", [])
    verdicts: Counter[str] = Counter()
    took = []
    try:
        while sum(verdicts.values()) < rounds and lab.alive:
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                subprocess.run(chaos_in(lab, Path(folder) / "b", "-m", "smoke", "--load-rate=12"), cwd=ROOT, capture_output=True)
                took.append(time.perf_counter() - began)
                document = json.loads((Path(folder) / "b" / "verdict.json").read_text())
                for check in document["checks"]:
                    if check["reason"] == "deselected":
                        continue
                    verdicts[check["verdict"]] += 1
                    if check["verdict"] != "pass":
                        print(json.dumps(check, indent=1), flush=True)
            print(dict(verdicts), f"{statistics.median(took):.0f} s a round", flush=True)
    finally:
        lab.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["aim", "moments", "silence"])
    parser.add_argument("--rounds", type=int, default=20, help="shots, runs of the experiment, or experiments in all")
    chosen = parser.parse_args()
    {"aim": measure_aim, "moments": measure_moments, "silence": measure_silence}[chosen.what](chosen.rounds)
