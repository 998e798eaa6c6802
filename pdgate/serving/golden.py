"""Golden answers: what a decode engine says by itself, greedy, and how far the same question gets the same answer.

Learned once per run (or read from a file of an earlier one): each prompt twice alone and once with all others at the same time,
because batching changes the arithmetic of real engines. Where the three part, the answer is golden up to there and no further.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdgate.serving.client import Endpoint, Prompt, complete
from pdgate.serving.load.plan import LoadPrompt
from pdgate.serving.record import Api, Record

WORDS = ["harbour", "light", "water", "ferry", "evening", "north", "river", "bridge", "letter", "window", "garden", "winter", "market", "road", "stone", "paper", "music", "child", "doctor", "engine", "silver", "mountain", "island", "kitchen", "train", "field", "morning", "captain", "story", "colour", "answer", "question", "number", "machine", "winter", "summer"]
REPEATS = 8
MOST_SUSPECTS, AT_ONCE_AGAIN = 5, 12
MARGIN = 0.85  # of the declared length: words are counted, tokens are not known before the server says
MIX: tuple[tuple[Api, float], ...] = (("completions", 0.02), ("chat", 0.05), ("completions", 0.15), ("chat", 0.4), ("completions", 1.0))


class GoldenError(Exception):
    """The golden answers cannot be used; the message names file or engine and says what to do."""


class Golden(BaseModel):
    """What is known of one prompt's answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: LoadPrompt
    text: str
    agreed: int = Field(description="characters at the start that every repetition shared")
    seconds: float = Field(description="how long the slowest repetition took, alone")
    prompt_tokens: int | None = None

    @property
    def deterministic(self) -> bool:
        return self.agreed >= len(self.text)


class GoldenBook(BaseModel):
    """The golden answers of a deployment, by prompt id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    learned_from: str = Field(description="the decode engine that was asked, or the file they were read from")
    answers: dict[str, Golden]

    @property
    def judgeable(self) -> list[Golden]:
        return [golden for golden in self.answers.values() if golden.agreed > 0]

    @property
    def slowest_s(self) -> float:
        return max(golden.seconds for golden in self.answers.values())

    @property
    def shortest(self) -> LoadPrompt:
        return min((golden.prompt for golden in self.answers.values()), key=lambda prompt: len(prompt.text))

    @property
    def longest(self) -> LoadPrompt:
        return max((golden.prompt for golden in self.answers.values()), key=lambda prompt: len(prompt.text))

    def limits(self) -> list[str]:
        """What the oracle cannot judge, in words; nothing where every answer was the same each time."""
        parted = [golden for golden in self.answers.values() if not golden.deterministic]
        return [
            f"{golden.prompt.id}: repetitions agree on the first {golden.agreed} of {len(golden.text)} characters; "
            + ("beyond them a wrong answer cannot be told" if golden.agreed else "a wrong answer cannot be told, only an empty or repeating one")
            for golden in parted
        ]


def corpus(max_prompt_tokens: int, max_tokens: int, seed: int = 1, lengths: int = len(MIX)) -> list[LoadPrompt]:
    """Prompts of several lengths up to the declared maximum, for both APIs; the same seed, the same prompts.

    One word is about 1.3 tokens; lengths in words keep below `max_prompt_tokens` by that much and a margin.
    """
    words = (max_prompt_tokens - max_tokens) * MARGIN / 1.35
    prompts = []
    for api, share in MIX[-lengths:]:
        rng = random.Random(f"{seed}:{api}:{share}")
        count = max(8, int(words * share))
        text = " ".join(rng.choice(WORDS) for _ in range(count))
        weight = 1.0 if share > 0.5 else 4.0  # few of the longest: they cost the most
        prompts.append(LoadPrompt(id=f"{api}-{count}w", api=api, text=f"Notes of day {seed}. {text}.", max_tokens=max_tokens, weight=weight))
    return prompts


def learn(endpoint: Endpoint, name: str, model: str, prompts: list[LoadPrompt], deadline_s: float) -> GoldenBook:
    """Ask decode engine `name` at `endpoint`, without remote prefill; raises GoldenError where it does not answer."""

    def ask(prompt: LoadPrompt) -> Record:
        alone = Prompt(prompt.id, prompt.text, model, prompt.max_tokens, prompt.api, {"cache_salt": uuid.uuid4().hex})
        record = complete(endpoint, alone, deadline_s)
        if record.outcome != "ok":
            raise GoldenError(f"{name} alone answered prompt {prompt.id} with {record.outcome}: {record.detail}")
        return record

    rounds = [[ask(prompt) for prompt in prompts] for _ in range(2)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    answers = {}
    for prompt, first, second, batched in zip(prompts, *rounds, together, strict=True):
        agreed = common_start(first.text, second.text, batched.text)
        seconds = max((first.end or 0) - first.sent, (second.end or 0) - second.sent)
        answers[prompt.id] = Golden(prompt=prompt, text=first.text, agreed=agreed, seconds=seconds, prompt_tokens=first.prompt_tokens)
    return GoldenBook(model=model, learned_from=name, answers=answers)


def load_golden(path: Path) -> GoldenBook:
    """Golden answers an earlier run has kept as golden.json; raises GoldenError."""
    try:
        return replace_origin(GoldenBook.model_validate_json(path.read_text()), str(path))
    except OSError as error:
        raise GoldenError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = f"key '{'.'.join(map(str, first['loc']))}': " if first["loc"] else ""
        raise GoldenError(
            f"{path}: not golden answers: {where}{first['msg'].lower()} (use the golden.json of a bundle)"
        ) from None


def replace_origin(book: GoldenBook, origin: str) -> GoldenBook:
    return book.model_copy(update={"learned_from": origin})


def save_golden(book: GoldenBook, path: Path) -> None:
    path.write_text(json.dumps(book.model_dump(mode="json"), ensure_ascii=False, indent=1) + "\n")


def judged(record: Record, book: GoldenBook) -> Record:
    """The record with `wrong` where its text is not the golden one, as far as that is known; a part is held against the beginning."""
    golden = book.answers.get(record.prompt_id)
    if golden is None or record.outcome in ("empty", "error") or not record.text:
        return record
    sure = golden.text[: golden.agreed]
    whole = record.outcome == "ok"
    said = record.text[: len(sure)]
    right = said == sure if whole else sure.startswith(said)
    if right and whole and golden.deterministic:
        right = record.text == golden.text
    if not right:
        where = common_start(said, sure)
        place = "from its first token" if where < first_token_end(golden.text) else f"from character {where}"
        detail = f"wrong {place}: {record.text[where : where + 60]!r} instead of {golden.text[where : where + 60]!r}"
        return record.model_copy(update={"outcome": "wrong", "detail": detail})
    if whole and (word := repeats(record.text)) and not repeats(golden.text):
        return record.model_copy(update={"outcome": "wrong", "detail": f"repeats {word!r} {REPEATS} times and more; the golden answer does not"})
    return record


def common_start(*texts: str) -> int:
    """How many characters at the start all texts share."""
    return next((n for n, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), min(map(len, texts)))


def first_token_end(text: str) -> int:
    """Where the first word ends: P computed that token, D all others."""
    found = re.match(r"\s*\S+", text)
    return found.end() if found else 0


def repeats(text: str) -> str | None:
    """A word that stands REPEATS times in a row: what decoding over damaged KV often ends in."""
    words = text.split()
    run = 1
    for before, word in itertools.pairwise(words):
        run = run + 1 if word == before else 1
        if run >= REPEATS:
            return word
    return None


def judged_all(records: Iterable[Record], book: GoldenBook) -> list[Record]:
    return [judged(record, book) for record in records]


def judged_twice(records: list[Record], book: GoldenBook, endpoint: Endpoint | None, deadline_s: float) -> tuple[list[Record], GoldenBook]:
    """All records judged; before any is called wrong, the decode engine is asked once more by itself, among other requests.

    A batch rounds otherwise than a request alone, so the same model may answer the same question in two ways. Where the engine by itself
    does so too, its answers are held against each other no further than they agree; the book that comes back says how far.
    """
    found = judged_all(records, book)
    suspects = sorted({record.prompt_id for record in found if record.outcome == "wrong"} & book.answers.keys())
    if not suspects or endpoint is None:
        return found, book
    answers = dict(book.answers)
    for name in suspects[:MOST_SUSPECTS]:
        golden, others = answers[name], itertools.cycle(answers.values())
        asked = [golden.prompt if number % 2 else next(others).prompt for number in range(AT_ONCE_AGAIN)]
        with ThreadPoolExecutor(len(asked)) as pool:
            said = list(pool.map(lambda prompt: complete(endpoint, prompt_with_salt(prompt, book.model), deadline_s), asked))
        texts = [record.text for record in said if record.prompt_id == name and record.outcome == "ok"]
        answers[name] = golden.model_copy(update={"agreed": min(golden.agreed, common_start(golden.text, *texts))})
    again = book.model_copy(update={"answers": answers})
    return judged_all(records, again), again


def prompt_with_salt(prompt: LoadPrompt, model: str, name: str | None = None) -> Prompt:
    """One request of the corpus, salted so that no prefix cache short-cuts the transfer."""
    made = Prompt(prompt.id, prompt.text, model, prompt.max_tokens, prompt.api, {"cache_salt": uuid.uuid4().hex})
    return replace(made, id=name) if name else made
