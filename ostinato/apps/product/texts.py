"""Compare two texts by their words: what an edit kept, added or removed."""

from __future__ import annotations

import re

import numpy as np

_WORD = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split a text into words and signs; white space makes no difference."""
    return _WORD.findall(text)


def count_edits(first_words: list[str], second_words: list[str]) -> int:
    """Count the words that are inserted, deleted or replaced at least (Levenshtein distance). Time is O(n m)
    and memory O(m), for n and m words from the first difference to the last."""
    head = _count_shared(first_words, second_words)
    first_words, second_words = first_words[head:], second_words[head:]
    tail = _count_shared(first_words[::-1], second_words[::-1])
    first_words, second_words = (
        first_words[: len(first_words) - tail],
        second_words[: len(second_words) - tail],
    )
    codes: dict[str, int] = {}
    a, b = (
        np.array([codes.setdefault(word, len(codes)) for word in text], np.int64)
        for text in (first_words, second_words)
    )
    steps = np.arange(len(b) + 1)
    row = steps.copy()
    for i, word in enumerate(a):
        above = np.minimum(row[:-1] + (b != word), row[1:] + 1)
        # insertions go along the row: with their cost (steps) subtracted they are a running minimum
        row = np.minimum.accumulate(np.concatenate(([i + 1], above)) - steps) + steps
    return int(row[-1])


def _count_shared(first_words: list[str], second_words: list[str]) -> int:
    """Count the words that both texts begin with."""
    differences = (i for i, (a, b) in enumerate(zip(first_words, second_words, strict=False)) if a != b)
    return next(differences, min(len(first_words), len(second_words)))


def measure_similarity(one: str, other: str) -> float:
    """Return 1 - edits / words of the longer text: 1 for equal texts, 0 if all words are replaced."""
    a, b = split_words(one), split_words(other)
    longer = max(len(a), len(b))
    return 1.0 - count_edits(a, b) / longer if longer else 1.0


def only_adds(before: str, after: str) -> bool:
    """Whether ``after`` has all words of ``before`` in their order, and more: an addition, no correction."""
    remaining_words = iter(split_words(after))
    return len(split_words(after)) > len(split_words(before)) and all(
        word in remaining_words for word in split_words(before)
    )
