"""What stands in a context of so many tokens when a question comes: baselines, all of the same budget.

A memory does not know the question; retrieval does, and has the whole history outside the context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lab.forgetting.meaning import Vectors, hashed, is_name, is_number
from lab.forgetting.world import History, Question, Turn, words_of
from ostinato.apps.memory.facts import dates, names, numbers
from ostinato.apps.memory.refill import extract

Lines = list[tuple[Turn, str]]  # in order of time
Count = Callable[[str], int]


def within(order: Iterable[Turn], budget: int, count: Count) -> Lines:
    """The first turns of ``order`` that fit together, verbatim: one that does not fit is passed over."""
    chosen, left = [], budget
    for turn in order:
        if (size := count(turn.line)) <= left:
            chosen.append(turn)
            left -= size
    return [(turn, turn.line) for turn in sorted(chosen, key=lambda turn: turn.idx)]


def recency(found: History, budget: int, count: Count) -> Lines:
    return within(reversed(found.turns), budget, count)


def full(found: History, budget: int, count: Count) -> Lines:
    return [(turn, turn.line) for turn in found.turns]


def gold(found: History, question: Question) -> Lines:
    """The evidence alone: no memory can do better."""
    return [(found.turns[at], found.turns[at].line) for at in sorted(set(question.evidence))]


def uniform(found: History, budget: int, count: Count) -> Lines:
    """Every turn cut to the same share of its tokens, the largest for which all fit."""
    for percent in range(100, 0, -5):
        lines: Lines = []
        for turn in found.turns:
            room = math.ceil(percent / 100 * count(turn.line))
            text = extract(
                turn.text, lambda text, turn=turn, room=room: count(f"{turn.speaker}: {text}") <= room
            )
            if text:
                lines.append((turn, f"{turn.speaker}: {text}"))
        if sum(count(text) for _, text in lines) <= budget:
            return lines
    return []


def overwrite(found: History, budget: int, count: Count, chunk: int = 128) -> Lines:
    """MemAgent's form (arXiv 2507.02259): a memory of fixed size and a chunk of the history become the next
    memory, which overwrites the last. Here the lines with the most facts for their length stay; what is gone
    is gone."""
    kept: list[Turn] = []
    waiting: list[Turn] = []
    for turn in found.turns:
        waiting.append(turn)
        if sum(count(one.line) for one in waiting) >= chunk or turn is found.turns[-1]:
            order = sorted([*kept, *waiting], key=lambda one: (-_facts(one), -one.idx))
            kept, waiting = [one for one, _ in within(order, budget, count)], []
    return [(turn, turn.line) for turn in kept]


def _facts(turn: Turn) -> float:
    text = turn.text
    return (len(numbers(text)) + len(dates(text)) + len(names(text)) + 0.5) / (3 + len(text.split()))


Ranking = Callable[[Question], list[Turn]]  # turns of a history, the best for a question first


def bm25(found: History) -> Ranking:
    """Okapi BM25 (k1 1.2, b 0.75) of the question's words in lines; the newer line first between equals."""
    documents = [Counter(word.lower() for word in words_of(turn.line)) for turn in found.turns]
    lengths = [sum(one.values()) for one in documents]
    mean = sum(lengths) / len(documents)
    seen = Counter(word for one in documents for word in one)
    rare = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in seen.items()}

    def ask(question: Question) -> list[Turn]:
        query = {word.lower() for word in words_of(question.text)} & set(rare)
        scores = [
            sum(rare[word] * one[word] * 2.2 / (one[word] + 1.2 * (0.25 + 0.75 * n / mean)) for word in query)
            for one, n in zip(documents, lengths, strict=True)
        ]
        return _best(found, scores)

    return ask


def by_hash(found: History) -> Ranking:
    """Cosine of hashed words, weighted by their rarity in this history."""
    rows = np.stack([hashed(turn.line) for turn in found.turns])
    rare = np.log((1 + len(rows)) / (1 + (rows > 0).sum(0)))
    rows = rows * rare
    sizes = np.linalg.norm(rows, axis=1) + 1e-9
    return lambda question: _best(found, (rows @ (hashed(question.text) * rare) / sizes).tolist())


def by_meaning(vectors: Vectors) -> Callable[[History], Ranking]:
    """Cosine of fitted word vectors, and the share of the question's names and numbers that a line has."""

    def prepare(found: History) -> Ranking:
        rows = np.stack([vectors(turn.text) for turn in found.turns])
        lines = [set(words_of(turn.line)) for turn in found.turns]

        def ask(question: Question) -> list[Turn]:
            needed = {word for word in words_of(question.text) if is_name(word) or is_number(word)}
            shares = [len(needed & line) / max(1, len(needed)) for line in lines]
            return _best(found, (rows @ vectors(question.text) + shares).tolist())

        return ask

    return prepare


def _best(found: History, scores: Sequence[float]) -> list[Turn]:
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], -at))
    return [found.turns[at] for at in order]


__all__ = [
    "Count",
    "Lines",
    "Ranking",
    "bm25",
    "by_hash",
    "by_meaning",
    "full",
    "gold",
    "overwrite",
    "recency",
    "uniform",
    "within",
]
