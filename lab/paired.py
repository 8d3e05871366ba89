"""Two ways of doing the same work, timed in turn: one figure, their ratio, and how well it is known."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from ostinato.observe import stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Seconds of both ways, round by round. What slows a whole round slows both, and leaves the ratio."""

    base: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(other / base for base, other in zip(self.base, self.other, strict=True))

    @property
    def ratio(self) -> float:
        """Median over rounds of other / base: 1 is equally fast, above 1 the other way is slower."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Two order statistics that hold the median ratio between them with 95 % or more, whatever the noise
        looks like (the sign test turned round); the whole range where rounds are fewer than 6."""
        ordered, n = sorted(self.ratios), len(self.ratios)
        tails, cut = 1, 0  # 2^n * P(Binomial(n, 1/2) <= cut)
        while 2 * tails <= 0.05 * 2**n:
            cut += 1
            tails += math.comb(n, cut)
        cut = max(cut, 1)
        return ordered[cut - 1], ordered[n - cut]

    def figures(self) -> dict[str, Any]:
        """As the JSON of a command has it."""
        low, high = self.interval
        return {
            "ratio": round(self.ratio, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "rounds": len(self.base),
            "base_s": round(statistics.median(self.base), 4),
            "other_s": round(statistics.median(self.other), 4),
        }


def alternate(
    base: Callable[[], object],
    other: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    least_s: float = 0.0,
) -> Paired:
    """Time both ``rounds`` times, repeated within a timing until it lasts for about ``least_s``.

    Who begins alternates: neither always follows the other's waste.
    """
    repeats = max(1, math.ceil(least_s / max(1e-9, _seconds(base, 1, clock))))
    _seconds(other, 1, clock)
    of_base, of_other = [], []
    for round_ in range(rounds):
        if round_ % 2:
            of_other.append(_seconds(other, repeats, clock))
            of_base.append(_seconds(base, repeats, clock))
        else:
            of_base.append(_seconds(base, repeats, clock))
            of_other.append(_seconds(other, repeats, clock))
    return Paired(base=tuple(of_base), other=tuple(of_other))


def _seconds(work: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Of one of ``repeats`` repetitions; the waste of what ran before is not its own."""
    gc.collect()
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats


def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval of a share, k of n (Wilson 1927); (0, 1) of nothing."""
    return stats.wilson(k / max(1, n), 0.0, n) or (0.0, 1.0)


def geometric(values: Sequence[float], level: float) -> tuple[float, float, float]:
    """(low, mean, high): geometric mean, Student's interval of ``level`` on logarithms; NaN of one value."""
    logs, n = [math.log(value) for value in values], len(values)
    half = stdtrit(n - 1, 0.5 + level / 2) * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.nan
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle), math.exp(middle + half)
