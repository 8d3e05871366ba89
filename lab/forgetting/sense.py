"""What a line is about, what of it counts, and whether a later line replaces it: learnt from histories.

Two turns of a training history that answer the same question at two times are about the same fact; any other
two about the same one do not. A logistic regression on pairs of their words parts them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from lab.forgetting.meaning import about, is_name, is_number
from lab.forgetting.words import WordPolicy
from lab.forgetting.world import History, Turn

Pair = tuple[str, str]


@dataclass(slots=True)
class Sense:
    """``pairs``: a weight for each word of a line with each word of a later one; 0 for those not known."""

    words: WordPolicy
    pairs: dict[Pair, float] = field(default_factory=dict)
    bias: float = 0.0

    def content(self, text: str) -> list[str]:
        """The words that a refill with room for all would keep, but for names and numbers."""
        return [word.lower() for word in self.words.kept(text) if not is_name(word) and not is_number(word)]

    def subject(self, speaker: str, text: str) -> str:
        """By the clause of which most would be kept."""
        return about(speaker, max(text.split(","), key=lambda clause: len(self.words.kept(clause))))

    def replaced(self, before: Sequence[str], after: Sequence[str]) -> float:
        """The probability that a line with the words ``after`` replaces one about the same
        ``before``."""
        found = sum(self.pairs.get(pair, 0.0) for pair in product(before, after))
        return float(1 / (1 + np.exp(-found - self.bias)))


def learn_sense(
    words: WordPolicy, histories: Sequence[History], seed: int, *, steps: int = 200, others: int = 20
) -> Sense:
    """``others``: pairs of another kind for each pair of the same fact."""
    rng, sense = random.Random(f"sense/{seed}"), Sense(words)
    rows: list[tuple[list[Pair], float]] = []
    for found in histories:
        content = [sense.content(turn.text) for turn in found.turns]
        subjects = [sense.subject(turn.speaker, turn.text) for turn in found.turns]
        same: list[list[Pair]] = []
        different: list[list[Pair]] = []
        for j, after in enumerate(found.turns):
            for i, before in enumerate(found.turns[:j]):
                if subjects[i] == subjects[j]:
                    (same if _same(before, after) else different).append([*product(content[i], content[j])])
        different = rng.sample(different, min(len(different), others * len(same)))
        rows += [(pairs, 1.0) for pairs in same] + [(pairs, 0.0) for pairs in different]
    known = {pair: at for at, pair in enumerate(dict.fromkeys(pair for pairs, _ in rows for pair in pairs))}
    table = np.full((len(rows), max(len(pairs) for pairs, _ in rows)), len(known))
    for row, (pairs, _) in zip(table, rows, strict=True):
        row[: len(pairs)] = [known[pair] for pair in pairs]
    weights, sense.bias = _fitted(table, np.array([target for _, target in rows]), len(known), steps)
    sense.pairs = {pair: float(weights[at]) for pair, at in known.items()}
    return sense


def _same(before: Turn, after: Turn) -> bool:
    mine, its = before.fact, after.fact
    return (
        mine is not None and its is not None and (mine.subject, mine.relation) == (its.subject, its.relation)
    )


def _fitted(
    table: np.ndarray, targets: np.ndarray, size: int, steps: int, rate: float = 0.1, decay: float = 1e-6
) -> tuple[np.ndarray, float]:
    """Logistic regression by Adam on rows [n, k] of the features that each has; ``size`` is none."""
    weights, bias = np.zeros(size + 1), 0.0
    first, second = np.zeros(size + 1), np.zeros(size + 1)
    for step in range(1, steps + 1):
        error = (targets - 1 / (1 + np.exp(-weights[table].sum(1) - bias))) / len(targets)
        slope = np.bincount(table.ravel(), np.repeat(error, table.shape[1]), size + 1) - decay * weights
        first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
        weights += rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        weights[size] = 0.0
        bias += 2 * float(error.sum())
    return weights, bias


__all__ = ["Sense", "learn_sense"]
