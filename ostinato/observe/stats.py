"""Intervals of held-out scores: 95 %, of shares by Wilson, of their differences by Newcombe; and bets against
a null hypothesis: evidence that is valid at any look (Ville's inequality).

A state of a bet is a frozen value of plain numbers: ``state.update(observation) -> (state, alarm or None)``.
After its alarm a state no longer changes: start a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Z95 = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval; the interval is None if there is too little data for one."""

    value: float
    interval: tuple[float, float] | None = None

    def text(self, form: str = ".3f") -> str:
        """ "0.300 [0.245, 0.362]"."""
        return f"{self.value:{form}} {self.interval_text(form)}".strip()

    def interval_text(self, form: str = ".3f") -> str:
        return "" if self.interval is None else "[{}, {}]".format(*(f"{end:{form}}" for end in self.interval))


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A finite value of a row; None if it is missing, null, not finite or not a number."""
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def estimate(row: Mapping[str, Any], name: str) -> Estimate | None:
    """``pass@1``, ``pass@k`` or ``reward`` of a row of eval.jsonl."""
    value = number(row, name)
    error = number(row, "stderr" if name == "pass@1" else f"{name}_stderr")
    if value is None or error is None:
        return None if value is None else Estimate(value=value)
    if name == "reward":
        return Estimate(value=value, interval=(value - Z95 * error, value + Z95 * error))
    return Estimate(value=value, interval=wilson(value, error, number(row, "n") or 0))


def wilson(value: float, error: float, n: float) -> tuple[float, float] | None:
    """95 % score interval of a share (Wilson 1927), which holds at 0 and 1 too.

    The standard error is over prompts: it is converted to the number of independent answers that would have
    it. If it is 0, as all prompts have the same score, that number is ``n``.
    """
    spread, variance = value * (1 - value), error**2
    trials = max(1.0, spread / variance) if spread and variance else n
    if trials <= 0:
        return None
    scale = 1 + Z95**2 / trials
    middle = (value + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(spread / trials + (Z95 / (2 * trials)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference(before: Estimate, after: Estimate) -> Estimate:
    """after - before; its interval from the two (Newcombe 1998, method 10) as if they were independent.

    Both are measured on the same prompts with the same noise, so the true interval is usually narrower.
    """
    change = after.value - before.value
    if before.interval is None or after.interval is None:
        return Estimate(value=change)
    (low, high), (new_low, new_high) = before.interval, after.interval
    down = math.hypot(after.value - new_low, high - before.value)
    up = math.hypot(new_high - after.value, before.value - low)
    return Estimate(value=change, interval=(change - down, change + up))


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
        return self.alpha * (np.array(self.wealth).mean(-1) + _reserve(self.at)).item()

    def update(self, x: Sequence[float] | np.ndarray) -> tuple[Bets, Alarm | None]:
        """Bet on the ``x`` of one step, one per prompt: answers to one prompt are not separate bets. Values
        outside [-1, 1] are clipped and counted. Raises ValueError for a value that is not finite."""
        given = np.asarray(x, float).ravel()
        if not np.isfinite(given).all():
            raise ValueError(f"{self.name}: an observation is not finite; leave out what was not measured")
        if self.alarmed or not len(given):
            return self, None
        cut = np.clip(given, -1, 1)
        wealth = grow_wealth(np.array(self.wealth), self.at, cut)
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


def grow_wealth(wealth: np.ndarray, at: int, x: np.ndarray) -> np.ndarray:
    """``wealth [..., stakes]`` after observation ``at`` (from 0), ``x [..., n]``, new bettors included."""
    odds = np.log1p(np.asarray(STAKES) * x[..., None]).sum(-2)
    return (wealth + _reserve(at) - _reserve(at + 1)) * np.exp(np.minimum(odds, 600.0))  # stays finite


def _reserve(at: int) -> float:
    """Wealth kept for later starts; it falls slowly, as nothing is known of when a change comes."""
    return 1 / (1 + math.log1p(at))
