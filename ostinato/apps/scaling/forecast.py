"""A run's own forecast: after each evaluation a row of forecast.jsonl, metrics, and one log line.

Compute and budgets are those of the steps that made the policy, as eval.jsonl has them. FLOPs, tokens and
steps are those of the recipe, whatever engine, cache and drafter are used. Hours are those of steps alone,
without loading, saving and restarts. So a run forecasts the same after a kill as without one, on any axis but
those of the clock and its price. ``ostinato scale`` reads the ledger, which has what was really paid.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.apps.scaling.curve import FEWEST
from ostinato.apps.scaling.decide import Action, Terms, decide
from ostinato.apps.scaling.gates import REPORTED, Assessment, Standing, assess
from ostinato.apps.scaling.posterior import Posterior, posterior
from ostinato.apps.scaling.series import Series, read_run
from ostinato.config import ForecastSection, Recipe
from ostinato.every import Axis
from ostinato.observe.rows import abilities_left
from ostinato.protocols import MetricWriter
from ostinato.run import MAIN_SET, RunFolder, to_json
from ostinato.tables import format_compute

logger = logging.getLogger(__name__)
PLACES = 24  # points of the curve, evenly in ln C: a report draws lines between them
BAND = {"q05": 0.05, "q95": 0.95}
CURVE = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
IDENTIFIED = {Standing.IDENTIFIED: 1.0, Standing.PROVISIONAL: 0.5, Standing.NOT_IDENTIFIED: 0.0}
ADVICE = {Action.CONTINUE: "go on", Action.UNDECIDED: "not decided yet", Action.STOP: "not worth the rest"}
NO_FORECAST = "no forecast"  # the verdict on a curve that allows no forecast, or where no budget is left
LEAST_SPENT = 0.3  # of the budget, before a run ends by its own forecast: the score may rise a second time


def new_forecaster(
    recipe: Recipe, run: RunFolder, writers: Sequence[MetricWriter]
) -> Callable[[int], bool] | None:
    """Return the function for ``Observer.should_stop``, to be called after each score of the main set. It
    returns whether the run ends because its rest is not worth its compute, see ``find_objection``; without
    ``forecast.stop`` that is False. None if forecasts are off, or if the run is not scored at its start and
    later.

    Each call appends a row to forecast.jsonl, writes forecast/* to ``writers``, and logs a line once there
    are enough evaluations for a curve. The reason for a failure is logged once. A row that exists is not
    repeated.
    """
    terms = recipe.forecast
    if not (terms.enabled and recipe.eval.at_start and recipe.eval.every):
        return None

    def should_stop(step: int) -> bool:
        row = json.loads(to_json(compute_row(recipe, run, step)))  # as it is read back from the file
        earlier_rows = list(run.forecast.rows())
        wants_stop = terms.stop and row["verdict"] == Action.STOP
        objection = find_objection(row, earlier_rows) if wants_stop else ""
        if row not in earlier_rows:  # a resumed run computes its last row again
            run.forecast.append(row)
            for writer in writers:
                writer.write(step, list_metrics(row))
            is_news = row["failed"] and row["sentence"] not in [
                earlier_row["sentence"] for earlier_row in earlier_rows
            ]
            if row["n"] >= FEWEST or is_news:
                logger.info(
                    f"step {step}: forecast: {row['sentence']}{objection and f'; goes on, for {objection}'}"
                )
        return wants_stop and not objection

    return should_stop


def find_objection(row: Mapping[str, Any], earlier_rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason why a run goes on although its rest is not worth it by ``row``; "" if it ends.

    A single row may err, and a curve that has levelled off early may rise again. So the curve has to be
    identified, at least 30 % of the budget spent, and the last of ``earlier_rows`` has to agree.
    """
    if row["gate"] != Standing.IDENTIFIED:
        return "the curve is only provisionally known"
    if row["compute"] < LEAST_SPENT * row["budget"]:
        return f"less than {LEAST_SPENT:.0%} of the budget is spent"
    verdicts = [
        (earlier_row["verdict"], earlier_row["gate"])
        for earlier_row in earlier_rows
        if earlier_row["step"] < row["step"]
    ]
    is_confirmed = verdicts[-1:] == [(Action.STOP, Standing.IDENTIFIED)]
    return "" if is_confirmed else "the next look has to say so too"


def compute_row(recipe: Recipe, run: RunFolder, step: int) -> dict[str, Any]:
    """Compute the row of forecast.jsonl after the evaluation at ``step``, from the run's folder alone. If
    that has no series of scores, the row has the reason."""
    terms = recipe.forecast
    header: dict[str, Any] = {"step": step, "axis": terms.axis, "counted": name_unit(terms.axis)}
    try:
        series = read_run(run.path, terms.axis, MAIN_SET, compute=lambda row: read_compute(row, recipe))
        steps = read_run(run.path, Axis.STEPS, MAIN_SET).compute
    except ValueError as error:  # no score before training, or the set has changed since
        empty = dict.fromkeys(("compute", "score", "R0", "budget"))
        row = {**empty, "n": 0, "gate": Standing.NOT_IDENTIFIED, **_build_empty_row(str(error))}
        return header | row | {"failed": True}
    budget = terms.budget
    if not budget and len(series):  # the share of steps first: at the last of them it is exactly 1
        budget = float(series.compute[-1]) * (recipe.trainer.steps / float(steps[-1]))
    row = _add_unmeasured(forecast_series(series, budget, terms), series.unmeasured)
    return header | _add_abilities(row, run) | {"failed": False}


def _add_abilities(row: dict[str, Any], run: RunFolder) -> dict[str, Any]:
    """Add to a row the share of the abilities that the run has kept, if it was measured."""
    if (abilities := abilities_left([*run.metrics.rows()])) is None:
        return row
    words = f"Of what it could do and is not trained on, {abilities.text('.0%')} is left"
    return row | {
        "kept": [abilities.value, *(abilities.interval or ())],
        "sentence": f"{row['sentence']}. {words}",
    }


def _add_unmeasured(row: dict[str, Any], unmeasured: int) -> dict[str, Any]:
    """Add to a row the number of evaluations without a score, which are no points of the curve."""
    if not unmeasured:
        return row
    words = f"{unmeasured} evaluation{'s' * (unmeasured > 1)} without a score left out"
    return row | {"reasons": [*row["reasons"], words], "sentence": f"{row['sentence']}; {words}"}


def read_compute(row: Mapping[str, Any], recipe: Recipe) -> float:
    """Return the compute spent up to a row of eval.jsonl, on the axis of the forecast. Raises ValueError
    where the row does not have it."""
    axis, currency = recipe.forecast.axis, recipe.ledger.currency
    names = {Axis.HOURS: "seconds", Axis.DEVICE_HOURS: "device_hours", Axis.MONEY: f"money/{currency}"}
    amount = row.get("spent", {}).get(names.get(axis, axis), None if row["step"] else 0.0)
    if amount is None:
        unit = f"money: not every step before it was paid in {currency}" if axis is Axis.MONEY else axis
        raise ValueError(f"the score at step {row['step']} does not say what had been spent in {unit}")
    return amount / 3600 if axis is Axis.HOURS else amount


def name_unit(axis: Axis) -> str:
    """Name the unit of a run's forecasts, as distinct from the ledger's axis of the same name."""
    if axis in (Axis.HOURS, Axis.DEVICE_HOURS, Axis.MONEY):
        return f"{axis} of steps alone"
    return f"{axis} of the recipe" if axis is Axis.FLOPS else str(axis)


def forecast_series(series: Series, budget: float, terms: ForecastSection) -> dict[str, Any]:
    """Compute ``A``, ``B``, ``C_mid``, ``at_budget`` and ``gain`` (of the rest of the budget) from the
    evaluations, as [q05, q50, q95], and ``curve``, quantiles of R(C) over compute.

    A curve that is not identified has no medians, and a curve that refutes the model has no intervals either.
    With too few evaluations all of these are None. Also returns the verdict, its reasons and a sentence.
    """
    now, score = (float(values[-1]) if len(series) else None for values in (series.compute, series.score))
    head = {"compute": now, "score": score, "R0": series.R0, "n": len(series), "budget": budget}
    if now is None or len(series) < FEWEST:
        reason = f"{len(series)} of the {FEWEST} evaluations that a curve takes"
        return head | {"gate": Standing.NOT_IDENTIFIED, **_build_empty_row(reason)}
    series_posterior = posterior(series)
    assessment = assess(series_posterior)
    is_unspent = budget > now
    score_at_budget = series_posterior.score(budget) if is_unspent else None
    budget_terms = Terms(budget=budget, min_gain=terms.min_gain)
    decision = (
        decide(series_posterior, budget_terms) if is_unspent and assessment.standing in REPORTED else None
    )
    verdict, rival = (decision.action, decision.rival) if decision else (NO_FORECAST, "")
    row = {
        "gate": assessment.standing,
        "reasons": [assessment.reason, *assessment.flags, *([rival] if rival else [])],
        "A": _report_quantiles(series_posterior.A, assessment),
        "B": _report_quantiles(series_posterior.B, assessment) if assessment.steep else None,
        "C_mid": _report_quantiles(series_posterior.C_mid, assessment) if assessment.steep else None,
        "at_budget": None if score_at_budget is None else _report_quantiles(score_at_budget, assessment),
        "gain": _report_quantiles(series_posterior.gain(now, budget), assessment) if is_unspent else None,
        "curve": _sample_curve(series_posterior, assessment, max(now, budget)),
    }
    sentence = "; ".join([_write_sentence({**head, **row}, verdict, terms), *([rival] if rival else [])])
    return head | row | {"verdict": verdict, "sentence": sentence.removesuffix(".")}


def list_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return forecast/* for the writers; ``identified`` is 1, provisionally 0.5, or 0."""
    places = {"A_q05": ("A", 0), "A_q50": ("A", 1), "A_q95": ("A", 2)}
    places |= {"at_budget_q50": ("at_budget", 1), "gain_q50": ("gain", 1)}
    values = {name: row[key][index] for name, (key, index) in places.items() if row[key] is not None}
    forecast_metrics = {
        f"forecast/{name}": float(value) for name, value in values.items() if value is not None
    }
    return forecast_metrics | {"forecast/identified": IDENTIFIED[Standing(row["gate"])]}


def _build_empty_row(reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("A", "B", "C_mid", "at_budget", "gain", "curve"))
    return {"reasons": [reason], **empty, "verdict": NO_FORECAST, "sentence": f"none yet: {reason}"}


def _report_quantiles(draws: np.ndarray, assessment: Assessment) -> list[float | None] | None:
    """[q05, q50, q95], as far as they may be reported."""
    if (interval := assessment.find_interval(draws)) is None:
        return None
    return [interval.low, None if math.isnan(interval.median) else interval.median, interval.high]


def _sample_curve(
    curve_posterior: Posterior, assessment: Assessment, last: float
) -> dict[str, list[float]] | None:
    """Return quantiles of R(C) from the first evaluation to ``last``, to five digits; only the outer
    quantiles for a curve that is not identified."""
    if assessment.silent:
        return None
    places = np.geomspace(float(curve_posterior.series.compute[0]), last, PLACES)
    levels = CURVE if assessment.standing in REPORTED else BAND
    quantiles = np.quantile(curve_posterior.score(places), list(levels.values()), axis=0)
    rows = zip(["compute", *levels], [places, *quantiles], strict=True)
    return {name: [float(f"{value:.5g}") for value in values] for name, values in rows}


def _write_sentence(row: Mapping[str, Any], verdict: str, terms: ForecastSection) -> str:
    """Write the sentence of a row, for the log and the report."""
    if row["gate"] == Standing.NOT_IDENTIFIED:
        return f"{row['gate']}: {row['reasons'][0]}"
    words = "provisionally " if row["gate"] == Standing.PROVISIONAL else ""
    ceiling = f"{words}A {_format_interval(row['A'])}"
    budget = f"{format_compute(row['budget'])} {name_unit(terms.axis)}"
    if row["at_budget"] is None:
        return f"{ceiling}; the budget of {budget} is spent"
    advice = ADVICE[Action(verdict)]
    return f"{ceiling}, at {budget} {_format_interval(row['at_budget'])}; {advice}"


def _format_interval(quantiles: Sequence[float]) -> str:
    low, middle, high = quantiles
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
