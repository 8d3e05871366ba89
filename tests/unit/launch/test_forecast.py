"""What a run reports of its own future: never more than its curve carries, and the same after a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.apps.scaling.curve import Sigmoid
from ostinato.apps.scaling.forecast import (
    compute_row,
    find_objection,
    forecast_series,
    list_metrics,
    new_forecaster,
)
from ostinato.apps.scaling.posterior import interval, posterior
from ostinato.apps.scaling.series import Series, series, simulate_series
from ostinato.config import ForecastSection, Recipe
from ostinato.every import spent_in_steps
from ostinato.observe.ledger import Terms
from ostinato.pipeline.account import add_totals
from ostinato.run import RunFolder, to_json

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)
TERMS = ForecastSection()


def run_of(last: float, n: int = 25, curve: Sigmoid = SCALERL, seed: int = 0) -> Series:
    return simulate_series(curve, np.linspace(last / n, last, n), seed=seed)


def fallen() -> Series:
    C = np.linspace(500, 10_000, 20)
    return series("fallen", C, np.linspace(0.4, 0.3, 20), R0=0.4)


def test_an_identified_curve_is_told_whole() -> None:
    run = run_of(20_000)
    row = forecast_series(run, 40_000, ForecastSection(min_gain=0.02))
    assert (row["gate"], row["verdict"], row["n"], row["compute"]) == ("identified", "stop", 25, 20_000)
    found = interval(posterior(run).A)
    assert row["A"] == [found.low, found.median, found.high]
    low, middle, high = row["at_budget"]
    assert low < SCALERL.score(40_000) < high and low < middle < high
    assert row["gain"][2] < 0.02
    assert row["sentence"].startswith(
        f"A {found.median:.3f} [{found.low:.3f}, {found.high:.3f}], at 40,000 flops of the recipe"
    )
    assert row["sentence"].endswith("; not worth the rest")
    assert list_metrics(row)["forecast/identified"] == 1.0
    assert list_metrics(row)["forecast/A_q50"] == found.median
    assert set(list_metrics(row)) == {f"forecast/{name}" for name in (*("A_q05", "A_q50", "A_q95"),)} | {
        "forecast/at_budget_q50",
        "forecast/gain_q50",
        "forecast/identified",
    }


def test_a_law_that_fits_better_is_heard() -> None:
    """Of a score that grows with the logarithm of compute the forecast was reported without a word, 0.633
    [0.608, 0.665] at four times the compute where 0.708 came; only ``scale fit`` showed that another law is
    better."""
    C = np.linspace(800, 20_000, 25)
    noise = 0.002 * np.random.default_rng(0).standard_normal(25)
    row = forecast_series(series("log", C, 0.3 + 0.08 * np.log(C / 300) + noise, R0=0.3), 80_000, TERMS)
    assert "has predicted this run better" in row["reasons"][-1]
    assert row["sentence"].endswith(f"; {row['reasons'][-1].removesuffix('.')}")
    assert row["verdict"] != "stop"


@pytest.mark.parametrize(
    ("changes", "before", "why"),
    [
        ({}, ("stop", "identified"), ""),
        ({"gate": "provisional"}, ("stop", "identified"), "the curve is only provisionally known"),
        ({"compute": 2.9}, ("stop", "identified"), "less than 30% of the budget is spent"),
        ({}, ("stop", "provisional"), "the next look has to say so too"),
        ({}, ("undecided", "identified"), "the next look has to say so too"),
        ({}, ("no forecast", "not identified"), "the next look has to say so too"),
    ],
)
def test_what_a_stop_takes(changes: dict[str, Any], before: tuple[str, str], why: str) -> None:
    row = {"step": 9, "gate": "identified", "compute": 3.0, "budget": 10.0, "verdict": "stop"} | changes
    reported = [row | {"step": 3}, row | {"step": 6, "verdict": before[0], "gate": before[1]}, row]
    assert find_objection(row, reported) == why
    assert find_objection(row, [])


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
        (
            simulate_series(Sigmoid(R0=0.4, A=0.4001, B=2.0, C_mid=900.0), np.linspace(500, 9000, 12)),
            "not risen",
        ),
    ],
    ids=["early", "few", "none", "fallen", "flat"],
)
def test_what_a_curve_does_not_carry_is_not_told(run: Series, words: str) -> None:
    """No median anywhere, and of a curve that refutes the model no interval; whatever was requested."""
    row = json.loads(to_json(forecast_series(run, 1e5, ForecastSection(stop=True, min_gain=1.0))))
    assert (row["gate"], row["verdict"]) == ("not identified", "no forecast")
    assert words in row["sentence"]
    for name in ("A", "B", "C_mid", "at_budget", "gain"):
        assert row[name] is None or row[name][1] is None
    assert row["curve"] is None or set(row["curve"]) == {"compute", "q05", "q95"}
    assert {"forecast/A_q50", "forecast/gain_q50", "forecast/at_budget_q50"}.isdisjoint(list_metrics(row))
    assert list_metrics(row)["forecast/identified"] == 0.0
    if "fallen" in words or "evaluations" in words:
        known = {name: row[name] for name in ("compute", "score", "R0", "n", "budget")}
        assert sorted(numbers(row)) == sorted(numbers(known))


@pytest.mark.slow
@given(st.floats(0.2, 8), st.integers(3, 15), st.integers(0, 5), st.floats(0.5, 20))
@settings(max_examples=20, deadline=None)
def test_every_row_is_json_with_ordered_quantiles(reach: float, n: int, seed: int, times: float) -> None:
    run = run_of(reach * SCALERL.C_mid, n=n, seed=seed)
    row = json.loads(to_json(forecast_series(run, times * float(run.compute[-1]), TERMS)))
    for name in ("A", "B", "C_mid", "at_budget", "gain"):
        reported = [value for value in row[name] or () if value is not None]
        assert reported == sorted(reported)
    if row["curve"]:
        assert row["curve"]["compute"] == sorted(row["curve"]["compute"])
        assert all(low <= high for low, high in zip(row["curve"]["q05"], row["curve"]["q95"], strict=True))
    assert (row["verdict"] == "no forecast") == (row["gate"] == "not identified" or times <= 1)


# ---- from a run folder


class Heard:
    """A writer."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []

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
    totals = {"total/compute_flops": 1e9 * step, "total/sampled_tokens": 10.0 * step, "total/seconds": step}
    totals |= {"total/device_seconds": 2.0 * step, "total/money/USD": 4 * 2.0 * step / 3600}
    usual |= {"n": 1000, "samples": 16, "answer_stderr": 0.003, "spent": spent_in_steps(step, totals)}
    return {**usual, "pass@1": score, **changes}


def recipe_of(**forecast: Any) -> Recipe:
    tree = {"trainer": {"steps": 4000}, "eval": {"every": 100}, "ledger": {"price_per_device_hour": 4.0}}
    return Recipe.parse({**tree, "forecast": forecast})


@pytest.mark.slow
def test_budgets_and_axes(tmp_path: Path) -> None:
    """Given, or that of trainer.steps at the mean cost so far; counted in what the recipe says."""
    recipe = recipe_of()
    run = a_run(tmp_path / "run", recipe, 1500)
    row = compute_row(recipe, run, 1500)
    assert (row["axis"], row["compute"], row["budget"]) == ("flops", 1.5e12, pytest.approx(4e12))
    assert row["gate"] == "identified" and row["A"][0] < 0.61 < row["A"][2]
    assert row["counted"] == "flops of the recipe" and " 4e12 flops of the recipe " in row["sentence"]
    assert (
        compute_row(recipe, run, 1600)["budget"] == row["budget"]
    )  # the mean is of the steps that were scored
    given = compute_row(recipe_of(budget=2e12), run, 1500)
    assert given["budget"] == 2e12 and given["A"] == row["A"]
    hours = {"hours": 1500 / 3600, "device-hours": 3000 / 3600, "money": 4 * 3000 / 3600}
    for axis, compute in {"tokens": 15_000, "steps": 1500, **hours}.items():
        found = compute_row(recipe_of(axis=axis), run, 1500)
        assert (found["axis"], found["compute"]) == (axis, pytest.approx(compute))
        assert found["A"] == pytest.approx(row["A"], abs=1e-9)  # only C_mid knows the unit
        words = f"{axis} of steps alone" if axis in hours else axis  # not those that the ledger has
        assert found["counted"] == words and f" {words} " in found["sentence"]


@pytest.mark.parametrize("devices", [(1, 8), (8, 1)])
def test_devices_that_change_leave_what_was_spent_before(tmp_path: Path, devices: tuple[int, int]) -> None:
    """Device hours were all seconds so far times the devices of now. Resumed on 8 devices instead of 1,
    10 hours became 80, and the rest was not worth its compute; on 1 instead of 8, compute fell."""
    recipe = recipe_of(axis="device-hours", min_gain=0.02)
    run, totals, spent = a_run(tmp_path / "run", recipe, 0), dict[str, float](), 0.0
    for step in range(1, 2001):
        now = devices[step > 1000]
        spent += now / 3600
        sums = {"tokens/context": 0.0, "tokens/sampled": 1.0, "step_time": 1.0}
        totals = add_totals(totals, sums, Terms(devices=now, price_per_device_hour=2.0))
        if step % 100 == 0:
            score = float(SCALERL.score(5000 * spent))
            run.eval.append(eval_row(step, score, spent=spent_in_steps(step, totals)))
            assert totals["total/money/USD"] == pytest.approx(2 * spent)
    row = compute_row(recipe, run, 2000)
    assert (row["gate"], row["n"], row["compute"]) == ("identified", 20, pytest.approx(9000 / 3600))
    assert row["A"][0] < SCALERL.A < row["A"][2] and row["C_mid"][1] == pytest.approx(2542 / 5000, rel=0.05)


def test_a_score_that_is_missing_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One evaluation whose pass@1 was null made the series unreadable at every later look: no forecast, no
    stop, and not a word. It is left out, which every later line says."""
    recipe, heard = recipe_of(), Heard()
    run = a_run(tmp_path / "run", recipe, 1500)
    run.eval.append(eval_row(1600, 0.5, **{"pass@1": None}))
    should_stop = new_forecaster(recipe, run, [heard])
    assert should_stop is not None and should_stop(1600) is False
    (row,) = run.forecast.rows()
    whole = compute_row(recipe, a_run(tmp_path / "whole", recipe, 1500), 1500)
    reported = "1 evaluation without a score left out"
    assert row["reasons"] == [*whole["reasons"], reported] and row["A"] == whole["A"]
    assert caplog.messages == [f"step 1600: forecast: {whole['sentence']}; {reported}"]


def test_why_nothing_can_be_foretold_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume that changed the held-out set had the same end: silence, with the last good forecast still
    in the report."""
    recipe, heard = recipe_of(stop=True), Heard()
    run = a_run(tmp_path / "run", recipe, 1500)
    should_stop = new_forecaster(recipe, run, [heard])
    assert should_stop is not None and not should_stop(1500)
    for step in (1600, 1700):
        run.eval.append(eval_row(step, 0.5, held_out="ffffffffffff"))
        assert should_stop(step) is False
    assert heard.metrics[-1] == (1700, {"forecast/identified": 0.0})
    assert len(caplog.messages) == 2
    assert "scored on another eval set at step 1600 than before" in caplog.messages[1]
    again = new_forecaster(recipe, run, [heard])
    assert again is not None and not again(1700) and len(caplog.messages) == 2
    reasons = {row["step"]: row["sentence"] for row in run.forecast.rows()}
    assert reasons[1500].startswith("A 0.6")
    assert reasons[1700].startswith("none yet: run run was scored on another")


@given(st.integers(1, 4000), st.floats(1e-3, 1e20))
def test_at_the_last_step_the_budget_is_what_is_spent(steps: int, flops: float) -> None:
    """Divided by the steps and multiplied by them again, the budget was one rounding above what was spent in
    one run of twenty: its last line was "not worth the rest" of nothing."""
    with TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.recipe.write_text("")
        for step in dict.fromkeys((0, steps)):
            used = {"flops": flops if step else 0.0, "steps": float(step)}
            run.eval.append(eval_row(step, 0.5, spent=used))
        row = compute_row(Recipe.parse({"trainer": {"steps": steps}}), run, steps)
    assert row["compute"] == row["budget"] == flops


@pytest.mark.slow
def test_a_stop_is_asked_for_where_it_was_wanted_and_heard_again_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are those of an uninterrupted run, wherever the run was killed and however often it looks."""
    recipe, heard = recipe_of(stop=True, min_gain=0.02), Heard()
    run = a_run(tmp_path / "run", recipe, 2900)
    should_stop = new_forecaster(recipe, run, [heard])
    assert should_stop is not None and not should_stop(2900)  # two have to say so
    add_scores(run, [3000])
    assert should_stop(3000)
    assert should_stop(3000) and new_forecaster(recipe, run, [])(3000)  # pyright: ignore[reportOptionalCall]
    assert len(list(run.forecast.rows())) == len(heard.metrics) == len(caplog.messages) == 2
    assert caplog.messages[0].endswith("not worth the rest; goes on, for the next look has to say so too")
    last = caplog.messages[1]
    assert last.startswith("step 3000: forecast: A 0.6") and last.endswith("the rest")
    patient = new_forecaster(recipe_of(min_gain=0.02), run, [heard])
    assert patient is not None and not patient(3000)
    wanting = new_forecaster(recipe_of(stop=True, min_gain=1e-6), run, [heard])
    assert wanting is not None and not wanting(3000)  # other terms: it looks anew
    assert len(list(run.forecast.rows())) == 3


@pytest.mark.slow
def test_a_plateau_early_in_the_run_does_not_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A curve of two phases, 0.2 to 0.4 and later to 0.7, was ended at evaluation 12 of 40 with "A 0.403
    [0.394, 0.412]": one look on a plateau was enough, however little had been spent."""
    recipe, heard = recipe_of(stop=True, min_gain=0.02), Heard()
    run = RunFolder(tmp_path)
    run.recipe.write_text("")
    first, later = (Sigmoid(R0=0.0, A=A, B=B, C_mid=C) for A, B, C in ((0.2, 3.0, 2e11), (0.3, 8.0, 2e12)))
    noise = 0.003 * np.random.default_rng(0).standard_normal(41)
    should_stop = new_forecaster(recipe, run, [heard])
    assert should_stop is not None
    for step in range(0, 1200, 100):
        gained = first.score(1e9 * step) + later.score(1e9 * step) if step else 0.0
        run.eval.append(eval_row(step, float(0.2 + gained + noise[step // 100])))
        assert not (step >= 500 and should_stop(step))
    assert [row["verdict"] for row in run.forecast.rows()][-2:] == ["stop", "stop"]  # it looked like the end
    assert caplog.messages[-1].endswith("; goes on, for less than 30% of the budget is spent")


def test_a_score_that_does_not_say_what_had_been_spent_is_named(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", recipe_of(), 0)
    run.eval.append({name: value for name, value in eval_row(100, 0.5).items() if name != "spent"})
    row = compute_row(recipe_of(), run, 100)
    assert row["sentence"] == "none yet: the score at step 100 does not say what had been spent in flops"
