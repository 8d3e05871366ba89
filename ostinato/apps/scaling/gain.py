"""What training gained, fairly: arms (a model and a method each) on the same held-out problems.

    H      (post - pre) / (most - pre): gain over headroom, the relative reduction of the error
    logit  logit(post) - logit(pre)
    pass@k of the base: what sampling alone reaches

None of them is shown without the others: H grows without bound near the ceiling, raw gains shrink there.
Intervals are of a paired hierarchical bootstrap: problems are drawn anew, the same for all arms and for
before and after, and seeds, the same for all arms; numerator and denominator of H move together. What answers
alone make of the difference of two seeds counts in both, so intervals are a little wide with few answers.
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
    """Of one arm: the share of right answers to each of P problems, before [P] and after [S, P] for each of
    its seeds."""

    pre: np.ndarray
    post: np.ndarray


def headroom(pre: np.ndarray, post: np.ndarray) -> np.ndarray:
    """H = 1 - E_post / E_pre with E = 1 - score; NaN where there is no headroom."""
    pre, post = np.asarray(pre, float), np.asarray(post, float)
    room = 1.0 - pre
    return np.where(room > LEAST, (post - pre) / np.where(room == 0, 1.0, room), np.nan)


def logit_gain(pre: np.ndarray, post: np.ndarray, count: int) -> np.ndarray:
    """On scores held half an answer of ``count`` off 0 and 1."""
    low = 1 / (2 * count)
    a, b = (np.clip(np.asarray(one, float), low, 1 - low) for one in (pre, post))
    return np.log(b / (1 - b)) - np.log(a / (1 - a))


def compute_to(compute: Sequence[float], score: Sequence[float], threshold: float) -> float:
    """Where the course first reaches ``threshold``, linear in ln C between its points; inf where it does not.
    A course that begins there needs what its first point has."""
    for at, (C, value) in enumerate(zip(compute, score, strict=True)):
        if value >= threshold:
            if not at or score[at - 1] == value or compute[at - 1] <= 0:
                return float(C)
            share = (threshold - score[at - 1]) / (value - score[at - 1])
            return math.exp((1 - share) * math.log(compute[at - 1]) + share * math.log(C))
    return math.inf


def ratio(of: Sequence[float] | np.ndarray, to: Sequence[float] | np.ndarray) -> Interval | None:
    """Geometric mean of of[i] / to[i] with the 90 % interval of Student's t on logarithms (one pair has no
    ends); None where one of them is not positive and finite."""
    if not len(of) or not all(0 < value < math.inf for value in (*of, *to)):
        return None
    logs = np.log(np.asarray(of) / np.asarray(to))
    half = student_90(len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    low, mean, high = (math.exp(logs.mean() + by) for by in (-half, 0.0, half))
    return Interval(low=low, median=mean, high=high)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Of (compute, score): those that no other one beats in both, by compute."""
    order = sorted(range(len(points)), key=lambda n: (points[n][0], -points[n][1]))
    best, found = -math.inf, list[int]()
    for n in order:
        if points[n][1] > best:
            best = points[n][1]
            found.append(n)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Of one arm, each with its 90 % interval; ``less``: what it has less the reference, of the same name."""

    pre: Interval
    post: Interval
    raw: Interval
    H: Interval
    logit: Interval
    less: Mapping[str, Interval]


def gains(arms: Mapping[str, Outcomes], *, draws: int = DRAWS, seed: int = 0) -> dict[str, Gain]:
    """Of every arm, and of it less the first one; all of the same problems."""
    reference = next(iter(arms))
    count = len(arms[reference].pre)
    if other := [name for name, one in arms.items() if len(one.pre) != count]:
        raise ValueError(
            f"{other[0]!r} was scored on other problems than {reference!r}; score all on the same"
        )
    rng = np.random.default_rng(seed)
    whole = np.full((1, count), 1 / count)
    problems = rng.multinomial(count, whole[0], draws) / count  # [draws, P]
    none = {n: np.zeros((1, n)) for n in {len(arm.post) for arm in arms.values()}}
    seeds = {n: _seeds(rng, n, draws) for n in sorted(none)}

    def drawn(by_problem: np.ndarray, by_seed: Mapping[int, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        found = {}
        for name, one in arms.items():
            off = by_seed[len(one.post)] @ (one.post.mean(1) - one.post.mean())
            post = np.clip(by_problem @ one.post.mean(0) + off, 0.0, 1.0)
            found[name] = _figures(by_problem @ one.pre, post, count)
        return found

    parts = [drawn(whole, none), drawn(problems, seeds), drawn(problems, none), drawn(whole, seeds)]

    def shown(name: str, key: str, less: str = "") -> Interval:
        found = [part[name][key] - (part[less][key] if less else 0.0) for part in parts]
        return _interval(*found, freedom=(count - 1, len(arms[name].post) - 1))

    keys = ("pre", "post", "raw", "H", "logit")
    return {
        name: Gain(
            **{key: shown(name, key) for key in keys},
            less={key: shown(name, key, reference) for key in keys if name != reference},
        )
        for name in arms
    }


def _seeds(rng: np.random.Generator, count: int, draws: int) -> np.ndarray:
    """[draws, S] weights of seeds less those of their mean: S - 1 of S are drawn, which gives their mean the
    variance that it has. Nothing for one seed."""
    if count < 2:
        return np.zeros((draws, count))
    return rng.multinomial(count - 1, np.full(count, 1 / count), draws) / (count - 1) - 1 / count


def _figures(pre: np.ndarray, post: np.ndarray, count: int) -> dict[str, np.ndarray]:
    ratio, odds = headroom(pre, post), logit_gain(pre, post, count)
    return {"pre": pre, "post": post, "raw": post - pre, "H": ratio, "logit": odds}


def _interval(
    value: np.ndarray,
    draws: np.ndarray,
    by_problem: np.ndarray,
    by_seed: np.ndarray,
    *,
    freedom: tuple[int, int],
) -> Interval:
    """The value as measured, with the 5 % and 95 % quantiles of its draws, stretched from the normal to
    Student's t of as many degrees of freedom as both parts have together (Satterthwaite 1946); NaN where one
    has no headroom."""
    middle = float(value[0])
    if not np.isfinite(draws).all():
        return Interval(low=math.nan, median=middle, high=math.nan)
    parts = [(float(np.var(one)), n) for one, n in zip((by_problem, by_seed), freedom, strict=True) if n > 0]
    spread = sum(variance**2 / n for variance, n in parts)
    together = sum(variance for variance, _ in parts) ** 2 / spread if spread > 0 else math.inf
    stretch = student_90(max(1, round(together))) / Z90 if together < 1e6 else 1.0
    low, high = (middle + stretch * (float(q) - middle) for q in np.quantile(draws, (0.05, 0.95)))
    return Interval(low=low, median=middle, high=high)
