"""A steady load with everything that is seen around it: counters before and after, health each second, logs, KV afterwards."""

from __future__ import annotations

import datetime
import json
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path

from pdgate.facts.shell import HostUnreachable, Shells
from pdgate.inventory.model import Deployment, Proxy
from pdgate.inventory.variables import Load
from pdgate.serving.exchange import POLL_S, Settling, decoder_alone, front_of, observe, unsettled, wait_for_baseline
from pdgate.serving.golden import GoldenBook, judged_twice
from pdgate.serving.load import LoadPlan, LoadResult, Stage, run_load
from pdgate.serving.load.run import Progress
from pdgate.serving.logs import LogBook, Logs, attribute
from pdgate.serving.metrics import Sample
from pdgate.serving.record import Record, append_records
from pdgate.serving.watch import Moment, Watch, look, matrix

RAMP = 0.2
QUIET_S = 2.0
Counts = dict[str, dict[str, tuple[int, int]]]


@dataclass
class Steady:
    """What a steady load left, judged against the golden answers."""

    load: LoadResult
    records: list[Record]
    before: dict[str, Sample]
    after: dict[str, Sample]
    settling: Settling
    moments: list[Moment]
    drained: dict[str, Moment]
    logs: Logs
    communicators: tuple[Counts, Counts]
    book: GoldenBook  # as far as it is sure after a second look
    unknown: dict[str, str] = field(default_factory=dict)

    def of(self, unit: str) -> list[Moment]:
        return [moment for moment in self.moments if moment.unit == unit]

    def timeline(self) -> dict[str, list[float]]:
        """Each engine's count of finished requests, once a second."""
        lines: dict[str, list[float]] = {}
        for moment in self.moments:
            count = moment.sample.total("vllm:request_success_total") if moment.sample else None
            if count is not None:
                lines.setdefault(moment.unit, []).append(count)
        return lines


def load_plan(deployment: Deployment, proxy: Proxy, wish: Load, book: GoldenBook, deadline_s: float) -> LoadPlan:
    """The plan of `pd_load` against a proxy: a ramp, the steady part, the burst."""
    ramp = wish.seconds * RAMP
    stages = [Stage(seconds=ramp, rate=0.0, rate_end=wish.rate), Stage(seconds=wish.seconds - ramp, rate=wish.rate)]
    if wish.burst:
        stages.append(Stage(seconds=1.0, rate=float(wish.burst), arrival="burst"))
    endpoint = front_of(deployment, proxy)
    return LoadPlan(
        url=endpoint.url, api_key_env=endpoint.api_key_env, model=book.model, prompts=[golden.prompt for golden in book.answers.values()],
        stages=stages, seed=wish.seed, stream_share=wish.stream_share, abort_share=wish.abort_share, deadline_s=deadline_s,
    )  # fmt: skip


def run_steady(
    deployment: Deployment, plan: LoadPlan, book: GoldenBook, logbook: LogBook, folder: Path, *, bound_s: float, workers: int = 0,
    remote_workers: int = 0, master: str = "127.0.0.1:0", progress: Progress | None = None,
) -> Steady:  # fmt: skip
    """Apply the load and look at everything meanwhile; leaves requests.jsonl and health.json in `folder`. Raises LoadFailed."""
    shells = logbook.shells
    logbook.read()
    communicators = count_communicators(deployment, shells)
    before, _ = observe(deployment)
    with Watch(deployment) as watch:
        load = run_load(plan, folder / "load", workers=workers, remote_workers=remote_workers, master=master, progress=progress)
        _until_quiet(deployment, before)
    after, unknown = observe(deployment)
    settling = wait_for_baseline(deployment, book.model, before, bound_s)
    drained = {proxy.name: look(deployment, proxy) for proxy in deployment.proxies}
    logs = Logs(logbook.read(), dict(logbook.unknown), datetime.date.today())
    judged, book = judged_twice(load.records, book, decoder_alone(deployment), plan.deadline_s)
    records = attribute(judged, logs)
    load.records = records
    append_records(folder / "requests.jsonl", records)
    failures = [record.end for record in records if record.outcome not in ("ok", "aborted") and record.end]
    tokens = [at for record in records for at in (record.tokens or ([record.end] if record.outcome == "ok" and record.end else []))]
    rows = matrix(watch.moments, tokens, failures, load.start)
    (folder / "health.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return Steady(
        load, records, before, after, settling, watch.moments, drained, logs, (communicators, count_communicators(deployment, shells)), book, unknown
    )


def _until_quiet(deployment: Deployment, before: dict[str, Sample]) -> None:
    """Requests whose client has left may still run for a moment; counters are read when they are through."""
    until = time.monotonic() + QUIET_S
    while time.monotonic() < until:
        time.sleep(POLL_S)
        now, _ = observe(deployment)
        if not any("running" in held or "waiting" in held for held in unsettled(before, now).values()):
            return


def count_communicators(deployment: Deployment, shells: Shells) -> Counts:
    """HcclCommInit and HcclCommDestroy by host and plog file, for hosts that declare `pd_plog`."""
    counts: Counts = {}
    for name, host in deployment.hosts.items():
        if host.plog is None:
            continue
        script = (
            f"find {shlex.quote(host.plog)} -name 'plog-*' -type f 2>/dev/null | while read -r file; do\n"
            'echo "$(grep -c HcclCommInit "$file") $(grep -c HcclCommDestroy "$file") $file"\ndone\n'
        )
        try:
            output = shells.run(host.connection, script).stdout
        except HostUnreachable:
            continue
        words = [line.split(maxsplit=2) for line in output.splitlines()]
        counts[name] = {file: (int(inits), int(destroys)) for inits, destroys, file in words}
    return counts
