"""A refiller that has learnt which words to keep, and when to stop: a weight for each word, by RL on answers
to probes.

A word stays if its weight with noise is positive, those of the largest first; the reward is whether a probe
about the fact is still answered, less what the text costs; the advantage is taken within a group of texts for
the same gap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lab.forgetting.meaning import bucket, is_name, is_number
from lab.forgetting.world import History, Turn, words_of
from ostinato.apps.memory.facts import unsupported
from ostinato.apps.memory.refill import extract

SLOTS = 4096  # hashed words; then a name, a number


def slot(word: str) -> int:
    if is_name(word):
        return SLOTS
    return SLOTS + 1 if is_number(word) else bucket(word, SLOTS)


def slots(parts: Sequence[str]) -> np.ndarray:
    """[words, 2]: of each word by itself, and behind the one before it."""
    behind = [bucket(f"{before} {word}", SLOTS) for before, word in pairwise(["", *parts])]
    return np.stack([[slot(word) for word in parts], behind], 1)


@dataclass(slots=True)
class WordPolicy:
    """``weights`` of the hashed words. As a ``Refiller`` it writes those of positive weight, the best that
    fit, in their order. It begins with all of them."""

    count: Callable[[str], int]
    weights: np.ndarray = field(default_factory=lambda: np.ones(SLOTS + 2))

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        return self.chosen(original, lambda text: self.count(f"x: {text}") - self.count("x:") <= budget)[0]

    def kept(self, text: str) -> list[str]:
        """The words that it would write with room for all."""
        parts = words_of(text)
        return [part for part, value in zip(parts, self._values(parts), strict=True) if value > 0]

    def _values(self, parts: Sequence[str]) -> np.ndarray:
        return self.weights[slots(parts)].sum(1) if parts else np.zeros(0)

    def chosen(
        self, text: str, fits: Callable[[str], bool], noise: np.ndarray | None = None
    ) -> tuple[str, list[bool]]:
        """(the text, which of its words it keeps)."""
        parts = words_of(text)
        values = self._values(parts) + (0.0 if noise is None else noise)
        kept: list[int] = []
        for at in sorted(range(len(parts)), key=lambda at: (-values[at], at)):
            if values[at] > 0 and fits(" ".join(parts[k] for k in sorted([*kept, at]))):
                kept.append(at)
        return " ".join(parts[k] for k in sorted(kept)), [at in kept for at in range(len(parts))]


def written(policy: WordPolicy, turn: Turn, room: int) -> str:
    """The line that a memory with this refiller writes within ``room`` tokens, its gate and extracts
    included; "" where nothing fits."""
    count = policy.count

    def fits(text: str) -> bool:
        return count(f"{turn.speaker}: {text}") <= room

    text = policy("", turn.text, "", max(0, room - count(f"{turn.speaker}: ")))
    if not fits(text) or unsupported(text, turn.text, turn.speaker):
        text = ""
    text = text or extract(turn.text, fits)
    return (
        f"{turn.speaker}: {text}"
        if text and fits(text) and not unsupported(text, turn.text, turn.speaker)
        else ""
    )


def learn_words(
    policy: WordPolicy,
    histories: Sequence[History],
    seed: int,
    *,
    steps: int,
    group: int = 8,
    lr: float = 0.5,
    cost: float = 0.3,
) -> list[float]:
    """REINFORCE with logistic noise on the weights: the gradient of keeping a word is (kept - its share in
    the group). All the words of a turn cost ``cost``. Returns the mean reward of each tenth of the steps."""
    rng, noise = random.Random(f"words/{seed}"), np.random.default_rng(seed)
    turns = [turn for found in histories for turn in probed(found)]
    rewards: list[float] = []
    for _ in range(steps):
        turn = rng.choice(turns)
        room = int(policy.count(turn.line) * rng.uniform(0.35, 1.0))
        at = slots(words_of(turn.text))
        fits = lambda text, turn=turn, room=room: policy.count(f"{turn.speaker}: {text}") <= room  # noqa: E731
        drawn = [policy.chosen(turn.text, fits, noise.logistic(size=len(at))) for _ in range(group)]
        kept = np.array([mask for _, mask in drawn], float)
        scores = np.array([answers(turn, text) for text, _ in drawn]) - cost * kept.mean(1)
        slopes = ((scores - scores.mean())[:, None] * (kept - kept.mean(0))).mean(0)
        np.add.at(policy.weights, at, lr * slopes[:, None])
        rewards.append(float(scores.mean()))
    tenth = max(1, steps // 10)
    return [float(np.mean(rewards[at : at + tenth])) for at in range(0, steps, tenth)]


def probed(found: History) -> list[Turn]:
    """Turns that a question needs."""
    return [found.turns[at] for at in sorted({at for one in found.questions for at in one.evidence})]


def answers(turn: Turn, text: str) -> float:
    """Whether a probe about the fact of the turn would be answered from ``text``."""
    assert turn.fact is not None
    return float(turn.fact.words <= {*words_of(text), turn.speaker})


__all__ = ["WordPolicy", "learn_words", "written"]
