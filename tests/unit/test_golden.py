"""Golden answers judge what they can and say what they cannot; numbers come with the doubt they deserve."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdgate.rules.statistics import difference, difference_of_shares, percentile, share
from pdgate.serving.client import Endpoint
from pdgate.serving.golden import Golden, GoldenBook, GoldenError, corpus, judged, judged_twice, load_golden, repeats, save_golden
from pdgate.serving.load import LoadPrompt
from pdgate.serving.record import Record

PROMPT = LoadPrompt(id="p", text="hello")
TEXT = " the cat sat on the mat"


def book(agreed: int = len(TEXT), text: str = TEXT) -> GoldenBook:
    return GoldenBook(model="m", learned_from="d0", answers={"p": Golden(prompt=PROMPT, text=text, agreed=agreed, seconds=0.1)})


def record(text: str, outcome: str = "ok") -> Record:
    return Record(prompt_id="p", url="u", scheduled=0, sent=0, end=1, text=text, outcome=outcome)  # type: ignore[arg-type]


def test_the_golden_text_is_right_and_any_other_is_wrong() -> None:
    assert judged(record(TEXT), book()).outcome == "ok"
    wrong = judged(record(" the cat sat on a hat"), book())
    assert wrong.outcome == "wrong" and "from character" in wrong.detail
    assert "from its first token" in judged(record(" zzz"), book()).detail
    assert judged(record(TEXT + " and more"), book()).outcome == "wrong"
    assert judged(record(TEXT[:8]), book()).outcome == "wrong"  # said to be whole, and is not


def test_a_part_of_an_answer_is_held_against_the_beginning() -> None:
    assert judged(record(TEXT[:8], "aborted"), book()).outcome == "aborted"
    assert judged(record(" a dog", "truncated"), book()).outcome == "wrong"
    assert judged(record("", "hang"), book()).outcome == "hang"


def test_where_repetitions_part_only_the_common_beginning_is_judged() -> None:
    partly = book(agreed=8)
    assert judged(record(" the cat ran away"), partly).outcome == "ok"
    assert judged(record(" the dog ran away"), partly).outcome == "wrong"
    assert "first 8 of 23 characters" in partly.limits()[0] and not book().limits()
    assert not book(agreed=0).judgeable


def test_a_repeating_answer_is_wrong_even_where_nothing_else_is_known() -> None:
    assert judged(record(" no" * 12), book(agreed=0)).outcome == "wrong"
    assert judged(record(" no" * 12), book(text=" no" * 12, agreed=0)).outcome == "ok"  # the golden answer does it too
    assert repeats("a b a b a b a b a b") is None


def test_the_corpus_has_several_lengths_both_apis_and_stays_the_same(tmp_path: Path) -> None:
    prompts = corpus(3000, 16)
    assert {prompt.api for prompt in prompts} == {"completions", "chat"} and len({len(prompt.text) for prompt in prompts}) == len(prompts) >= 4
    assert prompts == corpus(3000, 16) != corpus(3000, 16, seed=2)
    assert max(len(prompt.text.split()) for prompt in prompts) * 1.35 < 3000


def test_golden_answers_are_kept_and_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    save_golden(book(), path)
    assert load_golden(path).answers == book().answers and load_golden(path).learned_from == str(path)
    path.write_text('{"model": 3}')
    with pytest.raises(GoldenError, match=r"golden\.json: not golden answers: key"):
        load_golden(path)
    with pytest.raises(GoldenError, match="No such file"):
        load_golden(tmp_path / "none")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_lies_within_its_bounds_and_few_samples_bound_nothing(values: list[float], q: float) -> None:
    seen = percentile(values, q)
    assert seen.low <= seen.value <= seen.high and seen.value in values
    if len(values) == 1:
        assert math.isinf(seen.high)


@given(st.integers(0, 50), st.integers(50, 500))
def test_a_share_lies_within_its_bounds(part: int, whole: int) -> None:
    seen = share(part, whole)
    assert 0 <= seen.low <= seen.value <= seen.high <= 1


def test_a_difference_is_only_sure_where_there_is_one() -> None:
    none = difference_of_shares((5, 100), (6, 100))
    clear = difference_of_shares((5, 100), (60, 100))
    assert none.low < 0 < none.high and clear.low > 0.35
    def mean(values):  # type: ignore[no-untyped-def]
        return sum(values) / len(values)

    slow, fast = [2.0 + n % 5 / 10 for n in range(50)], [1.0 + n % 5 / 10 for n in range(50)]
    assert difference(fast, slow, mean).low > 0.8 and difference(fast, fast, mean).low < 0 < difference(fast, fast, mean).high
    assert difference(fast, slow, mean) == difference(fast, slow, mean)


def test_a_model_that_answers_in_two_ways_by_itself_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches round differently: where the decode engine alone says the other text too, answers are judged as far as the two agree."""
    other = " the cat sat on a hat"
    said = itertools.cycle([TEXT, other])
    monkeypatch.setattr("pdgate.serving.golden.complete", lambda endpoint, prompt, deadline: record(next(said)).model_copy(update={"prompt_id": prompt.id}))
    alone = Endpoint("http://d0")
    found, again = judged_twice([record(other), record(" zzz")], book(), alone, 1.0)
    assert [one.outcome for one in found] == ["ok", "wrong"]
    assert again.answers["p"].agreed == len(" the cat sat on ") and "beyond them a wrong answer cannot be told" in again.limits()[0]


def test_an_answer_the_engine_never_gives_by_itself_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("pdgate.serving.golden.complete", lambda endpoint, prompt, deadline: asked.append(prompt.id) or record(TEXT))
    found, again = judged_twice([record(" the cat sat on a hat")], book(), Endpoint("http://d0"), 1.0)
    assert found[0].outcome == "wrong" and again == book() and len(asked) > 1
    assert judged_twice([record(TEXT)], book(), None, 1.0) == ([record(TEXT)], book())
