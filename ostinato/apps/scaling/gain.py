"""Compare fairly what training gained: arms (a model and a method each) on the same held-out problems.

    H      (post - pre) / (most - pre): gain over headroom, the relative reduction of the error
    logit  logit(post) - logit(pre)
    pass@k of the base: what sampling alone reaches

All of them are shown together, since H grows without bound near the ceiling, where raw gains shrink.
Intervals are of a paired hierarchical bootstrap. Each draw takes new problems, the same for all arms and for
before and after, and new seeds, the same for all arms. So numerator and denominator of H vary together. The
noise of answers in the difference of two seeds counts both with problems and with seeds, so intervals are a
little wide with few answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.apps.scaling.curve import student_90
from ostinato.apps.scaling.posterior import Interval

DRAWS = 4000
Z90 = 1.6448536269514722
LEAST = 1e-9  # of headroom: below it there is nothing to gain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """Results of an arm: the share of right answers to each of P problems, before [P] and after [S, P]
    training, for each of its S seeds."""

    pre: np.ndarray
    post: np.ndarray


def compute_headroom_gain(pre: np.ndarray, post: np.ndarray) -> np.ndarray:
    """Compute H = 1 - E_post / E_pre with E = 1 - score; NaN without headroom."""
    pre, post = np.asarray(pre, float), np.asarray(post, float)
    room = 1.0 - pre
    return np.where(room > LEAST, (post - pre) / np.where(room == 0, 1.0, room), np.nan)


def compute_logit_gain(pre: np.ndarray, post: np.ndarray, count: int) -> np.ndarray:
    """Compute logit(post) - logit(pre). Scores are clipped to half an answer of ``count`` from 0 and 1."""
    low = 1 / (2 * count)
    a, b = (np.clip(np.asarray(scores, float), low, 1 - low) for scores in (pre, post))
    return np.log(b / (1 - b)) - np.log(a / (1 - a))


def find_compute_to(compute: Sequence[float], score: Sequence[float], threshold: float) -> float:
    """Find the compute at which a course of scores first reaches ``threshold``, linear in ln C between its
    points; infinite if it does not. A course that begins above the threshold gets the compute of its first
    point."""
    for index, (C, value) in enumerate(zip(compute, score, strict=True)):
        if value >= threshold:
            if not index or score[index - 1] == value or compute[index - 1] <= 0:
                return float(C)
            share = (threshold - score[index - 1]) / (value - score[index - 1])
            return math.exp((1 - share) * math.log(compute[index - 1]) + share * math.log(C))
    return math.inf


def estimate_ratio(
    numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray
) -> Interval | None:
    """Estimate the geometric mean of numerators[i] / denominators[i] with the 90 % interval of Student's t on
    logarithms; one pair has no ends. None without pairs, or if a value is not positive and finite."""
    if not len(numerators) or not all(0 < value < math.inf for value in (*numerators, *denominators)):
        return None
    logs = np.log(np.asarray(numerators) / np.asarray(denominators))
    half_width = (
        student_90(len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    )
    low, mean, high = (math.exp(logs.mean() + offset) for offset in (-half_width, 0.0, half_width))
    return Interval(low=low, median=mean, high=high)


def find_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Find the (compute, score) points that no other point beats in both. Return their indices, by
    compute."""
    order = sorted(range(len(points)), key=lambda n: (points[n][0], -points[n][1]))
    best, indices = -math.inf, list[int]()
    for n in order:
        if points[n][1] > best:
            best = points[n][1]
            indices.append(n)
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Gains of an arm, each with its 90 % interval; ``less``: the same figures less those of the
    reference."""

    pre: Interval
    post: Interval
    raw: Interval
    H: Interval
    logit: Interval
    less: Mapping[str, Interval]


def estimate_gains(arms: Mapping[str, Outcomes], *, draws: int = DRAWS, seed: int = 0) -> dict[str, Gain]:
    """Estimate the gains of every arm, and its difference to the first arm. Raises ValueError for arms with
    different numbers of problems."""
    reference = next(iter(arms))
    count = len(arms[reference].pre)
    if mismatches := [name for name, arm in arms.items() if len(arm.pre) != count]:
        raise ValueError(
            f"{mismatches[0]!r} was scored on other problems than {reference!r}; score all on the same"
        )
    rng = np.random.default_rng(seed)
    even_weights = np.full((1, count), 1 / count)
    problems = rng.multinomial(count, even_weights[0], draws) / count  # [draws, P]
    zero_weights = {n: np.zeros((1, n)) for n in {len(arm.post) for arm in arms.values()}}
    seeds = {n: _draw_seeds(rng, n, draws) for n in sorted(zero_weights)}

    def compute_figures(
        by_problem: np.ndarray, by_seed: Mapping[int, np.ndarray]
    ) -> dict[str, dict[str, np.ndarray]]:
        figures_of = {}
        for name, arm in arms.items():
            deviation = by_seed[len(arm.post)] @ (arm.post.mean(1) - arm.post.mean())
            post = np.clip(by_problem @ arm.post.mean(0) + deviation, 0.0, 1.0)
            figures_of[name] = _collect_figures(by_problem @ arm.pre, post, count)
        return figures_of

    parts = [
        compute_figures(even_weights, zero_weights),
        compute_figures(problems, seeds),
        compute_figures(problems, zero_weights),
        compute_figures(even_weights, seeds),
    ]

    def estimate(name: str, key: str, less: str = "") -> Interval:
        differences = [part[name][key] - (part[less][key] if less else 0.0) for part in parts]
        return _estimate_interval(*differences, freedom=(count - 1, len(arms[name].post) - 1))

    keys = ("pre", "post", "raw", "H", "logit")
    return {
        name: Gain(
            **{key: estimate(name, key) for key in keys},
            less={key: estimate(name, key, reference) for key in keys if name != reference},
        )
        for name in arms
    }


def _draw_seeds(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """Draw [draws, S] weights of seeds, less those of their mean. Only S - 1 of S are drawn, which gives the
    mean its right variance. All are zero for one seed."""
    if count < 2:
        return np.zeros((draws, count))
    return rng.multinomial(count - 1, np.full(count, 1 / count), draws) / (count - 1) - 1 / count


def _collect_figures(pre: np.ndarray, post: np.ndarray, count: int) -> dict[str, np.ndarray]:
    ratio, odds = compute_headroom_gain(pre, post), compute_logit_gain(pre, post, count)
    return {"pre": pre, "post": post, "raw": post - pre, "H": ratio, "logit": odds}


def _estimate_interval(
    value: np.ndarray,
    draws: np.ndarray,
    by_problem: np.ndarray,
    by_seed: np.ndarray,
    *,
    freedom: tuple[int, int],
) -> Interval:
    """Return the value as measured, with the 5 % and 95 % quantiles of its draws. The quantiles are stretched
    from the normal to Student's t with the degrees of freedom of both parts together (Satterthwaite 1946).
    The ends are NaN if a draw has no headroom."""
    middle = float(value[0])
    if not np.isfinite(draws).all():
        return Interval(low=math.nan, median=middle, high=math.nan)
    parts = [
        (float(np.var(part_draws)), n)
        for part_draws, n in zip((by_problem, by_seed), freedom, strict=True)
        if n > 0
    ]
    spread = sum(variance**2 / n for variance, n in parts)
    total_freedom = sum(variance for variance, _ in parts) ** 2 / spread if spread > 0 else math.inf
    stretch = student_90(max(1, round(total_freedom))) / Z90 if total_freedom < 1e6 else 1.0
    low, high = (middle + stretch * (float(q) - middle) for q in np.quantile(draws, (0.05, 0.95)))
    return Interval(low=low, median=middle, high=high)
