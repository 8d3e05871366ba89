"""Predicts the length of a response from the lengths of earlier responses to the same prompt.

Lengths of neighbouring epochs keep their order among prompts well (RhymeRL, arXiv 2508.18588), so a prompt's
own past lengths are the best forecast; where they are few, the lengths of all prompts supplement them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

OWN = 32  # newest lengths kept of a prompt
ALL = 4096  # newest lengths kept of all prompts together
NONE = np.zeros(0, np.int32)
PRIOR = 4.0  # weight of the lengths of all prompts, in numbers of the prompt's own


class Lengths:
    """Past response lengths in tokens, by prompt and over all prompts. A prediction takes a few microseconds.

    A truncated response counts with the tokens that it took, since the next one would be truncated there too.
    """

    def __init__(self) -> None:
        self._by_prompt: dict[str, np.ndarray] = {}
        self._steps: dict[str, np.ndarray] = {}
        self._all = NONE
        self._all_steps = NONE
        self._sorted_all: list[int] | None = None  # of _all

    def observe(self, uid: str, lengths: Sequence[int], *, step: int = 0) -> None:
        """Add the lengths of a group of responses to prompt ``uid``, sampled in ``step``. Only the newest
        OWN of a prompt and ALL of all prompts are kept."""
        new_lengths = np.asarray(lengths, np.int32)
        self._by_prompt[uid] = np.concatenate([self._by_prompt.get(uid, NONE), new_lengths])[-OWN:]
        self._all = np.concatenate([self._all, new_lengths])[-ALL:]
        steps = np.full(len(new_lengths), step, np.int32)
        self._steps[uid] = np.concatenate([self._steps.get(uid, NONE), steps])[-OWN:]
        self._all_steps = np.concatenate([self._all_steps, steps])[-ALL:]
        self._sorted_all = None

    def forget_after(self, step: int) -> None:
        """Drop the lengths of later steps. Older lengths that they displaced are lost."""
        for uid, steps in list(self._steps.items()):
            is_known = steps <= step
            self._by_prompt[uid], self._steps[uid] = self._by_prompt[uid][is_known], steps[is_known]
            if not is_known.any():
                del self._by_prompt[uid], self._steps[uid]
        is_known = self._all_steps <= step
        self._all, self._all_steps, self._sorted_all = self._all[is_known], self._all_steps[is_known], None

    def predict(self, uid: str) -> float:
        """Predict the median length (tokens) of a response to ``uid``.

        The distribution is that of the prompt's own past lengths, mixed with the lengths of all prompts as
        if these were PRIOR more of its own. For an unknown prompt it is that of all prompts. Without any
        length the prediction is inf, the cautious guess for a scheduler that starts the longest first.
        """
        own_lengths, all_lengths = sorted(self._by_prompt.get(uid, NONE).tolist()), self._sort_all()
        if not own_lengths and not all_lengths:
            return math.inf
        lengths = range(1, max(own_lengths[-1:] + all_lengths[-1:]) + 1)
        return float(bisect_left(lengths, 0.5, key=_make_distribution(own_lengths, all_lengths)) + 1)

    def mean(self, uid: str) -> float:
        """Return the expected length of a response to ``uid``, mixed as in ``predict``; inf where unknown."""
        own_lengths, all_lengths = self._by_prompt.get(uid, NONE), self._all
        weight = len(own_lengths) + (PRIOR if len(all_lengths) else 0)
        if not weight:
            return math.inf
        return (
            float(own_lengths.sum()) + (PRIOR * float(all_lengths.mean()) if len(all_lengths) else 0.0)
        ) / weight

    def state(self) -> dict[str, Any]:
        """Return the whole state, as values for JSON."""
        own = {uid: [lengths.tolist(), self._steps[uid].tolist()] for uid, lengths in self._by_prompt.items()}
        return {"own": own, "all": [self._all.tolist(), self._all_steps.tolist()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the state by a saved ``state``; the extra list of truncated lengths in older states is
        ignored."""
        own = state["own"].items()
        self._by_prompt = {uid: np.array(lengths, np.int32) for uid, (lengths, *_) in own}
        self._steps = {uid: np.array(steps, np.int32) for uid, (*_, steps) in own}
        self._all, self._all_steps = (np.array(numbers, np.int32) for numbers in state["all"])
        self._sorted_all = None

    def _sort_all(self) -> list[int]:
        """Return the lengths of all prompts, sorted once for each change."""
        if self._sorted_all is None:
            self._sorted_all = sorted(self._all.tolist())
        return self._sorted_all


def _make_distribution(own_lengths: Sequence[int], all_lengths: Sequence[int]) -> Callable[[int], float]:
    """Return the distribution function of the mixture of two sorted lists, not both of them empty."""
    prior = PRIOR if all_lengths else 0.0

    def share(length: int) -> float:
        weight = prior * bisect_right(all_lengths, length) / max(1, len(all_lengths))
        return (bisect_right(own_lengths, length) + weight) / (len(own_lengths) + prior)

    return share
