"""Whether a curve is identified, provisionally or not at all; flags in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.curve import MEASURED, sd_from_steps, sd_of_mean
from ostinato.apps.scaling.fit import B_RANGE, Fit
from ostinato.apps.scaling.posterior import LEVEL, Interval, Posterior, interval
from ostinato.apps.scaling.series import Series

FEWEST = 5  # evaluations for a forecast of three parameters
Z = 3.0  # standard errors that a change has to have
FALLS = 5  # in a row, which noise alone has in one of 200 looks
# What makes a curve identified (reference back-tests: A is known to 0.02 from about 3 C_mid on): the least
# C_max / C_mid, and the most of the 90 % interval of A.
IDENTIFIED, WIDTH = 3.0, 0.06
PROVISIONAL, PROVISIONAL_WIDTH = 2.0, 0.15
AT_BOUND = 0.05  # chance that C_mid is within a factor 2 of the least that is thought of


class Standing(StrEnum):
    IDENTIFIED = "identified"
    PROVISIONAL = "provisional"  # an interval and a point, not yet a ranking
    NOT_IDENTIFIED = "not identified"  # no point


REPORTED = frozenset({Standing.IDENTIFIED, Standing.PROVISIONAL})


class Flag(StrEnum):
    FEW = "few evaluations"
    FALLING = "falling"  # ends below where it began
    NO_GAIN = "no gain"  # not beyond noise
    TAIL = "non-monotone tail"  # has fallen from what it had reached
    A_AT_BOUND = "A at bound"
    B_AT_BOUND = "B at bound"
    B_UNKNOWN = "B and C_mid not known"  # their posterior is the prior
    RUNS = "runs of residuals"  # the sigmoid leaves a pattern


# Why nothing is identified, whatever the posterior says; the first that holds is the reason.
REFUSALS = {
    Flag.FALLING: "the scores have fallen below where they began; a rising curve says nothing about that",
    Flag.TAIL: "the last scores are below what had been reached; a rising curve says nothing about that",
    Flag.FEW: f"fewer than {FEWEST} evaluations do not carry three parameters; measure more",
    Flag.NO_GAIN: "the scores have not risen beyond their noise; there is no curve yet",
}
SILENCING = frozenset(
    REFUSALS
)  # not even an interval is reported: it would be that of a wrong model, or the prior's
UNSTEEP = frozenset({Flag.B_AT_BOUND, Flag.B_UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """``standing`` and ``reason``, one sentence for a person, are about the ceiling. ``A`` has no median
    where the curve is not identified, and is None where there is no curve: see ``silent``."""

    standing: Standing
    reason: str
    flags: tuple[Flag, ...]
    ratio: float  # median of C_max / C_mid
    A: Interval | None

    @property
    def silent(self) -> bool:
        """No number is reported: the curve refutes the model, or has not begun to show."""
        return self.A is None

    def shown(self, draws: np.ndarray, level: float = LEVEL) -> Interval | None:
        """The interval of ``draws``, as far as it may be reported: without its median where the curve is not
        identified, None where ``silent``."""
        if self.silent:
            return None
        return interval(draws, level) if self.standing in REPORTED else interval(draws, level).ends()

    @property
    def steep(self) -> bool:
        """Are B and C_mid reported? Of a run that was saturated from the start only A is identified."""
        return self.standing in REPORTED and UNSTEEP.isdisjoint(self.flags)


def assess(known: Posterior) -> Assessment:
    """May the curve be forecast?"""
    flags = tuple(_flags(known.series, known.fit)) + (() if _steep(known) else (Flag.B_UNKNOWN,))
    ratios = interval(known.series.compute[-1] / known.C_mid)
    A: Interval | None = interval(known.A)
    standing, reason = _standing(flags, ratios, A.width)
    if not SILENCING.isdisjoint(flags):
        A = None
    elif standing is Standing.NOT_IDENTIFIED:
        A = A.ends()
    return Assessment(standing=standing, reason=reason, flags=flags, ratio=ratios.median, A=A)


def _standing(flags: Sequence[Flag], ratios: Interval, width: float) -> tuple[Standing, str]:
    for flag, sentence in REFUSALS.items():
        if flag in flags:
            return Standing.NOT_IDENTIFIED, sentence
    ratio = ratios.median
    reached = f"{ratio:.1f} C_mid" if UNSTEEP.isdisjoint(flags) else f"at least {ratios.low:.1f} C_mid"
    seen = f"compute has reached {reached} and the 90 % interval of A is {width:.3f} wide"
    if ratio < PROVISIONAL or width > PROVISIONAL_WIDTH:
        needed = f"{PROVISIONAL:g} C_mid and {PROVISIONAL_WIDTH:g}"
        return Standing.NOT_IDENTIFIED, f"{seen}; a provisional forecast needs {needed}"
    if ratio < IDENTIFIED or width > WIDTH or Flag.A_AT_BOUND in flags:
        at_bound = ", with A at its bound" if Flag.A_AT_BOUND in flags else ""
        needed = f"{IDENTIFIED:g} C_mid and {WIDTH:g}"
        return Standing.PROVISIONAL, f"{seen}{at_bound}; {needed} identify it"
    return Standing.IDENTIFIED, seen


def _steep(known: Posterior) -> bool:
    """Do the evaluations say more about B than the prior does (is most of the precision of ln B theirs), and
    is C_mid above the least that the prior allows?"""
    floor = float(known.series.compute[0]) / known.prior.below
    informed = float(np.log(known.B).std()) < known.prior.spread / math.sqrt(2)
    return informed and float(np.mean(known.C_mid < 2 * floor)) < AT_BOUND


def _flags(series: Series, fit: Fit) -> list[Flag]:
    """Flags by what was seen, independent of priors."""
    found = []
    n, R = len(series), series.score
    # The sd of one evaluation, from neighbours: a collapse must not pass for noise.
    stderr = 0.0 if series.stderr is None else float(np.median(series.stderr))
    sd = max(MEASURED.floor, sd_from_steps(fit.residuals, MEASURED.rho), stderr)
    last = max(1, n // 4)  # evaluations that are averaged, at the end and before
    error = math.hypot(sd_of_mean(last, sd, MEASURED.rho), series.R0_stderr)
    means = _average_windows(R, last) - series.R0
    if n < FEWEST:
        found.append(Flag.FEW)
    if means[-1] < -Z * error:
        found.append(Flag.FALLING)
    elif means.max() < Z * error:
        found.append(Flag.NO_GAIN)
    if any(_fallen(R, many, sd) for many in {1, 2, last}) or _falls(R):
        found.append(Flag.TAIL)
    if not series.R0 < fit.curve.A < 0.999:
        found.append(Flag.A_AT_BOUND)
    if not 1.01 * B_RANGE[0] < fit.curve.B < 0.99 * B_RANGE[1]:
        found.append(Flag.B_AT_BOUND)
    if runs_z(fit.residuals) < -2.6:
        found.append(Flag.RUNS)
    return found


def _average_windows(R: np.ndarray, window: int) -> np.ndarray:
    """Mean of each ``window`` consecutive evaluations."""
    return np.convolve(R, np.full(window, 1 / window), "valid")


def _fallen(R: np.ndarray, last: int, sd: float) -> bool:
    """Is the mean of the last so many evaluations below the best that a quarter of all, in a row, had before
    them? The best of fewer would be the luckiest."""
    before, many = R[:-last], max(2, len(R) // 4)
    if len(before) < many:
        return False
    error = math.hypot(*(sd_of_mean(m, sd, MEASURED.rho) for m in (last, many)))
    return bool(_average_windows(before, many).max() - R[-last:].mean() > Z * error)


def _falls(R: np.ndarray) -> bool:
    """Has it fallen time after time? In a short run the steps of a slow fall are taken for noise."""
    last = R[-FALLS - 1 :]
    fallen = float(last[0] - last[-1])
    return len(last) > FALLS and bool((np.diff(last) < 0).all()) and fallen > Z * MEASURED.floor


def runs_z(residuals: np.ndarray) -> float:
    """z of the number of runs of equal sign (Wald and Wolfowitz 1940): far below 0, the residuals have a
    pattern. 0 where fewer than 3 are of one sign."""
    sign = np.sign(residuals[residuals != 0])
    above, below = int((sign > 0).sum()), int((sign < 0).sum())
    if min(above, below) < 3:
        return 0.0
    n, product = above + below, 2 * above * below
    expected = product / n + 1
    variance = product * (product - n) / (n * n * (n - 1))
    return (1 + int((sign[1:] != sign[:-1]).sum()) - expected) / math.sqrt(variance)
