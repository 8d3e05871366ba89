"""A refiller that has learnt which words to keep: a weight for each word, by RL on answers to probes.

A text is chosen by the weights of its words with noise; the reward is whether a probe about the fact is still
answered; the advantage is taken within a group of texts for the same gap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.forgetting.meaning import bucket, is_name, is_number
from lab.forgetting.world import MARKS, History, Turn, words_of
from ostinato.memory.facts import unsupported
from ostinato.memory.refill import extract

SLOTS = 1024  # hashed words; then a name, a number, a place in the text


def slot(word: str) -> int:
    bare = word.strip(MARKS)
    if is_name(bare):
        return SLOTS
    return SLOTS + 1 if is_number(bare) else bucket(bare, SLOTS)


@dataclass(slots=True)
class WordPolicy:
    """``weights`` of the hashed words. As a ``Refiller`` it writes the best words that fit, in their
    order."""

    count: Callable[[str], int]
    weights: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS + 2))

    def __call__(self, left: str, original: str, right: str, budget: int) -> str:
        return self.chosen(original, lambda text: self.count(f"x: {text}") - self.count("x:") <= budget)[0]

    def chosen(
        self, text: str, fits: Callable[[str], bool], noise: np.ndarray | None = None
    ) -> tuple[str, list[bool]]:
        """(the text, which of its words it keeps)."""
        parts = [bare for part in text.split() if (bare := part.strip(MARKS))]
        values = [float(self.weights[slot(part)]) for part in parts]
        if noise is not None:
            values = [value + float(one) for value, one in zip(values, noise, strict=False)]
        kept: list[int] = []
        for at in sorted(range(len(parts)), key=lambda at: (-values[at], at)):
            if fits(" ".join(parts[k] for k in sorted([*kept, at]))):
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
) -> list[float]:
    """REINFORCE with Gumbel noise on the order of words: the gradient of keeping a word is (kept - its
    share in the group). Returns the mean reward of each tenth of the steps."""
    rng, noise = random.Random(f"words/{seed}"), np.random.default_rng(seed)
    turns = [turn for found in histories for turn in probed(found)]
    rewards: list[float] = []
    for _ in range(steps):
        turn = rng.choice(turns)
        room = int(policy.count(turn.line) * rng.uniform(0.35, 0.7))
        slots = [slot(word) for word in words_of(turn.text)]
        fits = lambda text, turn=turn, room=room: policy.count(f"{turn.speaker}: {text}") <= room  # noqa: E731
        drawn = [policy.chosen(turn.text, fits, noise.gumbel(size=len(slots))) for _ in range(group)]
        scores = np.array([answers(turn, text) for text, _ in drawn])
        kept = np.array([mask for _, mask in drawn], float)
        slopes = ((scores - scores.mean())[:, None] * (kept - kept.mean(0))).mean(0)
        np.add.at(policy.weights, slots, lr * slopes)
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
