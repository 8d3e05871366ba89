"""Bets against a null hypothesis: evidence that is valid at any look (Ville's inequality).

A state is a frozen value of plain numbers: ``state.update(observation) -> (state, alarm or None)``. After
its alarm a state no longer changes: start a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

STAKES = (0.05, 0.15, 0.4, 0.9)  # shares of the wealth that are bet; the last is near the most, which is 1


@dataclass(frozen=True, slots=True)
class Alarm:
    """``at``: observations seen; ``evidence``: by how much the alarm's threshold was met, 1 or more."""

    detector: str
    at: int
    evidence: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bets:
    """A bettor on "the mean of x is above 0", x in [-1, 1]; its wealth is 1 / p-value at any time.

    Null: given all that was seen, the next x has a mean of at most 0. New bettors with four stakes start at
    every observation, so that a long quiet time costs little (a mixture over starts, as in e-detectors, Shin
    et al., arXiv 2203.03532, with a total of 1: a supermartingale). P(an alarm, ever) <= ``alpha`` (Ville).
    """

    name: str
    alpha: float
    at: int = 0
    wealth: tuple[float, ...] = (0.0,) * len(STAKES)
    clipped: int = 0
    alarmed: bool = False

    @property
    def evidence(self) -> float:
        """alpha times the wealth; an alarm from 1 on."""
        return self.alpha * _total(np.array(self.wealth), self.at).item()

    def update(self, x: Sequence[float] | np.ndarray) -> tuple[Bets, Alarm | None]:
        """Bet on the ``x`` of one step, one per prompt: answers to one prompt are not separate bets. Values
        outside [-1, 1] are clipped and counted. Raises ValueError for a value that is not finite."""
        given = np.asarray(x, float).ravel()
        if not np.isfinite(given).all():
            raise ValueError(f"{self.name}: an observation is not finite; leave out what was not measured")
        if self.alarmed or not len(given):
            return self, None
        cut = np.clip(given, -1, 1)
        wealth = grown(np.array(self.wealth), self.at, cut)
        seen = replace(
            self,
            at=self.at + 1,
            wealth=tuple(wealth.tolist()),
            clipped=self.clipped + int((cut != given).sum()),
        )
        if seen.evidence < 1:
            return seen, None
        sentence = (
            f"{self.name} has grown: wealth {seen.evidence / self.alpha:.3g} against {1 / self.alpha:g}"
        )
        return replace(seen, alarmed=True), Alarm(self.name, seen.at, seen.evidence, sentence)


def grown(wealth: np.ndarray, at: int, x: np.ndarray) -> np.ndarray:
    """``wealth [..., stakes]`` after observation ``at`` (from 0), ``x [..., n]``, new bettors included."""
    odds = np.log1p(np.asarray(STAKES) * x[..., None]).sum(-2)
    return (wealth + _reserve(at) - _reserve(at + 1)) * np.exp(np.minimum(odds, 600.0))  # stays finite


def _reserve(at: int) -> float:
    """Wealth kept for later starts; it falls slowly, as nothing is known of when a change comes."""
    return 1 / (1 + math.log1p(at))


def _total(wealth: np.ndarray, at: int) -> np.ndarray:
    return wealth.mean(-1) + _reserve(at)
