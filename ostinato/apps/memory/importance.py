"""How much a block matters. All of it is a function of numbers that are known when the block came, of how
often it was spoken of since, and of its age: cheap at every turn.

    features     [F] of a block now, in the order of FEATURES
    lexical      importance as a linear function of them, by hand
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from ostinato.apps.memory.blocks import Block, MemoryState
from ostinato.apps.memory.facts import dates, names, numbers, words

_names, _numbers, _words = (
    lru_cache(maxsize=8192)(one) for one in (names, numbers, words)
)  # as long as a context

STATIC = (
    ("numbers", None),
    ("dates", None),
    ("names", None),
    ("myself", re.compile(r"\b(i|i'm|i've|i'll|my|me|mine|we|our)\b")),
    (
        "prefers",
        re.compile(r"\b(likes?|loves?|hates?|prefers?|favou?rite|enjoys?|wants?|needs?|allerg\w+)\b"),
    ),
    (
        "plans",
        re.compile(r"\b(will|going to|plan\w*|decid\w+|book\w*|promis\w+|moved?|meet\w*|bought|agreed)\b"),
    ),
    (
        "changes",
        re.compile(r"\b(actually|instead|changed?|no longer|not any ?more|correction|now|cancel\w*)\b"),
    ),
    ("asks", re.compile(r"\?")),
    (
        "result",
        re.compile(r"\b(error|failed|passed|result|total|found|id|key|path|version|password)\b|[=:{}]"),
    ),
    ("length", None),
    ("novelty", None),
)
FEATURES = (*(name for name, _ in STATIC), "uses", "age", "pinned")
LEXICAL = {
    "numbers": 1.0,
    "dates": 1.0,
    "names": 0.8,
    "myself": 0.3,
    "prefers": 0.8,
    "plans": 0.8,
    "changes": 0.8,
}
LEXICAL |= {"asks": -0.2, "result": 0.3, "novelty": 0.5, "uses": 1.0, "age": -0.15}


class Importance(Protocol):
    """Of each of ``blocks`` of ``state``, positive, larger for what should stay."""

    def __call__(self, state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]: ...


def static_features(text: str, present: Iterable[Block]) -> tuple[float, ...]:
    """Of a text when it comes, beside the blocks that are in the context: counts as log(1 + n), rounded so
    that they are the same wherever they are computed."""
    counts: dict[str, float] = {
        "numbers": len(numbers(text)),
        "dates": len(dates(text)),
        "names": len(names(text)),
    }
    found, lower = [], text.lower()
    for name, pattern in STATIC:
        if name == "novelty":
            found.append(novelty(text, (block.text for block in present)))
        elif name == "length":
            found.append(math.log1p(len(text.split())))
        else:
            found.append(math.log1p(counts[name] if pattern is None else len(pattern.findall(lower))))
    return tuple(round(value, 6) for value in found)


def novelty(text: str, others: Iterable[str]) -> float:
    """1 - the largest cosine between the sets of words; 1 where there is nothing to compare with."""
    mine = _words(text)
    nearest = 0.0
    for other in others:
        its = _words(other)
        if mine and its:
            nearest = max(nearest, len(mine & its) / math.sqrt(len(mine) * len(its)))
    return 1.0 - nearest


def features(state: MemoryState, blocks: Sequence[Block]) -> np.ndarray:
    """[blocks, F] float64."""
    rows = [
        (
            *block.features,
            math.log1p(block.uses),
            math.log1p(state.turns - max(block.used_at, block.turn)),
            block.pinned,
        )
        for block in blocks
    ]
    return np.array(rows, np.float64).reshape(len(blocks), len(FEATURES))


def spoken_of(blocks: Sequence[Block], text: str) -> set[int]:
    """Ids of the blocks that ``text`` speaks of: a number of theirs is in it, or a name that is not in more
    than a quarter of them."""
    theirs = [(block.id, _names(block.text), _numbers(block.text)) for block in blocks]
    common = Counter(name for _, mine, _ in theirs for name in mine)
    rare = {name for name in _names(text) if common[name] <= max(2, len(blocks) // 4)}
    return {id for id, mine, figures in theirs if mine & rare or figures & _numbers(text)}


def lexical(state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
    """By hand, facts, plans and changes of mind before small talk: log(1 + exp(weights . features - 1)),
    positive, and linear where it is large."""
    weights = np.array([LEXICAL.get(name, 0.0) for name in FEATURES])
    return [float(score) for score in np.logaddexp(0.0, features(state, blocks) @ weights - 1.0)]
