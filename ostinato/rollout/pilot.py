"""Pilot answers: a group whose first answers all have one reward mostly teaches nothing, so the rest of it is
sampled only sometimes.

    sample and grade ``answers`` members
      their rewards differ    the others follow                             weight 1
      all are the same        the others follow with probability ``share``  weight 1 / share
                              or the group is cut short                     weight 0

The weight is the inverse of the probability of being whole (Horvitz and Thompson, 1952), given the pilot. So
a weighted sum over groups of what is computed within a whole group has the same expectation as without
pilots. This does not hold after later steps that are not linear (clipping by norm, AdamW).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.algo.noise import key, uniform

LANE = -1  # in the place of a sibling's number, which counts from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """``answers`` of each group come first; ``share`` of the groups where these are all alike go on."""

    answers: int
    share: float

    def goes_on(self, rewards: np.ndarray, seed: Sequence[int]) -> bool:
        """Whether the rest of the group ``seed`` is sampled, given its pilot's ``rewards`` [answers]."""
        return not self.alike(rewards) or uniform(key((*seed, LANE)), 0) < self.share

    def weight(self, rewards: np.ndarray) -> float:
        """The weight of a group with ``rewards`` [G, or answers where it was cut short], NaN = no verdict."""
        if not self.alike(rewards):
            return 1.0
        return 0.0 if len(rewards) == self.answers else 1.0 / self.share

    def alike(self, rewards: np.ndarray) -> bool:
        """Whether all pilot answers have the same reward; one without a verdict counts as different."""
        first = rewards[: self.answers]
        return bool(np.isfinite(first).all() and np.ptp(first) == 0)

    def figures(self, groups: Sequence[np.ndarray], group_size: int) -> dict[str, float]:
        """Metrics of a step whose groups have these rewards."""
        cut = sum(not self.weight(rewards) for rewards in groups)
        return {
            "pilot/alike": float(sum(map(self.alike, groups))),
            "pilot/cut_short": float(cut),
            "pilot/answers_spared": float(cut * (group_size - self.answers)),
        }
