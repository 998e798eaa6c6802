"""The lab's language model: deterministic, and honest about its KV. What it says follows from the bytes it holds.

A prompt becomes tokens, tokens become KV bytes block by block (each block depends on all before it), and the answer is
drawn from a digest of those bytes. A decode engine that holds other bytes than the prompt's gives another answer.
"""

from __future__ import annotations

import hashlib
import random
import re

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "with",
    "as",
    "be",
    "at",
    "by",
    "this",
    "had",
    "not",
    "but",
    "from",
    "or",
    "have",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
    "there",
    "would",
    "their",
    "we",
    "him",
    "been",
    "has",
    "when",
    "who",
    "will",
    "no",
    "more",
    "if",
    "out",
    "so",
    "said",
    "what",
    "up",
    "its",
    "about",
    "than",
    "into",
    "them",
    "can",
    "only",
    "other",
    "time",
    "new",
    "some",
    "could",
    "these",
    "two",
    "may",
    "first",
    "then",
    "do",
    "any",
    "like",
    "my",
    "now",
    "over",
    "such",
    "our",
    "man",
    "me",
    "even",
    "most",
    "made",
    "after",
    "also",
    "did",
    "many",
    "before",
    "must",
    "through",
    "years",
    "where",
    "much",
    "your",
    "way",
    "well",
    "down",
    "should",
    "because",
    "each",
    "just",
    "those",
    "people",
]


def tokenize(text: str) -> list[str]:
    """Words and marks, long words cut to six characters: about what a byte-pair tokenizer makes of English."""
    return [part for word in re.findall(r"\w+|[^\w\s]", text) for part in re.findall(r".{1,6}", word)]


def block_chain(tokens: list[str], block_size: int) -> list[bytes]:
    """One digest per block; each stands for all tokens up to the block's end."""
    chain, state = [], hashlib.sha256(b"kv")
    for start in range(0, len(tokens), block_size):
        state.update("\x1f".join(tokens[start : start + block_size]).encode())
        chain.append(state.digest())
    return chain


def block_bytes(digest: bytes, rank: int, size: int) -> bytes:
    """The KV one TP rank holds of a block."""
    return hashlib.shake_128(digest + bytes([rank])).digest(size)


class Answer:
    """The tokens that follow from a KV digest, one by one."""

    def __init__(self, seed: bytes) -> None:
        self._random = random.Random(seed)
        self.natural_length = self._random.randint(600, 1200)

    def next(self) -> str:
        return " " + self._random.choice(WORDS)
