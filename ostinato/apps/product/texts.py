"""Two texts side by side, by their words: what an edit kept, added or threw away."""

from __future__ import annotations

import re

import numpy as np

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words and signs; white space is no difference."""
    return _WORD.findall(text)


def distance(one: list[str], other: list[str]) -> int:
    """Levenshtein distance: the fewest words inserted, deleted or replaced. O(n m) in what lies between the
    first and the last difference, a row at a time."""
    head = _count_shared(one, other)
    one, other = one[head:], other[head:]
    tail = _count_shared(one[::-1], other[::-1])
    one, other = one[: len(one) - tail], other[: len(other) - tail]
    codes: dict[str, int] = {}
    a, b = (
        np.array([codes.setdefault(word, len(codes)) for word in text], np.int64) for text in (one, other)
    )
    steps = np.arange(len(b) + 1)
    row = steps.copy()
    for i, word in enumerate(a):
        above = np.minimum(row[:-1] + (b != word), row[1:] + 1)
        # an insertion goes along the row: the running minimum of what is left when the steps are taken off
        row = np.minimum.accumulate(np.concatenate(([i + 1], above)) - steps) + steps
    return int(row[-1])


def _count_shared(one: list[str], other: list[str]) -> int:
    """How many words both begin with."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def similarity(one: str, other: str) -> float:
    """1 - distance / words of the longer one: 1 for equal texts, 0 where nothing is shared."""
    a, b = words(one), words(other)
    longer = max(len(a), len(b))
    return 1.0 - distance(a, b) / longer if longer else 1.0


def only_adds(before: str, after: str) -> bool:
    """Whether ``after`` has all words of ``before`` in their order, and more: an addition, no correction."""
    rest = iter(words(after))
    return len(words(after)) > len(words(before)) and all(word in rest for word in words(before))
