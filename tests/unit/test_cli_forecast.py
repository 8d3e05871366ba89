"""What a run is told of its own future: never more than its curve carries, and the same after a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cli.forecast import look, metrics, new_forecaster, outlook
from ostinato.config import ForecastSection, Recipe
from ostinato.pipeline.evaluate import spent
from ostinato.run import RunFolder, to_json
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.plan import simulated
from ostinato.scaling.posterior import interval, posterior
from ostinato.scaling.series import Series, series

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)
TERMS = ForecastSection()


def run_of(last: float, n: int = 25, curve: Sigmoid = SCALERL, seed: int = 0) -> Series:
    return simulated(curve, np.linspace(last / n, last, n), seed=seed)


def fallen() -> Series:
    C = np.linspace(500, 10_000, 20)
    return series("fallen", C, np.linspace(0.4, 0.3, 20), R0=0.4)


def test_an_identified_curve_is_told_whole() -> None:
    run = run_of(20_000)
    row = outlook(run, 40_000, ForecastSection(min_gain=0.02))
    assert (row["gate"], row["verdict"], row["n"], row["compute"]) == ("identified", "stop", 25, 20_000)
    found = interval(posterior(run).A)
    assert row["A"] == [found.low, found.median, found.high]
    low, middle, high = row["at_budget"]
    assert low < SCALERL.score(40_000) < high and low < middle < high
    assert row["gain"][2] < 0.02
    assert row["sentence"].startswith(
        f"A {found.median:.3f} [{found.low:.3f}, {found.high:.3f}], at 40,000 flops"
    )
    assert row["sentence"].endswith("; not worth the rest")
    assert metrics(row)["forecast/identified"] == 1.0
    assert metrics(row)["forecast/A_q50"] == found.median
    assert set(metrics(row)) == {f"forecast/{name}" for name in (*("A_q05", "A_q50", "A_q95"),)} | {
        "forecast/at_budget_q50",
        "forecast/gain_q50",
        "forecast/identified",
    }


def test_a_rising_curve_goes_on() -> None:
    row = outlook(run_of(8_000, n=40), 80_000, TERMS)
    assert row["verdict"] == "continue" and row["sentence"].endswith("; go on")


def test_where_the_budget_is_spent_the_ceiling_is_told_and_nothing_decided() -> None:
    row = outlook(run_of(20_000), 20_000, TERMS)
    assert (row["verdict"], row["at_budget"], row["gain"]) == ("no forecast", None, None)
    assert row["A"][1] == pytest.approx(0.61, abs=0.02)
    assert row["sentence"].endswith("the budget of 20,000 flops is spent")


def numbers(value: Any) -> list[float]:
    """All numbers of a row, however deep."""
    if isinstance(value, Mapping):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(2_500, n=10), "C_mid"),
        (run_of(20_000).take(slice(4)), "4 of the 5 evaluations that a curve takes"),
        (run_of(20_000).take(slice(0)), "0 of the 5 evaluations"),
        (fallen(), "fallen below where they began"),
        (simulated(Sigmoid(R0=0.4, A=0.4001, B=2.0, C_mid=900.0), np.linspace(500, 9000, 12)), "not risen"),
    ],
    ids=["early", "few", "none", "fallen", "flat"],
)
def test_what_a_curve_does_not_carry_is_not_told(run: Series, words: str) -> None:
    """No median anywhere, and of a curve that refutes the model no interval; whatever was asked for."""
    row = json.loads(to_json(outlook(run, 1e5, ForecastSection(stop=True, min_gain=1.0))))
    assert (row["gate"], row["verdict"]) == ("not identified", "no forecast")
    assert words in row["sentence"]
    for name in ("A", "B", "C_mid", "at_budget", "gain"):
        assert row[name] is None or row[name][1] is None
    assert row["curve"] is None or set(row["curve"]) == {"compute", "q05", "q95"}
    assert {"forecast/A_q50", "forecast/gain_q50", "forecast/at_budget_q50"}.isdisjoint(metrics(row))
    assert metrics(row)["forecast/identified"] == 0.0
    if "fallen" in words or "evaluations" in words:
        known = {name: row[name] for name in ("compute", "score", "R0", "n", "budget")}
        assert sorted(numbers(row)) == sorted(numbers(known))


@given(st.floats(0.2, 8), st.integers(3, 30), st.integers(0, 5), st.floats(0.5, 20))
@settings(max_examples=25, deadline=None)
def test_every_row_is_json_with_ordered_quantiles(reach: float, n: int, seed: int, times: float) -> None:
    run = run_of(reach * SCALERL.C_mid, n=n, seed=seed)
    row = json.loads(to_json(outlook(run, times * float(run.compute[-1]), TERMS)))
    for name in ("A", "B", "C_mid", "at_budget", "gain"):
        told = [value for value in row[name] or () if value is not None]
        assert told == sorted(told)
    if row["curve"]:
        assert row["curve"]["compute"] == sorted(row["curve"]["compute"])
        assert all(low <= high for low, high in zip(row["curve"]["q05"], row["curve"]["q95"], strict=True))
    assert (row["verdict"] == "no forecast") == (row["gate"] == "not identified" or times <= 1)


# ---- from a run folder


class Heard:
    """A writer and a screen."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.said: list[str] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(metrics)))


def a_run(path: Path, recipe: Recipe, last: int, every: int = 100) -> RunFolder:
    """Evaluated every ``every`` steps up to ``last``, at 1e9 FLOPs, 10 tokens and a second a step."""
    path.mkdir(exist_ok=True)
    run = RunFolder(path)
    run.recipe.write_text("")
    add_scores(run, range(0, last + 1, every))
    return run


def add_scores(run: RunFolder, steps: Sequence[int] | range) -> None:
    rng = np.random.default_rng(1)
    for step, noise in zip(range(0, 10**6, 100), 0.004 * rng.standard_normal(200), strict=False):
        if step in steps:
            score = 0.4 if step == 0 else SCALERL.score(step * 10.0) + noise
            run.eval.append(eval_row(step, float(score)))


def eval_row(step: int, score: float, **changes: Any) -> dict[str, Any]:
    usual = {"step": step, "set": "eval", "split": "eval", "weights": "model", "held_out": "abcdefabcdef"}
    totals = {"total/useful_flops": 1e9 * step, "total/sampled_tokens": 10.0 * step, "total/seconds": step}
    usual |= {"n": 1000, "samples": 16, "answer_stderr": 0.003, "spent": spent(step, totals, devices=2)}
    return {**usual, "pass@1": score, **changes}


def recipe_of(**forecast: Any) -> Recipe:
    tree = {"trainer": {"steps": 4000}, "eval": {"every": 100}, "ledger": {"price_per_device_hour": 4.0}}
    return Recipe.parse({**tree, "forecast": forecast})


def test_budgets_and_axes(tmp_path: Path) -> None:
    """Given, or that of trainer.steps at the mean cost so far; counted in what the recipe says."""
    recipe = recipe_of()
    run = a_run(tmp_path / "run", recipe, 1500)
    row = look(recipe, run, 1500)
    assert (row["axis"], row["compute"], row["budget"]) == ("flops", 1.5e12, pytest.approx(4e12))
    assert row["gate"] == "identified" and row["A"][0] < 0.61 < row["A"][2]
    given = look(recipe_of(budget=2e12), run, 1500)
    assert given["budget"] == 2e12 and given["A"] == row["A"]
    hours = {"hours": 1500 / 3600, "device-hours": 3000 / 3600, "money": 4 * 3000 / 3600}
    for axis, compute in {"tokens": 15_000, "steps": 1500, **hours}.items():
        found = look(recipe_of(axis=axis), run, 1500)
        assert (found["axis"], found["compute"]) == (axis, pytest.approx(compute))
        assert found["A"] == pytest.approx(row["A"], abs=1e-9)  # only C_mid knows the unit


def test_a_score_that_is_missing_is_told_and_ends_nothing(tmp_path: Path) -> None:
    recipe, heard = recipe_of(stop=True), Heard()
    run = a_run(tmp_path / "run", recipe, 300)
    run.eval.append(eval_row(300, 0.5, **{"pass@1": None}))
    foresee = new_forecaster(recipe, run, [heard], heard.said.append)
    assert foresee is not None and foresee(300) is False
    (row,) = run.forecast.rows()
    assert row["verdict"] == "no forecast" and "no pass@1 at step 300" in row["sentence"]
    assert heard.metrics == [(300, {"forecast/identified": 0.0})]


def test_other_sets_and_the_exported_policy_are_not_on_the_curve(tmp_path: Path) -> None:
    recipe = recipe_of()
    run = a_run(tmp_path / "run", recipe, 1500)
    row = look(recipe, run, 1500)
    for step in (0, 700, 1500):
        run.eval.append(eval_row(step, 0.9, set="hard"))
    run.eval.append(eval_row(1500, 0.2, weights="int8"))
    assert look(recipe, run, 1500) == row


def test_a_stop_is_asked_for_where_it_was_wanted_and_heard_again_after_a_restart(tmp_path: Path) -> None:
    """The rows are those of an uninterrupted run, wherever the run was killed and however often it looks."""
    recipe, heard = recipe_of(stop=True, min_gain=0.02), Heard()
    run = a_run(tmp_path / "run", recipe, 3000)
    foresee = new_forecaster(recipe, run, [heard], heard.said.append)
    assert foresee is not None and foresee(3000)
    assert foresee(3000) and new_forecaster(recipe, run, [], print)(3000)  # pyright: ignore[reportOptionalCall]
    assert len(list(run.forecast.rows())) == len(heard.metrics) == len(heard.said) == 1
    assert heard.said[0].startswith("step 3000: forecast: A 0.6") and "not worth" in heard.said[0]
    patient = new_forecaster(recipe_of(min_gain=0.02), run, [heard], heard.said.append)
    assert patient is not None and not patient(3000)
    wanting = new_forecaster(recipe_of(stop=True, min_gain=1e-6), run, [heard], heard.said.append)
    assert wanting is not None and not wanting(3000)  # other terms: it looks anew
    assert len(list(run.forecast.rows())) == 2


def test_a_run_says_nothing_before_there_are_enough_evaluations(tmp_path: Path) -> None:
    heard = Heard()
    run = a_run(tmp_path / "run", recipe_of(), 400)
    foresee = new_forecaster(recipe_of(), run, [heard], heard.said.append)
    assert foresee is not None and not foresee(400)
    assert heard.said == [] and next(iter(run.forecast.rows()))["n"] == 4


@pytest.mark.parametrize(
    "tree",
    [{"forecast": {"enabled": False}}, {"eval": {"every": 0}}, {"eval": {"at_start": False}}],
)
def test_without_scores_over_the_run_there_is_nothing_to_foresee(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    assert new_forecaster(Recipe.parse(tree), RunFolder(tmp_path), [], print) is None


def test_a_score_that_does_not_say_what_had_been_spent_is_named(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", recipe_of(), 0)
    run.eval.append({name: value for name, value in eval_row(100, 0.5).items() if name != "spent"})
    row = look(recipe_of(), run, 100)
    assert row["sentence"] == "none yet: the score at step 100 does not say what had been spent"
