"""The importance of a block, from its text, from how often it was mentioned since, and from its age. The text
is scored once, when it is new, so scoring is cheap at every turn. The weights are set by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from ostinato.apps.memory.blocks import Block, MemoryState
from ostinato.apps.memory.facts import find_dates, find_names, find_numbers, words

# cached, since a long context is scored at every turn
_find_names, _find_numbers, _find_words = (
    lru_cache(maxsize=8192)(extract) for extract in (find_names, find_numbers, words)
)
WORDS = {  # weight of log(1 + n) for n matches in the text in lower case
    r"\b(i|i'm|i've|i'll|my|me|mine|we|our)\b": 0.3,
    r"\b(likes?|loves?|hates?|prefers?|favou?rite|enjoys?|wants?|needs?|allerg\w+)\b": 0.8,
    r"\b(will|going to|plan\w*|decid\w+|book\w*|promis\w+|moved?|meet\w*|bought|agreed)\b": 0.8,
    r"\b(actually|instead|changed?|no longer|not any ?more|correction|now|cancel\w*)\b": 0.8,
    r"\?": -0.2,
    r"\b(error|failed|passed|result|total|found|id|key|path|version|password)\b|[=:{}]": 0.3,
}
NOVELTY, USES, AGE = 0.5, 1.0, -0.15
# Positive scores, larger for blocks that should stay.
Importance = Callable[[MemoryState, Sequence[Block]], Sequence[float]]


def score_text(text: str, blocks: Iterable[Block]) -> float:
    """Score a new text. Facts, plans, changes of mind and words that no block of the context has count more
    than small talk. The score is rounded, so that it is the same on every machine."""
    lower = text.lower()
    score = NOVELTY * measure_novelty(text, (block.text for block in blocks))
    score += (
        math.log1p(len(find_numbers(text)))
        + math.log1p(len(find_dates(text)))
        + 0.8 * math.log1p(len(find_names(text)))
    )
    score += sum(weight * math.log1p(len(re.findall(pattern, lower))) for pattern, weight in WORDS.items())
    return round(score, 6)


def measure_novelty(text: str, other_texts: Iterable[str]) -> float:
    """Return 1 - the largest cosine between the sets of words; 1 if no other text has words."""
    text_words = _find_words(text)
    largest_cosine = 0.0
    for other_text in other_texts:
        other_words = _find_words(other_text)
        if text_words and other_words:
            largest_cosine = max(
                largest_cosine, len(text_words & other_words) / math.sqrt(len(text_words) * len(other_words))
            )
    return 1.0 - largest_cosine


def find_mentioned(blocks: Sequence[Block], text: str) -> set[int]:
    """Return the ids of the blocks that ``text`` mentions. It mentions a block by a number of it, or by a
    name of it that at most a quarter of the blocks have, or two."""
    facts_of_blocks = [(block.id, _find_names(block.text), _find_numbers(block.text)) for block in blocks]
    block_counts = Counter(name for _, block_names, _ in facts_of_blocks for name in block_names)
    rare_names = {name for name in _find_names(text) if block_counts[name] <= max(2, len(blocks) // 4)}
    return {
        id
        for id, block_names, block_numbers in facts_of_blocks
        if block_names & rare_names or block_numbers & _find_numbers(text)
    }


def score_blocks(state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
    """Score blocks by their text, uses and age. Each sum s becomes log(1 + exp(s - 1)), which is positive and
    nearly linear for large s."""
    scores = [
        block.score
        + USES * math.log1p(block.uses)
        + AGE * math.log1p(state.turns - max(block.used_at, block.turn))
        for block in blocks
    ]
    return [float(score) for score in np.logaddexp(0.0, np.array(scores) - 1.0)]
