"""`pdgate ab`: the same load against variants that differ in one thing each, before and after it the unchanged deployment.

R2's method: stop the bleeding, save the evidence, then one variable per run. How a variant is applied and undone is the operator's
own command; pdgate runs it, keeps what is applied on disk until it is undone, and refuses to mix two changes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdgate.deployment import open_deployment
from pdgate.facts.model import UnknownFact
from pdgate.facts.shell import HostUnreachable, Shells
from pdgate.inventory.connection import ssh_config_text
from pdgate.inventory.model import Deployment, InventoryError
from pdgate.inventory.variables import Load
from pdgate.rules.load import must_be_applied, must_be_punctual
from pdgate.rules.statistics import Estimate, difference, difference_of_shares, percentile
from pdgate.serving.client import Endpoint, complete
from pdgate.serving.exchange import endpoint_of, front_of, served_models
from pdgate.serving.golden import GoldenBook, judged_all, prompt_with_salt
from pdgate.serving.load import LoadFailed, run_load
from pdgate.serving.questions import deadline_of, golden_of, model_of
from pdgate.serving.record import Record
from pdgate.serving.steady import load_plan

MEASURES = (("ttft", 0.5), ("ttft", 0.95), ("itl", 0.5), ("e2e", 0.5), ("e2e", 0.95))
COMMAND_S = 600.0
FLOOR = {"%": 0.1, "ms": 1.0}  # below this a sure difference is not worth a word


class MatrixError(Exception):
    """The matrix cannot be used or a command of it failed; the message names file, variant and key."""


class Variant(BaseModel):
    """One change against the deployment as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    change: dict[str, str | int | float | bool] = Field(description="what changes, one thing: {HCCL_BUFFSIZE: 200}")
    apply: str = Field(min_length=1, description="command that applies it")
    undo: str = Field(min_length=1, description="command that takes it back")
    host: str | None = Field(None, description="inventory host the commands run on; default: here")


class Matrix(BaseModel):
    """The file of `pdgate ab`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    load: Load = Field(default_factory=lambda: Load.model_validate({}))
    ready_within_s: float = Field(300.0, gt=0, description="after a command, until the proxy answers again")
    variants: list[Variant] = Field(min_length=1)


def load_matrix(path: Path) -> Matrix:
    """Read a matrix; raises MatrixError, also where a variant changes two things at once."""
    try:
        matrix = Matrix.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise MatrixError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise MatrixError(f"{path}: key '{'.'.join(map(str, first['loc']))}': {first['msg'].lower()}") from None
    names = [variant.name for variant in matrix.variants]
    for variant in matrix.variants:
        if len(variant.change) != 1:
            raise MatrixError(
                f"{path}: variant '{variant.name}' changes {len(variant.change)} things ({', '.join(variant.change) or 'none named'}); one variable "
                "at a time, or a difference has no cause: make a variant of each"
            )
        if names.count(variant.name) > 1:
            raise MatrixError(f"{path}: two variants are called '{variant.name}'")
    return matrix


class Applied:
    """What is applied right now to a deployment, by whatever matrix: on disk before it is applied and until it is undone."""

    def __init__(self, deployment: Deployment, folder: Path | None = None) -> None:
        places = sorted(f"{host.connection.kind}:{host.connection.name}:{host.address}" for host in deployment.hosts.values())
        known = hashlib.sha256("\n".join(places).encode()).hexdigest()[:12]
        self.path = (folder or Path.home() / ".cache" / "pdgate") / f"ab-applied-{known}.json"

    def refuse_leftover(self) -> None:
        if self.path.exists():
            left = json.loads(self.path.read_text())
            raise MatrixError(
                f"{self.path}: variant '{left['name']}' was applied to this deployment and never undone; run pdgate ab --undo with the same --hosts first "
                f"(its undo: {left['undo']})"
            )

    def write(self, variant: Variant) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(variant.model_dump_json())

    def read(self) -> Variant | None:
        return Variant.model_validate_json(self.path.read_text()) if self.path.exists() else None

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


class Bench:
    """The deployment under test, and how commands reach it."""

    def __init__(self, deployment: Deployment, matrix: Matrix, folder: Path) -> None:
        self.deployment, self.matrix, self.folder = deployment, matrix, folder
        control = Path.home() / ".cache" / "pdgate" / "ssh"
        control.mkdir(parents=True, exist_ok=True, mode=0o700)
        config = folder / "ssh_config"
        config.write_text(ssh_config_text([host.connection for host in deployment.hosts.values()], str(control)))
        self.shells = Shells(str(config), COMMAND_S)
        if not deployment.proxies:
            raise MatrixError(f"{deployment.source}: no host in group 'proxy', so no load can be applied")
        for variant in matrix.variants:
            if variant.host is not None and variant.host not in deployment.hosts:
                raise MatrixError(f"variant '{variant.name}': key 'host': '{variant.host}' is not in {deployment.source}")
        self.proxy = deployment.proxies[0]
        self.book: GoldenBook | None = None

    def command(self, variant: Variant, what: str) -> None:
        """Run `apply` or `undo`; raises MatrixError where it fails."""
        text = getattr(variant, what)
        try:
            if variant.host is None:
                done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=COMMAND_S)
                code, said = done.returncode, done.stdout + done.stderr
            else:
                result = self.shells.run(self.deployment.hosts[variant.host].connection, text)
                code, said = result.code, result.stdout + result.stderr
        except (subprocess.TimeoutExpired, HostUnreachable) as error:
            raise MatrixError(f"variant '{variant.name}': {what} ({text}): {error}") from None
        if code != 0:
            raise MatrixError(f"variant '{variant.name}': {what} ended with code {code}: {text}: {said.strip()[-300:]}")

    def wait_ready(self) -> None:
        """Until every engine lists its model and the proxy answers a request; raises MatrixError."""
        deadline = time.monotonic() + self.matrix.ready_within_s
        door = front_of(self.deployment, self.proxy)
        missing = "nothing was asked"
        while time.monotonic() < deadline:
            missing = self._not_ready(door)
            if not missing:
                return
            time.sleep(1.0)
        raise MatrixError(f"the deployment was not ready within {self.matrix.ready_within_s:g} s: {missing}")

    def _not_ready(self, door: Endpoint) -> str:
        for engine in self.deployment.engines:
            endpoint = endpoint_of(self.deployment, engine)
            try:
                if endpoint is not None:
                    served_models(endpoint)
            except ValueError as error:
                return str(error)
        if self.book is None:
            self.book = golden_of(self.deployment, model_of(self.deployment), self.matrix.load.output_tokens)
        first = next(iter(self.book.answers.values())).prompt
        record = complete(door, prompt_with_salt(first, self.book.model), deadline_of(self.deployment))
        return "" if record.outcome == "ok" else f"the proxy: {record.outcome}: {record.detail}"

    def measure(self, name: str) -> list[Record]:
        """One run of the load; raises MatrixError where it was not applied as planned."""
        assert self.book is not None
        print(f"{name}: {self.matrix.load.seconds:g} s of load", flush=True)
        plan = load_plan(self.deployment, self.proxy, self.matrix.load, self.book, deadline_of(self.deployment))
        try:
            result = run_load(plan, self.folder / name)
            must_be_applied(result)
            must_be_punctual(result)
        except (LoadFailed, UnknownFact) as error:
            raise MatrixError(f"{name}: {error}") from None
        return judged_all(result.records, self.book)


def failures(records: Sequence[Record]) -> tuple[int, int]:
    """(failed, all) without the clients that left by plan."""
    stayed = [record for record in records if record.outcome != "aborted"]
    return sum(record.outcome != "ok" for record in stayed), len(stayed)


def compare(base: list[Record], variant: list[Record]) -> dict[str, Estimate]:
    """Variant minus base with 99 % bounds (six numbers a variant: at 95 % one in four variants that change nothing would look sure): failure rate, and latency percentiles in seconds."""
    found = {"failure rate": difference_of_shares(failures(base), failures(variant))}
    for kind, q in MEASURES:
        first, second = ([value for record in records if record.outcome == "ok" and (value := getattr(record, kind)) is not None] for records in (base, variant))
        if first and second:
            found[f"{kind} p{q * 100:.0f}"] = difference(first, second, partial(percentile_value, q=q))
    return found


def percentile_value(values: Sequence[float], q: float) -> float:
    return percentile(values, q).value


def sentence(name: str, seen: Estimate) -> str:
    scale, unit = (100, "%") if name == "failure rate" else (1000, "ms")
    numbers = f"{seen.value * scale:+.1f} {unit} (99 %: {seen.low * scale:+.1f} to {seen.high * scale:+.1f})"
    sure = seen.low > 0 or seen.high < 0
    word = "no difference shown" if not sure else "sure, but too small to matter" if abs(seen.value) < FLOOR[unit] / scale else "higher" if seen.value > 0 else "lower"
    return f"{name:<13} {numbers:<45} {word}"


def run_matrix(bench: Bench, applied: Applied) -> Iterator[tuple[Variant, dict[str, Estimate], dict[str, Estimate]]]:
    """Unchanged, variant, unchanged … : for each variant its difference to both neighbours, and theirs to each other (the drift)."""
    bench.wait_ready()
    before = bench.measure("0-unchanged")
    for number, variant in enumerate(bench.matrix.variants, start=1):
        applied.write(variant)
        try:
            bench.command(variant, "apply")
            bench.wait_ready()
            changed = bench.measure(f"{number}-{variant.name}")
        finally:
            bench.command(variant, "undo")
            applied.clear()
        bench.wait_ready()
        after = bench.measure(f"{number}-unchanged")
        yield variant, compare([*before, *after], changed), compare(before, after)
        before = after


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("ab", help="the same load against variants that differ in one thing each")
    parser.add_argument("matrix", type=Path, help="YAML: load, variants with name, change, apply, undo, host")
    parser.add_argument("--hosts", required=True, metavar="INVENTORY")
    parser.add_argument("--out", type=Path, help="where records and ab.json go (default: reports/out/ab-<time>)")
    parser.add_argument("--undo", action="store_true", help="only undo what an earlier run has left applied")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    folder = args.out or Path("reports/out") / f"ab-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        matrix = load_matrix(args.matrix)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(open_deployment(args.hosts), matrix, folder)
        applied = Applied(bench.deployment)
        if args.undo:
            left = applied.read()
            if left is not None:
                bench.command(left, "undo")
                applied.clear()
            print(f"undone: {left.name}" if left else "nothing is applied")
            return 0
        applied.refuse_leftover()
        with _termination_is_an_exception():
            return _report(bench, applied, folder)
    except (MatrixError, InventoryError, UnknownFact) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4


def _report(bench: Bench, applied: Applied, folder: Path) -> int:
    rows = []
    for variant, against, drift in run_matrix(bench, applied):
        [(key, value)] = variant.change.items()
        print(f"\n{variant.name}: {key}={value}, against the unchanged deployment before and after it")
        for name, seen in against.items():
            doubt = drift.get(name)
            drifted = doubt is not None and (doubt.low > 0 or doubt.high < 0)
            print(f"  {sentence(name, seen)}" + ("; but the unchanged deployment drifted too: do not trust it" if drifted else ""))
        rows.append({
            "variant": variant.model_dump(), "against": {name: vars(seen) for name, seen in against.items()},
            "drift": {name: vars(seen) for name, seen in drift.items()},
        })  # fmt: skip
        (folder / "ab.json").write_text(json.dumps(rows, indent=1))
    print(f"\nrecords and ab.json: {folder}")
    return 0


@contextlib.contextmanager
def _termination_is_an_exception() -> Iterator[None]:
    """So that the undo runs on SIGTERM as well."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
