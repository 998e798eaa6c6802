"""An A/B matrix changes one thing at a time, undoes it whatever happens, and says when a difference is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdgate import ab
from pdgate.inventory.model import Proxy
from pdgate.serving.record import Record
from tests.build import deployment, engine

GOOD = """
load: {rate: 5, seconds: 2}
variants:
  - {name: one, change: {HCCL_BUFFSIZE: 200}, apply: "touch applied", undo: "rm applied"}
  - {name: two, change: {HCCL_EXEC_TIMEOUT: 1836}, apply: "touch applied", undo: "rm applied"}
"""


DEPLOYMENT = deployment([engine()]).model_copy(update={"proxies": [Proxy(name="p", host="p0", address="10.0.0.1", port=1)]})


def matrix(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text, said",
    [
        (GOOD.replace("{HCCL_BUFFSIZE: 200}", "{HCCL_BUFFSIZE: 200, HCCL_EXEC_TIMEOUT: 1}"), "variant 'one' changes 2 things"),
        (GOOD.replace("{HCCL_BUFFSIZE: 200}", "{}"), "variant 'one' changes 0 things"),
        (GOOD.replace("name: two", "name: one"), "two variants are called 'one'"),
        (GOOD.replace(', undo: "rm applied"', "", 1), "key 'variants.0.undo': field required"),
        (GOOD.replace("rate: 5", "rat: 5"), "key 'load.rat'"),
        ("a: [", "not YAML"),
    ],
)
def test_a_matrix_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ab.MatrixError, match=said):
        ab.load_matrix(matrix(tmp_path, text))


def records(latency: float, bad: int = 0, count: int = 60) -> list[Record]:
    good = [
        Record(prompt_id="p", url="u", stream=True, scheduled=0, sent=0, tokens=[latency + n % 5 / 100, latency + 0.5], end=latency + 1, outcome="ok")
        for n in range(count - bad)
    ]
    return good + [Record(prompt_id="p", url="u", scheduled=0, sent=0, end=1, outcome="error")] * bad


class Fake(ab.Bench):
    """A bench whose deployment is a file: its measurements are slower while a variant is applied."""

    def __init__(self, folder: Path, text: str, fails: str = "") -> None:
        self.deployment = DEPLOYMENT
        self.matrix = ab.load_matrix(matrix(folder, text.replace("applied", str(folder / "applied"))))
        self.folder, self.fails, self.mark = folder, fails, folder / "applied"

    def wait_ready(self) -> None:
        pass

    def measure(self, name: str) -> list[Record]:
        if name == self.fails:
            raise ab.MatrixError("the load was not applied")
        return records(0.5 if self.mark.exists() else 0.1, bad=20 if self.mark.exists() else 0)


def test_each_variant_is_held_against_the_unchanged_deployment_around_it(tmp_path: Path) -> None:
    bench = Fake(tmp_path, GOOD)
    rows = list(ab.run_matrix(bench, ab.Applied(bench.deployment, tmp_path)))
    assert [variant.name for variant, _, _ in rows] == ["one", "two"] and not bench.mark.exists()
    _, against, drift = rows[0]
    assert against["failure rate"].low > 0.15 and against["ttft p50"].low > 0.3
    assert "higher" in ab.sentence("ttft p50", against["ttft p50"])
    assert drift["ttft p50"].low <= 0 <= drift["ttft p50"].high and "no difference shown" in ab.sentence("ttft p50", drift["ttft p50"])


def test_a_difference_too_small_to_matter_is_called_that() -> None:
    tiny = ab.Estimate(-0.0001, -0.0002, -0.00005, 100)
    assert "too small to matter" in ab.sentence("itl p50", tiny)


def test_a_host_that_is_not_there_is_named_before_any_load(tmp_path: Path) -> None:
    plan = ab.load_matrix(matrix(tmp_path, GOOD.replace("{name: one,", "{name: one, host: p9,")))
    with pytest.raises(ab.MatrixError, match="variant 'one': key 'host': 'p9' is not in"):
        ab.Bench(DEPLOYMENT, plan, tmp_path)


def test_a_variant_is_undone_also_when_its_measurement_fails(tmp_path: Path) -> None:
    bench, applied = Fake(tmp_path, GOOD, fails="1-one"), ab.Applied(DEPLOYMENT, tmp_path)
    with pytest.raises(ab.MatrixError, match="not applied"):
        list(ab.run_matrix(bench, applied))
    assert not bench.mark.exists() and applied.read() is None


def test_a_variant_left_applied_by_a_killed_run_refuses_the_next_and_can_be_undone(tmp_path: Path) -> None:
    bench, applied = Fake(tmp_path, GOOD), ab.Applied(DEPLOYMENT, tmp_path)
    applied.write(bench.matrix.variants[0])
    bench.mark.touch()
    with pytest.raises(ab.MatrixError, match="variant 'one' was applied to this deployment and never undone"):
        applied.refuse_leftover()
    left = applied.read()
    assert left is not None
    bench.command(left, "undo")
    assert not bench.mark.exists()


def test_a_command_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    bench = Fake(tmp_path, GOOD.replace('apply: "touch applied"', 'apply: "echo no such switch; exit 3"', 1))
    with pytest.raises(ab.MatrixError, match=r"variant 'one': apply ended with code 3.*no such switch"):
        bench.command(bench.matrix.variants[0], "apply")
