"""How much a block matters: what its text says, counted when it came, how often it was spoken of since, and
its age. Cheap at every turn; the weights are by hand.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from ostinato.apps.memory.blocks import Block, MemoryState
from ostinato.apps.memory.facts import dates, names, numbers, words

_names, _numbers, _words = (lru_cache(maxsize=8192)(one) for one in (names, numbers, words))  # a long context
WORDS = {  # weight of log(1 + n) for n matches in small letters
    r"\b(i|i'm|i've|i'll|my|me|mine|we|our)\b": 0.3,
    r"\b(likes?|loves?|hates?|prefers?|favou?rite|enjoys?|wants?|needs?|allerg\w+)\b": 0.8,
    r"\b(will|going to|plan\w*|decid\w+|book\w*|promis\w+|moved?|meet\w*|bought|agreed)\b": 0.8,
    r"\b(actually|instead|changed?|no longer|not any ?more|correction|now|cancel\w*)\b": 0.8,
    r"\?": -0.2,
    r"\b(error|failed|passed|result|total|found|id|key|path|version|password)\b|[=:{}]": 0.3,
}
NOVELTY, USES, AGE = 0.5, 1.0, -0.15
# Positive, larger for what should stay.
Importance = Callable[[MemoryState, Sequence[Block]], Sequence[float]]


def score_text(text: str, present: Iterable[Block]) -> float:
    """What a text says when it comes, beside the blocks that are in the context: facts, plans and changes of
    mind before small talk. Rounded, so that it is the same wherever it is computed."""
    lower = text.lower()
    score = NOVELTY * novelty(text, (block.text for block in present))
    score += (
        math.log1p(len(numbers(text))) + math.log1p(len(dates(text))) + 0.8 * math.log1p(len(names(text)))
    )
    score += sum(weight * math.log1p(len(re.findall(form, lower))) for form, weight in WORDS.items())
    return round(score, 6)


def novelty(text: str, others: Iterable[str]) -> float:
    """1 - the largest cosine between the sets of words; 1 where there is nothing to compare with."""
    mine = _words(text)
    nearest = 0.0
    for other in others:
        its = _words(other)
        if mine and its:
            nearest = max(nearest, len(mine & its) / math.sqrt(len(mine) * len(its)))
    return 1.0 - nearest


def spoken_of(blocks: Sequence[Block], text: str) -> set[int]:
    """Ids of the blocks that ``text`` speaks of: a number of theirs is in it, or a name that is not in more
    than a quarter of them."""
    theirs = [(block.id, _names(block.text), _numbers(block.text)) for block in blocks]
    common = Counter(name for _, mine, _ in theirs for name in mine)
    rare = {name for name in _names(text) if common[name] <= max(2, len(blocks) // 4)}
    return {id for id, mine, figures in theirs if mine & rare or figures & _numbers(text)}


def lexical(state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
    """log(1 + exp(score - 1)), positive, and linear where it is large."""
    scores = [
        block.score
        + USES * math.log1p(block.uses)
        + AGE * math.log1p(state.turns - max(block.used_at, block.turn))
        for block in blocks
    ]
    return [float(score) for score in np.logaddexp(0.0, np.array(scores) - 1.0)]
