"""What a run hears of its own future: after each evaluation a row of forecast.jsonl, metrics, and one line.

Compute is that of the steps which made the policy, as eval.jsonl has it. A run that was killed and resumed
therefore foretells what it would have foretold without. ``ostinato scale`` reads the ledger, which has lost
work, idle time and restarts as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.config import ForecastSection, Recipe
from ostinato.protocols import MetricWriter
from ostinato.report.scaling import compute_text
from ostinato.run import MAIN_SET, RunFolder, to_json
from ostinato.scaling.decide import Action, Terms, decide
from ostinato.scaling.gates import FEWEST, TOLD, Assessment, Standing, assess
from ostinato.scaling.posterior import Posterior, interval, posterior
from ostinato.scaling.series import Axis, Series, read_run

PLACES = 24  # of the curve, evenly in ln C: a report joins them
BAND = {"q05": 0.05, "q95": 0.95}
CURVE = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
IDENTIFIED = {Standing.IDENTIFIED: 1.0, Standing.PROVISIONAL: 0.5, Standing.NOT_IDENTIFIED: 0.0}
ADVICE = {Action.CONTINUE: "go on", Action.UNDECIDED: "not decided yet", Action.STOP: "not worth the rest"}
NO_FORECAST = "no forecast"  # the verdict on a curve that carries none, or where no budget is left


def new_forecaster(
    recipe: Recipe, run: RunFolder, writers: Sequence[MetricWriter], say: Callable[[str], None]
) -> Callable[[int], bool] | None:
    """What the loop calls after a score of the main set: is the rest of the run not worth its compute? Always
    False without ``forecast.stop``. None where a run is not scored before and while it trains.

    ``writers`` get forecast/*, and ``say`` one line as soon as there are enough evaluations for a curve.
    """
    terms = recipe.forecast
    if not (terms.enabled and recipe.eval.at_start and recipe.eval.every):
        return None

    def foresee(step: int) -> bool:
        row = json.loads(to_json(look(recipe, run, step)))  # as it will be read back
        if row not in run.forecast.rows():  # a resumed run looks again at what it has been told
            run.forecast.append(row)
            for writer in writers:
                writer.write(step, metrics(row))
            if row["n"] >= FEWEST:
                say(f"step {step}: forecast: {row['sentence']}")
        return terms.stop and row["verdict"] == Action.STOP

    return foresee


def look(recipe: Recipe, run: RunFolder, step: int) -> dict[str, Any]:
    """The row of forecast.jsonl after the evaluation at ``step``, from the folder of the run alone."""
    terms = recipe.forecast
    axis = Axis.GPU_HOURS if terms.axis == "device-hours" else Axis(terms.axis)
    about: dict[str, Any] = {"step": step, "axis": terms.axis}
    try:
        series = read_run(run.path, axis, MAIN_SET, compute=lambda row: compute_of(row, recipe))
    except ValueError as error:  # a score that could not be measured
        unknown = dict.fromkeys(("compute", "score", "R0", "budget"))
        return about | {**unknown, "n": 0, "gate": Standing.NOT_IDENTIFIED, **_nothing(str(error))}
    mean = float(series.compute[-1]) / step if len(series) else 0.0  # of a step
    return about | outlook(series, terms.budget or mean * recipe.trainer.steps, terms)


def compute_of(row: Mapping[str, Any], recipe: Recipe) -> float:
    """What was spent up to a row of eval.jsonl, on the axis of the forecast. Raises ValueError for a row
    that does not say."""
    spent = row.get("spent")
    if spent is None:
        raise ValueError(f"the score at step {row['step']} does not say what had been spent")
    match recipe.forecast.axis:
        case "hours":
            return spent["seconds"] / 3600
        case "device-hours":
            return spent["device_hours"]
        case "money":
            return spent["device_hours"] * recipe.ledger.price_per_device_hour
        case axis:
            return spent[axis]


def outlook(series: Series, budget: float, terms: ForecastSection) -> dict[str, Any]:
    """What the evaluations foretell: ``A``, ``B``, ``C_mid``, ``at_budget`` and ``gain`` (of the rest of the
    budget) as [q05, q50, q95], and ``curve``, quantiles of R(C) over compute.

    A curve that is not identified has no medians, and one that refutes the model has no intervals either.
    """
    now, score = (float(values[-1]) if len(series) else None for values in (series.compute, series.score))
    told = {"compute": now, "score": score, "R0": series.R0, "n": len(series), "budget": budget}
    if now is None or len(series) < FEWEST:
        reason = f"{len(series)} of the {FEWEST} evaluations that a curve takes"
        return told | {"gate": Standing.NOT_IDENTIFIED, **_nothing(reason)}
    known = posterior(series)
    assessment = assess(known)
    left = budget > now
    ahead = known.score(budget) if left else None
    row = {
        "gate": assessment.standing,
        "reasons": [assessment.reason, *assessment.flags],
        "A": _shown(known.A, assessment),
        "B": _shown(known.B, assessment),
        "C_mid": _shown(known.C_mid, assessment),
        "at_budget": None if ahead is None else _shown(ahead, assessment),
        "gain": _shown(known.gain(now, budget), assessment) if left else None,
        "curve": _curve(known, assessment, max(now, budget)),
    }
    verdict = _verdict(known, assessment, budget, terms)
    return told | row | {"verdict": verdict, "sentence": _sentence({**told, **row}, verdict, terms)}


def metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """forecast/* for the writers: what may be told, and whether the curve is identified (1), provisionally so
    (0.5) or not (0)."""
    named = {"A_q05": ("A", 0), "A_q50": ("A", 1), "A_q95": ("A", 2)}
    named |= {"at_budget_q50": ("at_budget", 1), "gain_q50": ("gain", 1)}
    values = {name: row[key][at] for name, (key, at) in named.items() if row[key] is not None}
    found = {f"forecast/{name}": float(value) for name, value in values.items() if value is not None}
    return found | {"forecast/identified": IDENTIFIED[Standing(row["gate"])]}


def _nothing(reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("A", "B", "C_mid", "at_budget", "gain", "curve"))
    return {"reasons": [reason], **empty, "verdict": NO_FORECAST, "sentence": f"none yet: {reason}"}


def _shown(draws: np.ndarray, assessment: Assessment) -> list[float | None] | None:
    """[q05, q50, q95], as much of them as may be told."""
    if assessment.silent:
        return None
    found = interval(draws)
    return [found.low, found.median if assessment.standing in TOLD else None, found.high]


def _curve(known: Posterior, assessment: Assessment, last: float) -> dict[str, list[float]] | None:
    """Quantiles of R(C) from the first evaluation to ``last``, to five digits; the outer ones of a curve that
    may not be told."""
    if assessment.silent:
        return None
    places = np.geomspace(float(known.series.compute[0]), last, PLACES)
    levels = CURVE if assessment.standing in TOLD else BAND
    found = np.quantile(known.score(places), list(levels.values()), axis=0)
    rows = zip(["compute", *levels], [places, *found], strict=True)
    return {name: [float(f"{value:.5g}") for value in values] for name, values in rows}


def _verdict(known: Posterior, assessment: Assessment, budget: float, terms: ForecastSection) -> str:
    if assessment.standing not in TOLD or not budget > known.series.compute[-1]:
        return NO_FORECAST
    return decide(known, Terms(budget=budget, min_gain=terms.min_gain), settle=False).action


def _sentence(row: Mapping[str, Any], verdict: str, terms: ForecastSection) -> str:
    if row["gate"] == Standing.NOT_IDENTIFIED:
        return f"{row['gate']}: {row['reasons'][0]}"
    words = "provisionally " if row["gate"] == Standing.PROVISIONAL else ""
    ceiling = f"{words}A {_span(row['A'])}"
    budget = f"{compute_text(row['budget'])} {terms.axis}"
    if row["at_budget"] is None:
        return f"{ceiling}; the budget of {budget} is spent"
    advice = ADVICE[Action(verdict)]
    return f"{ceiling}, at {budget} {_span(row['at_budget'])}; {advice}"


def _span(found: Sequence[float]) -> str:
    low, middle, high = found
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
