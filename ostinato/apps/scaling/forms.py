"""Other laws beside the sigmoid, and the choice among them by what each would have predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.curve import share
from ostinato.apps.scaling.fit import B_RANGE, REACH, fit
from ostinato.apps.scaling.posterior import posterior
from ostinato.apps.scaling.series import Series

ORIGINS = (0.5, 0.6, 0.7, 0.8)  # shares of the evaluations after which the rest is predicted


class Form(StrEnum):
    POSTERIOR = "sigmoid-posterior"  # the median of the posterior: what our forecasts are by
    SIGMOID = "sigmoid"  # R0 + (A - R0) S(C): three parameters, R0 measured
    SIGMOID_FREE_R0 = "sigmoid-free-R0"  # four
    POWER = "power-law"  # A - D / C^B, A at most 1
    LOG_ERROR = "log-error"  # ln(1 - R) = E - k ln C (arXiv 2509.25300): no ceiling but 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A fitted form."""

    form: Form
    parameters: Mapping[str, float]
    score: Callable[[np.ndarray], np.ndarray]  # of compute


def fit_form(series: Series, form: Form) -> Law:
    """The least-squares law of that form; the error law by least squares of the log error, as its paper does.

    Raises ValueError for fewer evaluations than parameters, and for the error law where a score is 1.
    """
    if len(series) < (needed := 4 if form is Form.SIGMOID_FREE_R0 else 3):
        raise ValueError(f"{series.name} has {len(series)} evaluations; the form {form} needs {needed}")
    match form:
        case Form.POSTERIOR:
            parameters, score = _posterior(series)
        case Form.SIGMOID:
            curve = fit(series).curve
            parameters, score = {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid}, curve.score
        case Form.SIGMOID_FREE_R0:
            parameters, score = _free_R0(series)
        case Form.POWER:
            parameters, score = _power(series)
        case Form.LOG_ERROR:
            parameters, score = _log_error(series)
    return Law(form=form, parameters=parameters, score=score)


Fitted = tuple[dict[str, float], Callable[[np.ndarray], np.ndarray]]


def _posterior(series: Series) -> Fitted:
    known = posterior(series, draws=1024, cells=(24, 48))
    medians = {name: float(np.median(getattr(known, name))) for name in ("A", "B", "C_mid")}
    return medians, lambda at: np.median(known.score(at), axis=0)


def _power(series: Series) -> Fitted:
    C, R = series.compute, series.score

    def solve(log_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(A, D in units of C_min^B, sum of squares) for each exponent."""
        p = np.exp(-np.exp(log_B)[:, None] * np.log(C / C[0]))
        centred = p - p.mean(-1, keepdims=True)
        D = -(centred @ R) / np.maximum((centred * centred).sum(-1), 1e-300)
        A = R.mean() + D * p.mean(-1)
        at_bound = (p @ (1 - R)) / (p * p).sum(-1)
        A, D = np.where(A > 1, 1.0, A), np.where(A > 1, at_bound, D)
        return A, D, ((R - A[:, None] + D[:, None] * p) ** 2).sum(-1)

    log_B = _refine(lambda grid: solve(grid)[2], math.log(0.01), math.log(B_RANGE[1]))
    A, D, _ = (float(x[0]) for x in solve(np.array([log_B])))
    B = math.exp(log_B)
    return {"A": A, "B": B, "D": D * C[0] ** B}, lambda at: A - D * (np.asarray(at) / C[0]) ** -B


def _log_error(series: Series) -> Fitted:
    if series.score.max() >= 1:
        raise ValueError(
            f"{series.name} has a score of 1; the log-error law has no logarithm of an error of 0"
        )
    slope, level = np.polyfit(np.log(series.compute), np.log(1 - series.score), 1)
    parameters = {"k": float(-slope), "E": float(level)}
    return parameters, lambda at: 1 - np.exp(level + slope * np.log(at))


def _free_R0(series: Series) -> Fitted:
    """R = R0 (1 - S) + A S: linear in both, the best of a grid of B and C_mid that is refined around it."""
    C, R = series.compute, series.score
    low = np.log([B_RANGE[0], C[0] / REACH])
    high = np.log([B_RANGE[1], C[-1] * REACH])
    best, R0, A = (low + high) / 2, 0.0, 1.0
    width = (high - low) / 2
    for _ in range(12):
        axes = [
            np.linspace(max(a, m - w), min(b, m + w), 41)
            for a, b, m, w in zip(low, high, best, width, strict=True)
        ]
        log_B, log_C_mid = (x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
        S = share(C, np.exp(log_B)[:, None], np.exp(log_C_mid)[:, None])
        R0s, As, sse = _two_levels(S, R)
        at = int(sse.argmin())
        best, R0, A = np.array([log_B[at], log_C_mid[at]]), float(R0s[at]), float(As[at])
        width = width / 4
    B, C_mid = (float(x) for x in np.exp(best))
    return {"R0": R0, "A": A, "B": B, "C_mid": C_mid}, lambda at: R0 + (A - R0) * share(at, B, C_mid)


def _two_levels(S: np.ndarray, R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(R0, A, sum of squares) of least squares for each row of S, with 0 <= R0 <= A <= 1."""
    centred = S - S.mean(-1, keepdims=True)
    gain = np.maximum((centred @ R) / np.maximum((centred * centred).sum(-1), 1e-300), 0)
    free = R.mean() - gain * S.mean(-1)
    candidates = [  # inside, on R0 = 0, on A = 1; the corner of both
        (free, free + gain),
        (np.zeros_like(free), (S @ R) / np.maximum((S * S).sum(-1), 1e-300)),
        (1 - ((1 - S) @ (1 - R)) / np.maximum(((1 - S) ** 2).sum(-1), 1e-300), np.ones_like(free)),
        (np.zeros_like(free), np.ones_like(free)),
    ]
    R0, A = (np.stack(each) for each in zip(*candidates, strict=True))
    sse = ((R - R0[..., None] * (1 - S) - A[..., None] * S) ** 2).sum(-1)
    sse = np.where((R0 < 0) | (R0 > A + 1e-12) | (A > 1), np.inf, sse)
    which = sse.argmin(0)[None]
    return tuple(np.take_along_axis(x, which, 0)[0] for x in (R0, A, sse))  # type: ignore[return-value]


def _refine(sse: Callable[[np.ndarray], np.ndarray], low: float, high: float, rounds: int = 12) -> float:
    """The minimum of a function of one variable by grids of 41, each around the best of the last."""
    first, last, best = low, high, low
    for _ in range(rounds):
        grid = np.linspace(first, last, 41)
        best = float(grid[sse(grid).argmin()])
        step = grid[1] - grid[0]
        first, last = max(low, best - 2 * step), min(high, best + 2 * step)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A form, how far it was off where it had to predict, and its fit to everything; ``reason`` says why
    there is none."""

    form: Form
    error: float  # rolling-origin RMSE; infinite without a fit
    by_origin: tuple[
        float | None, ...
    ]  # RMSE from each of ORIGINS; None with fewer than 5 evaluations before
    law: Law | None


def choose(series: Series) -> list[Choice]:
    """All forms, the one with the smallest rolling-origin error first.

    Of one series after another, the order says which law predicted best; of a short one it mostly says that
    the first origins lie below 2 C_mid, where least squares takes the ceiling of a sigmoid to 1.
    """
    return sorted((_choice(series, form) for form in Form), key=lambda choice: choice.error)


CLEARLY = 0.7  # the error of another law has to be below so much of ours


def rival(choices: Sequence[Choice]) -> Choice | None:
    """The law, other than a sigmoid from the measured R0, that predicted a series clearly better than the
    posterior did, and from the last origin too: from the first ones a sigmoid is often not identified yet,
    and would not have been reported.

    Of simulated sigmoids one in three has one at 3 C_mid and one in ten at 5; of curves that rise with ln C
    for good, nine in ten.
    """
    if not choices:
        return None
    ours = next(choice for choice in choices if choice.form is Form.POSTERIOR)
    best = next(choice for choice in choices if choice.form is not Form.SIGMOID)
    if best.law is None or not best.error < CLEARLY * ours.error:
        return None
    return best if (best.by_origin[-1] or math.inf) < (ours.by_origin[-1] or math.inf) else None


def rival_sentence(choices: Sequence[Choice]) -> str:
    """The ``rival`` in one sentence; empty where there is none."""
    best = rival(choices)
    if best is None or best.law is None:
        return ""
    ours = next(choice for choice in choices if choice.form is Form.POSTERIOR)
    return (
        f"Another law, {best.form}, has predicted this run better ({best.error:.4f} against {ours.error:.4f},"
        f" root mean square); its ceiling is {best.law.parameters.get('A', 1.0):.3f}."
    )


def _choice(series: Series, form: Form) -> Choice:
    try:
        by_origin = tuple(_error_from(series, form, origin) for origin in ORIGINS)
        law = fit_form(series, form)
    except ValueError:
        return Choice(form=form, error=math.inf, by_origin=(), law=None)
    return Choice(form=form, error=_together(by_origin), by_origin=by_origin, law=law)


def _together(errors: Sequence[float | None]) -> float:
    """Root mean square over origins; infinite where too few evaluations remain."""
    squares = [error**2 for error in errors if error is not None]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


def _error_from(series: Series, form: Form, origin: float) -> float | None:
    """RMSE of all that comes after the origin; None where fewer than 5 evaluations come before it."""
    cut = round(origin * len(series))
    if cut < 5 or cut >= len(series):
        return None
    law = fit_form(series.take(slice(cut)), form)
    return math.sqrt(np.mean((series.score[cut:] - law.score(series.compute[cut:])) ** 2))
