"""Vectors of lines without a model: hashed words, and word vectors from what occurs together in training
histories.

The second kind is fitted on training questions beside the turns that answer them, so it knows that "home" and
"moved" belong together. It is the stronger retrieval."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lab.forgetting.world import History, words_of

BUCKETS = 512
WIDTH = 32


@lru_cache(maxsize=1 << 16)
def bucket(word: str, of: int = BUCKETS) -> int:
    return int.from_bytes(hashlib.blake2b(word.lower().encode(), digest_size=4).digest(), "big") % of


def is_name(word: str) -> bool:
    return word[:1].isupper() and word != "I"


def is_number(word: str) -> bool:
    return word[:1].isdigit()


def plain(text: str) -> list[str]:
    """The words that are no names and no numbers, small."""
    return [word.lower() for word in words_of(text) if not is_name(word) and not is_number(word)]


def about(speaker: str, text: str) -> str:
    """Who or what a line is about, by its first words: the speaker where it says I, else the first name, else
    the first number of a tool, else the speaker."""
    found = words_of(text)
    if "I" in found or "my" in found:
        return speaker
    of = is_number if speaker == "tool" else is_name
    return next((word for word in found if of(word)), speaker)


def hashed(text: str) -> np.ndarray:
    """[BUCKETS] of words, counted, with names and numbers."""
    vector = np.zeros(BUCKETS)
    for word in words_of(text):
        vector[bucket(word)] += 1
    return vector


@dataclass(frozen=True, slots=True)
class Vectors:
    """Of words, [WIDTH] each, with their weights for rarity."""

    of: dict[str, np.ndarray]
    weight: dict[str, float]

    def __call__(self, text: str) -> np.ndarray:
        """[WIDTH], of length 1, or 0 without a word that is known."""
        found = [word for word in plain(text) if word in self.of]
        total = sum((self.weight[word] * self.of[word] for word in found), np.zeros(WIDTH))
        return total / (np.linalg.norm(total) or 1.0)


def fitted(histories: Sequence[History]) -> Vectors:
    """From words that occur in one line, or in a question and a turn that answers it: positive pointwise
    mutual information, and its first WIDTH directions. Capital letters are kept for values: cities and
    months occur as words here."""
    texts = []
    for found in histories:
        texts += [plain(turn.text) for turn in found.turns]
        texts += [
            plain(f"{one.text} {found.turns[at].text}") for one in found.questions for at in one.evidence
        ] * 4
    counts = Counter(word for text in texts for word in set(text))
    vocabulary = {word: at for at, word in enumerate(sorted(counts))}
    pairs = np.zeros((len(vocabulary), len(vocabulary)))
    for text in texts:
        at = [vocabulary[word] for word in set(text)]
        pairs[np.ix_(at, at)] += 1
    each = np.diag(pairs).copy()
    lift = np.log(np.maximum(pairs * len(texts) / np.outer(each, each), 1.0))
    left, size, _ = np.linalg.svd(lift)
    vectors = left[:, :WIDTH] * np.sqrt(size[:WIDTH])
    weight = {word: float(np.log(len(texts) / counts[word])) for word in vocabulary}
    return Vectors({word: vectors[at] for word, at in vocabulary.items()}, weight)


__all__ = ["Vectors", "about", "bucket", "fitted", "hashed", "is_name", "is_number", "plain"]
