"""How long will a response be? From the lengths of earlier responses to the same prompt.

Lengths of neighbouring epochs keep their order among prompts well (RhymeRL, arXiv 2508.18588), so a prompt's
own past is the best forecast there is; where it is short it is filled up with the lengths of all prompts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

OWN = 32  # newest lengths kept of a prompt
ALL = 4096  # newest lengths kept of all prompts together
NONE = np.zeros(0, np.int32)
PRIOR = 4.0  # the lengths of all prompts weigh as much as this many of the prompt's own


class Lengths:
    """Past response lengths in tokens, by prompt and over all prompts; a few microseconds per prediction.

    A truncated response counts with the tokens that it took, since the next one would be truncated there too;
    ``truncated_share`` tells how often that was.
    """

    def __init__(self) -> None:
        self._own: dict[str, np.ndarray] = {}
        self._truncated: dict[str, np.ndarray] = {}
        self._steps: dict[str, np.ndarray] = {}
        self._all = NONE
        self._all_steps = NONE
        self._sorted: list[int] | None = None  # of _all

    def observe(self, uid: str, lengths: Sequence[int], truncated: Sequence[bool], *, step: int = 0) -> None:
        """Remember the responses of one group to prompt ``uid``, sampled in ``step``."""
        new = np.asarray(lengths, np.int32)
        cut = np.asarray(truncated, bool)
        if new.shape != cut.shape:
            raise ValueError(
                f"prompt {uid}: {len(new)} lengths come with {len(cut)} truncated flags; give one each"
            )
        self._own[uid] = np.concatenate([self._own.get(uid, new[:0]), new])[-OWN:]
        self._truncated[uid] = np.concatenate([self._truncated.get(uid, cut[:0]), cut])[-OWN:]
        self._all = np.concatenate([self._all, new])[-ALL:]
        steps = np.full(len(new), step, np.int32)
        self._steps[uid] = np.concatenate([self._steps.get(uid, NONE), steps])[-OWN:]
        self._all_steps = np.concatenate([self._all_steps, steps])[-ALL:]
        self._sorted = None

    def forget_after(self, step: int) -> None:
        """Drop what was sampled in later steps. What these had pushed out does not come back."""
        for uid, steps in list(self._steps.items()):
            known = steps <= step
            self._own[uid], self._truncated[uid] = self._own[uid][known], self._truncated[uid][known]
            self._steps[uid] = steps[known]
            if not known.any():
                del self._own[uid], self._truncated[uid], self._steps[uid]
        known = self._all_steps <= step
        self._all, self._all_steps, self._sorted = self._all[known], self._all_steps[known], None

    def predict(
        self, uid: str, *, generated: int = 0, siblings: Sequence[int] = (), quantile: float = 0.5
    ) -> float:
        """A quantile of the total length (tokens) of a response that has ``generated`` tokens and goes on.

        The distribution is the prompt's own past lengths and those of ``siblings`` that have just finished,
        mixed with all prompts' as if these were PRIOR more of its own, given that it is longer than
        ``generated``. Where nothing seen was that long, tails are taken to be Pareto of index 2: the longer
        it ran, the longer it will run. An unknown prompt gets the distribution of all prompts; when nothing
        at all is known, the answer is inf, the cautious guess of a scheduler that starts the longest first.
        Raises ValueError unless 0 < quantile < 1.
        """
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; use a number between 0 and 1")
        own, everyone = sorted([*self._own.get(uid, NONE).tolist(), *siblings]), self._everyone()
        if not own and not everyone:
            return math.inf
        share_up_to = _share_up_to(own, everyone)
        longest = max(own[-1:] + everyone[-1:])
        if generated >= longest:
            return generated / math.sqrt(1 - quantile)
        passed = share_up_to(generated)
        wanted = passed + quantile * (1 - passed)
        lengths = range(generated + 1, longest + 1)
        return float(lengths[min(bisect_left(lengths, wanted, key=share_up_to), len(lengths) - 1)])

    def mean(self, uid: str) -> float:
        """Expected length of a response to ``uid``, shrunk as in ``predict``; inf when nothing is known."""
        own, everyone = self._own.get(uid, NONE), self._all
        weight = len(own) + (PRIOR if len(everyone) else 0)
        if not weight:
            return math.inf
        return (float(own.sum()) + (PRIOR * float(everyone.mean()) if len(everyone) else 0.0)) / weight

    def upper(self, uid: str, *, siblings: Sequence[int] = (), quantile: float = 0.9) -> float:
        """What a response to ``uid`` hardly exceeds: the quantile, or the group's longest so far if that is
        longer (the estimate of Seer, arXiv 2511.14617, for a group whose first responses are done)."""
        return max(self.predict(uid, siblings=siblings, quantile=quantile), *siblings, 0)

    def ranks(self, uids: Iterable[str]) -> dict[str, float]:
        """Place of each prompt among these by mean length, from 0 (shortest) to 1, ties in the order of
        names."""
        ordered = sorted(set(uids), key=lambda uid: (self.mean(uid), uid))
        return {uid: place / max(1, len(ordered) - 1) for place, uid in enumerate(ordered)}

    def truncated_share(self, uid: str) -> float:
        """Share of the remembered responses to ``uid`` that were truncated; 0 for an unknown prompt."""
        truncated = self._truncated.get(uid, NONE)
        return float(truncated.mean()) if len(truncated) else 0.0

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can say it."""
        own = {
            uid: [lengths.tolist(), self._truncated[uid].astype(int).tolist(), self._steps[uid].tolist()]
            for uid, lengths in self._own.items()
        }
        return {"own": own, "all": [self._all.tolist(), self._all_steps.tolist()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken of."""
        own = state["own"].items()
        self._own = {uid: np.array(lengths, np.int32) for uid, (lengths, _, _) in own}
        self._truncated = {uid: np.array(truncated, bool) for uid, (_, truncated, _) in own}
        self._steps = {uid: np.array(steps, np.int32) for uid, (_, _, steps) in own}
        self._all, self._all_steps = (np.array(one, np.int32) for one in state["all"])
        self._sorted = None

    def _everyone(self) -> list[int]:
        if self._sorted is None:
            self._sorted = sorted(self._all.tolist())
        return self._sorted


def _share_up_to(own: Sequence[int], everyone: Sequence[int]) -> Callable[[int], float]:
    """The distribution function of the mixture of two sorted lists, not both of them empty."""
    prior = PRIOR if everyone else 0.0

    def share(length: int) -> float:
        common = prior * bisect_right(everyone, length) / max(1, len(everyone))
        return (bisect_right(own, length) + common) / (len(own) + prior)

    return share
