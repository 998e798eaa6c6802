"""The load generator beside aiperf, in one run: python -m benchmarks.load [--rates 20 50 100 200] [--seconds 10] [--aiperf DIR]

Both play the same rate (constant arrivals, streamed answers of 16 tokens, prompts of about 300 tokens) against the same servers:
the embedded lab, and a plain token server that writes into each token when it sent it. Told are requests answered, the client's CPU
seconds (all its processes, start-up included), its lag behind the schedule, TTFT, and, for pdgate, how far its timestamps are off.
aiperf 0.13.0 (PyPI) is installed into a virtual environment of its own, by default .cache/aiperf, if it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from lab.control import start
from pdgate.rules.statistics import percentile
from pdgate.serving.load import LoadPlan, LoadPrompt, Stage, run_load

ROOT = Path(__file__).resolve().parent.parent
TOKEN_SERVER = "http://127.0.0.1:8123"
LAB = "http://10.77.0.11:1999"
PROMPT = "the river and the light " * 60
TOKENIZER = """
import glob, os, sysconfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
t = Tokenizer(models.BPE()); t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); t.decoder = decoders.ByteLevel()
files = sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py")))[:150]
t.train(files, trainers.BpeTrainer(vocab_size=8000, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
f = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="</s>")
f.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
f.save_pretrained(TARGET)
"""


def install_aiperf(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "aiperf==0.13.0"], check=True)
    if not (folder / "tokenizer").exists():
        subprocess.run([str(python), "-c", f"TARGET = {str(folder / 'tokenizer')!r}\n{TOKENIZER}"], check=True)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pdgate_row(url: str, model: str, rate: float, seconds: float, workers: int, folder: Path) -> str:
    plan = LoadPlan(
        url=url, model=model, prompts=[LoadPrompt(id="p", text=PROMPT)], stages=[Stage(seconds=seconds, rate=rate, arrival="constant")],
        stream_share=1.0, deadline_s=30,
    )  # fmt: skip
    before = cpu_s()
    result = run_load(plan, folder, workers=workers)
    used = cpu_s() - before
    good = [record for record in result.records if record.outcome == "ok"]
    ttft = [record.ttft * 1000 for record in good if record.ttft is not None]
    late = percentile([record.late * 1000 for record in result.records], 0.99).value
    row = f"{len(good):>5}/{len(result.records):<5} {used:7.1f} {late:9.1f} {percentile(ttft, 0.5).value:9.1f} {percentile(ttft, 0.99).value:9.1f}"
    if url == TOKEN_SERVER:
        errors = [abs(at - float(word)) * 1000 for record in good for at, word in zip(record.tokens, record.text.split(), strict=True)]
        row += f"   {percentile(errors, 0.5).value:.2f} / {percentile(errors, 0.99).value:.2f} / {max(errors):.2f}"
    return row


def aiperf_row(url: str, model: str, rate: float, seconds: float, aiperf: Path, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    argv = [str(aiperf / "bin" / "aiperf"), "profile", "-m", model, "-u", url, "--endpoint-type", "completions", "--streaming", "--tokenizer",
            str(aiperf / "tokenizer"), "--request-rate", str(rate), "--arrival-pattern", "constant", "--benchmark-duration", str(seconds),
            "--synthetic-input-tokens-mean", "300", "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", "16", "--output-tokens-stddev", "0",
            "--use-legacy-max-tokens", "--random-seed", "1", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", str(folder)]  # fmt: skip
    before = cpu_s()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=seconds + 120)
    used = cpu_s() - before
    summary = folder / "profile_export_aiperf.json"
    if not summary.exists():
        return f"no result: {(done.stdout + done.stderr).strip()[-200:]}"
    seen = json.loads(summary.read_text())
    good, everything = int(seen["request_count"]["avg"]), int(seen.get("completed_request_count", seen["request_count"])["avg"])
    ttft, late = seen["time_to_first_token"], seen.get("credit_to_start_latency", {}).get("p99", float("nan"))
    return f"{good:>5}/{everything:<5} {used:7.1f} {late:9.1f} {ttft['p50']:9.1f} {ttft['p99']:9.1f}   (TTFT from the actual sending)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 100.0, 200.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--lab-rate", type=float, default=20.0)
    parser.add_argument("--aiperf", type=Path, default=ROOT / ".cache" / "aiperf")
    args = parser.parse_args()
    install_aiperf(args.aiperf)
    lab = start("lab", [])
    lab.join()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.tokens"], cwd=ROOT)
    try:
        _wait(f"{TOKEN_SERVER}/v1/models")
        print(f"{'':<34} {'answered':>11} {'CPU s':>7} {'lag p99':>9} {'TTFT p50':>9} {'TTFT p99':>9}   timestamps off by p50/p99/max ms", flush=True)
        cases = [("lab", LAB, "Qwen3-32B", args.lab_rate)] + [("token server", TOKEN_SERVER, "m", rate) for rate in args.rates]
        for where, url, model, rate in cases:
            with tempfile.TemporaryDirectory() as folder:
                for workers in (0, 2):
                    name = f"{where}, {rate:g}/s, pdgate {'one process' if not workers else '2 workers'}"
                    print(f"{name:<34} {pdgate_row(url, model, rate, args.seconds, workers, Path(folder) / str(workers))}", flush=True)
                print(f"{f'{where}, {rate:g}/s, aiperf':<34} {aiperf_row(url, model, rate, args.seconds, args.aiperf, Path(folder) / 'aiperf')}", flush=True)
    finally:
        server.terminate()
        server.wait()
        lab.stop()


def _wait(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


if __name__ == "__main__":
    main()
