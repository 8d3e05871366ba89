"""What the runs of a collapse study add up to: when a run collapsed, and how sure that is over seeds.

Pure functions of the lines that ``collapse.py`` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SMOOTH = 5  # steps whose mean stands for the reward: one step has 64 answers
LASTING = 20  # steps that a reward has to stay below half of its best
AT_LEAST = 5  # ... or to the end of the run, if that is no fewer than these
TAIL, TAIL_SHARE, TAIL_STEPS = "tail_1.5", 0.1, 5  # F(tau) above this for so many steps
KEPT = 0.5  # of the score without a mismatch: what a run has to end with to have kept it


def collapse_step(reward: Sequence[float | None]) -> int | None:
    """The first step (from 1) of a lasting collapse of the reward, None if there is none.

    The moving mean over ``SMOOTH`` steps is below half of its own maximum so far, for ``LASTING`` steps or,
    for ``AT_LEAST`` and more, to the end. A step without a reward counts as the one before it.
    """
    means, best, below = moving_means(reward), 0.0, 0
    for step, mean in enumerate(means, start=1):
        best = max(best, mean)
        below = below + 1 if mean < 0.5 * best else 0
        if below == LASTING or (step == len(means) and below >= AT_LEAST):
            return step - below + 1
    return None


def moving_means(values: Sequence[float | None]) -> list[float]:
    """Means over the last ``SMOOTH`` values (fewer at the start), gaps filled by what stood before."""
    filled: list[float] = []
    for value in values:
        filled.append(value if value is not None else filled[-1] if filled else 0.0)
    windows = (filled[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(filled)))
    return [sum(window) / len(window) for window in windows]


def mismatch_step(tail: Sequence[float | None]) -> int | None:
    """The first of ``TAIL_STEPS`` steps in a row with F(tau) above ``TAIL_SHARE``; a step in which nothing
    was trained on interrupts nothing."""
    above: list[int] = []
    for step, share in enumerate(tail, start=1):
        if share is None:
            continue
        above = [*above, step] if share > TAIL_SHARE else []
        if len(above) == TAIL_STEPS:
            return above[0]
    return None


def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Two-sided p of Fisher's exact test for (k, n) against (k, n): do both have the same share?"""
    (k, n), (j, m) = a, b
    total = k + j

    def probability(x: int) -> float:
        return math.comb(n, x) * math.comb(m, total - x) / math.comb(n + m, total)

    observed = probability(k)
    cells = range(max(0, total - m), min(n, total) + 1)
    return min(1.0, sum(p for x in cells if (p := probability(x)) <= observed * (1 + 1e-9)))


def survival(ends: Sequence[int | None], steps: int) -> list[tuple[int, float]]:
    """The Kaplan-Meier curve of runs of ``steps`` steps: (step, share that is alive after it), from (0, 1).
    ``ends`` are collapse steps, None for a run that lived to the end: all runs are watched equally long."""
    curve, alive = [(0, 1.0)], len(ends)
    for step in sorted({end for end in ends if end is not None}):
        alive -= sum(end == step for end in ends)
        curve.append((step, alive / len(ends)))
    return [*curve, (steps, curve[-1][1])]


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error); the error is NaN for fewer than two."""
    if not values:
        return math.nan, math.nan
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """(mean difference over seeds, two-sided p of the sign-flip test, all 2^n flips): runs of one seed share
    prompts, noise and initial adapters, so they are compared seed by seed."""
    n, total = len(differences), abs(sum(differences))
    if n == 0:
        return math.nan, math.nan
    sums = [0.0]
    for difference in differences:
        sums = [s + sign * difference for s in sums for sign in (1, -1)]
    extreme = sum(abs(s) >= total * (1 - 1e-9) for s in sums)
    return sum(differences) / n, extreme / len(sums)


def ended(row: Mapping[str, Any]) -> int | None:
    """The step at which a run collapsed by its reward, or stopped because nothing was finite any more."""
    step = collapse_step(row["steps"]["reward"])
    return len(row["steps"]["reward"]) if step is None and row["ended"] != "done" else step
