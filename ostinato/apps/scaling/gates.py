"""Assess whether a curve is identified, provisionally or not at all, and flag what is odd about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.curve import FEWEST, MEASURED, MORE, sd_from_steps, sd_of_mean
from ostinato.apps.scaling.fit import B_RANGE, Fit
from ostinato.apps.scaling.posterior import LEVEL, Interval, Posterior, interval
from ostinato.apps.scaling.series import Series

Z = 3.0  # standard errors that a change has to exceed
FALLS = 5  # successive falls, which noise alone has in one of 200 looks
# Limits of an identified curve (reference back-tests: A is known to 0.02 from about 3 C_mid on): the least
# C_max / C_mid, and the greatest width of the 90 % interval of A.
IDENTIFIED, WIDTH = 3.0, 0.06
PROVISIONAL, PROVISIONAL_WIDTH = 2.0, 0.15
AT_BOUND = 0.05  # probability that C_mid is within a factor 2 of the prior's lower end


class Standing(StrEnum):
    IDENTIFIED = "identified"
    PROVISIONAL = "provisional"  # an interval and a point estimate, not yet a ranking
    NOT_IDENTIFIED = "not identified"  # no point estimate


REPORTED = frozenset({Standing.IDENTIFIED, Standing.PROVISIONAL})


class Flag(StrEnum):
    FEW = "few evaluations"
    FALLING = "falling"  # ends below where it began
    NO_GAIN = "no gain"  # not beyond noise
    TAIL = "non-monotone tail"  # has fallen from its best
    A_AT_BOUND = "A at bound"
    B_AT_BOUND = "B at bound"
    B_UNKNOWN = "B and C_mid not known"  # their posterior is the prior
    RUNS = "runs of residuals"  # the residuals of the sigmoid have a pattern


# Reasons against any forecast, whatever the posterior says; the first that holds is reported.
REFUSALS = {
    Flag.FALLING: "the scores have fallen below where they began; a rising curve says nothing about that",
    Flag.TAIL: "the last scores are below what had been reached; a rising curve says nothing about that",
    Flag.FEW: f"a curve takes {FEWEST} evaluations after training began; {MORE}",
    Flag.NO_GAIN: "the scores have not risen beyond their noise; there is no curve yet",
}
# not even an interval is reported: it would be that of a wrong model, or the prior's
SILENCING = frozenset(REFUSALS)
UNSTEEP = frozenset({Flag.B_AT_BOUND, Flag.B_UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Whether a curve may be forecast. ``standing`` and ``reason``, a sentence for people, are about the
    ceiling. ``A`` has no median if the curve is not identified, and is None if there is no curve
    (``silent``)."""

    standing: Standing
    reason: str
    flags: tuple[Flag, ...]
    ratio: float  # median of C_max / C_mid
    A: Interval | None

    @property
    def silent(self) -> bool:
        """Whether no number is reported: the curve refutes the model, or cannot be seen yet."""
        return self.A is None

    def find_interval(self, draws: np.ndarray, level: float = LEVEL) -> Interval | None:
        """Return the interval of ``draws`` as far as it may be reported: without its median if the curve is
        not identified, None if ``silent``."""
        if self.silent:
            return None
        return interval(draws, level) if self.standing in REPORTED else interval(draws, level).ends()

    @property
    def steep(self) -> bool:
        """Whether B and C_mid are reported. Of a run that was saturated from the start only A is
        identified."""
        return self.standing in REPORTED and UNSTEEP.isdisjoint(self.flags)


def assess(posterior: Posterior) -> Assessment:
    """Assess whether the curve may be forecast."""
    flags = tuple(_find_flags(posterior.series, posterior.fit)) + (
        () if _is_steep(posterior) else (Flag.B_UNKNOWN,)
    )
    ratios = interval(posterior.series.compute[-1] / posterior.C_mid)
    A: Interval | None = interval(posterior.A)
    standing, reason = decide_standing(flags, ratios, A.width)
    if not SILENCING.isdisjoint(flags):
        A = None
    elif standing is Standing.NOT_IDENTIFIED:
        A = A.ends()
    return Assessment(standing=standing, reason=reason, flags=flags, ratio=ratios.median, A=A)


def decide_standing(flags: Sequence[Flag], ratios: Interval, width: float) -> tuple[Standing, str]:
    """Return the standing and its reason. ``ratios``: C_max / C_mid; ``width``: of the interval of A."""
    for flag, sentence in REFUSALS.items():
        if flag in flags:
            return Standing.NOT_IDENTIFIED, sentence
    ratio = ratios.median
    progress = f"{ratio:.1f} C_mid" if UNSTEEP.isdisjoint(flags) else f"at least {ratios.low:.1f} C_mid"
    evidence = f"compute has reached {progress} and the 90 % interval of A is {width:.3f} wide"
    standing, limits = Standing.NOT_IDENTIFIED, (PROVISIONAL, PROVISIONAL_WIDTH)
    if ratio >= PROVISIONAL and width <= PROVISIONAL_WIDTH:
        standing, limits = Standing.PROVISIONAL, (IDENTIFIED, WIDTH)
    missing = [f"at least {limits[0]:g} C_mid"] * (ratio < limits[0])
    missing += [f"a width of at most {limits[1]:g}"] * (width > limits[1])
    if standing is Standing.PROVISIONAL:
        missing += ["an A that is not at its bound"] * (Flag.A_AT_BOUND in flags)
        if not missing:
            return Standing.IDENTIFIED, evidence
    goal = "a provisional forecast" if standing is Standing.NOT_IDENTIFIED else "an identified curve"
    return standing, f"{evidence}; {goal} lacks {' and '.join(missing)}"


def _is_steep(curve_posterior: Posterior) -> bool:
    """Whether the evaluations say more about B than the prior does (most of the precision of ln B is theirs),
    and C_mid is above the prior's lower end."""
    floor = float(curve_posterior.series.compute[0]) / curve_posterior.prior.below
    is_informed = float(np.log(curve_posterior.B).std()) < curve_posterior.prior.spread / math.sqrt(2)
    return is_informed and float(np.mean(curve_posterior.C_mid < 2 * floor)) < AT_BOUND


def _find_flags(series: Series, fit: Fit) -> list[Flag]:
    """Find the flags that depend on the evaluations and the fit alone, not on priors."""
    flags = []
    n, R = len(series), series.score
    # The sd of one evaluation, from neighbours: a collapse must not pass for noise.
    stderr = 0.0 if series.stderr is None else float(np.median(series.stderr))
    sd = max(MEASURED.floor, sd_from_steps(fit.residuals, MEASURED.rho), stderr)
    window = max(1, n // 4)  # evaluations that are averaged, at the end and before
    error = math.hypot(sd_of_mean(window, sd, MEASURED.rho), series.R0_stderr)
    means = _average_windows(R, window) - series.R0
    if n < FEWEST:
        flags.append(Flag.FEW)
    if means[-1] < -Z * error:
        flags.append(Flag.FALLING)
    elif means.max() < Z * error:
        flags.append(Flag.NO_GAIN)
    if any(_has_fallen(R, count, sd) for count in {1, 2, window}) or _keeps_falling(R):
        flags.append(Flag.TAIL)
    if not series.R0 < fit.curve.A < 0.999:
        flags.append(Flag.A_AT_BOUND)
    if not 1.01 * B_RANGE[0] < fit.curve.B < 0.99 * B_RANGE[1]:
        flags.append(Flag.B_AT_BOUND)
    if compute_runs_z(fit.residuals) < -2.6:
        flags.append(Flag.RUNS)
    return flags


def _average_windows(R: np.ndarray, window: int) -> np.ndarray:
    """Average each ``window`` consecutive evaluations."""
    return np.convolve(R, np.full(window, 1 / window), "valid")


def _has_fallen(R: np.ndarray, count: int, sd: float) -> bool:
    """Whether the mean of the last ``count`` evaluations is beyond noise below an earlier mean: the best one
    of a quarter of all evaluations in a row. The best mean of fewer evaluations would be mere luck."""
    earlier_scores, window = R[:-count], max(2, len(R) // 4)
    if len(earlier_scores) < window:
        return False
    error = math.hypot(*(sd_of_mean(m, sd, MEASURED.rho) for m in (count, window)))
    return bool(_average_windows(earlier_scores, window).max() - R[-count:].mean() > Z * error)


def _keeps_falling(R: np.ndarray) -> bool:
    """Whether the last evaluations fall one after the other. In a short run the steps of a slow fall pass for
    noise."""
    tail = R[-FALLS - 1 :]
    drop = float(tail[0] - tail[-1])
    return len(tail) > FALLS and bool((np.diff(tail) < 0).all()) and drop > Z * MEASURED.floor


def compute_runs_z(residuals: np.ndarray) -> float:
    """Compute z of the number of runs of equal sign (Wald and Wolfowitz 1940). Far below 0 the residuals have
    a pattern. 0 if fewer than 3 are of one sign."""
    sign = np.sign(residuals[residuals != 0])
    above, below = int((sign > 0).sum()), int((sign < 0).sum())
    if min(above, below) < 3:
        return 0.0
    n, product = above + below, 2 * above * below
    expected_runs = product / n + 1
    variance = product * (product - n) / (n * n * (n - 1))
    return (1 + int((sign[1:] != sign[:-1]).sum()) - expected_runs) / math.sqrt(variance)
