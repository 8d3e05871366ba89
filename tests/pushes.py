"""What groups of right and wrong answers add to a gradient, and how likely each group is: for tests that
enumerate all that can happen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from nouns import completion, episode, group_of

from ostinato.algo.algorithms import Algorithm
from ostinato.pipeline.credit import assign

Answers = tuple[bool, ...]


def drawn(size: int, right: float) -> Iterator[tuple[float, Answers]]:
    """(probability, which are right) of ``size`` answers."""
    for answers in itertools.product((True, False), repeat=size):
        yield float(np.prod([right if one else 1 - right for one in answers])), answers


def pushes(groups: Sequence[Answers], chosen: Algorithm, **options: Any) -> np.ndarray:
    """[groups, right or wrong] sums of weights times advantages; of weights where no advantage is needed.
    ``options``: of ``assign``."""
    made = assign(
        [group_of(*(episode(completion(9 if y else 10), reward=y) for y in each)) for each in groups],
        chosen,
        min_verdicts=2,
        answer_tokens=10,
        **options,
    )
    found = np.zeros((len(groups), 2))
    for sample, weights in zip(made.samples, made.weights, strict=True):
        by = 1.0 if chosen.needs_reference else sample.advantages
        found[sample.group, int(sample.loss_mask.sum() == 9)] += (weights * by).sum()
    return found
