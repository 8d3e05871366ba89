"""Intervals of held-out scores: 95 %, of shares by Wilson, of their differences by Newcombe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
