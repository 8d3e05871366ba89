"""The importance of a block: its text, scored when it came, how often it was spoken of since, and its age. It
is cheap at every turn; the weights are set by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from ostinato.apps.memory.blocks import Block, MemoryState
from ostinato.apps.memory.facts import dates, names, numbers, words

# cached, since a long context is scored at every turn
_find_names, _find_numbers, _find_words = (
    lru_cache(maxsize=8192)(extract) for extract in (names, numbers, words)
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


def score_text(text: str, present: Iterable[Block]) -> float:
    """Score a text when it comes, beside the blocks that are in the context: facts, plans and changes of mind
    count more than small talk. Rounded, so that the score is the same on every machine."""
    lower = text.lower()
    score = NOVELTY * novelty(text, (block.text for block in present))
    score += (
        math.log1p(len(numbers(text))) + math.log1p(len(dates(text))) + 0.8 * math.log1p(len(names(text)))
    )
    score += sum(weight * math.log1p(len(re.findall(form, lower))) for form, weight in WORDS.items())
    return round(score, 6)


def novelty(text: str, others: Iterable[str]) -> float:
    """1 - the largest cosine between the sets of words; 1 where there is no text to compare with."""
    text_words = _find_words(text)
    largest_cosine = 0.0
    for other in others:
        other_words = _find_words(other)
        if text_words and other_words:
            largest_cosine = max(
                largest_cosine, len(text_words & other_words) / math.sqrt(len(text_words) * len(other_words))
            )
    return 1.0 - largest_cosine


def find_mentioned(blocks: Sequence[Block], text: str) -> set[int]:
    """Return the ids of the blocks that ``text`` speaks of: it has a number of the block, or a name of it
    that at most a quarter of the blocks have."""
    facts_of_blocks = [(block.id, _find_names(block.text), _find_numbers(block.text)) for block in blocks]
    block_counts = Counter(name for _, block_names, _ in facts_of_blocks for name in block_names)
    rare_names = {name for name in _find_names(text) if block_counts[name] <= max(2, len(blocks) // 4)}
    return {
        id
        for id, block_names, block_numbers in facts_of_blocks
        if block_names & rare_names or block_numbers & _find_numbers(text)
    }


def lexical(state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
    """Scores of blocks: log(1 + exp(score - 1)), positive, and linear where it is large."""
    scores = [
        block.score
        + USES * math.log1p(block.uses)
        + AGE * math.log1p(state.turns - max(block.used_at, block.turn))
        for block in blocks
    ]
    return [float(score) for score in np.logaddexp(0.0, np.array(scores) - 1.0)]
