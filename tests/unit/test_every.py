"""Amounts of compute as text, and how often they have been spent."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.apps.scaling.reading import Reading, parse_axis
from ostinato.config import Recipe
from ostinato.every import NEVER, UNITS, Axis, Every
from ostinato.observe import ledger
from ostinato.observe.costs import AXES


@pytest.mark.parametrize(
    ("value", "amount", "unit"),
    [
        (20, 20, Axis.STEPS),
        (0, 0, Axis.STEPS),
        ("20 steps", 20, Axis.STEPS),
        ("2e14 flops", 2e14, Axis.FLOPS),
        (" 1.5E+6   tokens ", 1.5e6, Axis.TOKENS),
        (".5 device-hours", 0.5, Axis.DEVICE_HOURS),
        ("0.5 hours", 0.5, Axis.HOURS),
    ],
)
def test_what_is_read(value: int | str, amount: float, unit: Axis) -> None:
    assert Every.parse(value, "eval.every") == Every(amount=amount, unit=unit)


@pytest.mark.parametrize(
    "text",
    [
        *("", "flops", "2e14", "2e14flops", "2e14 parsecs", "2e14 FLOPs", "1 2 flops"),
        *("0 flops", "-1 flops", "nan flops", "inf flops", "1e999 flops"),
        *("1_0 flops", "1.2.3 flops", ". flops"),
    ],
)
def test_what_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(
        ValueError, match=r'^eval\.every is .*; use a number of steps, or .* e\.g\. "2e14 flops"$'
    ):
        Every.parse(text, "eval.every")


@given(st.sampled_from(UNITS), st.floats(1e-3, 1e3), st.lists(st.floats(0, 1e4), max_size=8))
@settings(max_examples=50, deadline=None)
def test_times_grow_with_what_is_spent(unit: Axis, amount: float, sums: list[float]) -> None:
    every = Every(amount=amount, unit=unit)

    def times(value: float) -> int:
        keys = {Axis.HOURS: "seconds", Axis.DEVICE_HOURS: "device_hours"}
        return every.times({keys.get(unit, unit): value * 3600 if unit is Axis.HOURS else value})

    found = [times(value) for value in sorted(sums)]
    assert found == sorted(found)
    for value, count in zip(sorted(sums), found, strict=True):
        assert math.isclose(count, value / amount, abs_tol=1 + 1e-9 * count)
    assert every.times({}) == NEVER.times({"steps": 5.0}) == 0


# one name for each axis, on every side of the program


def test_device_hours_have_one_name_and_papers_another() -> None:
    """`scale ledger` reported device-hours and a forecast took them, `scale fit --axis device-hours` refused
    them, and a recipe refused gpu-hours."""
    for name in ("device-hours", "gpu-hours"):
        assert parse_axis(name) is Axis(name) is Axis.DEVICE_HOURS
        assert Every.parse(f"0.5 {name}", "eval.every") == Every(amount=0.5, unit=Axis.DEVICE_HOURS)
        assert Recipe.parse({"name": "x", "forecast": {"axis": name}}).forecast.axis is Axis.DEVICE_HOURS
    assert Axis.DEVICE_HOURS.unit == "device-hours" and Axis.FLOPS.unit == "FLOP"


def test_what_can_be_counted_is_one_list() -> None:
    assert set(ledger.AXES) == set(AXES) == set(Axis)
    assert "axis" in [field.name for field in fields(Reading)]


def test_what_is_no_axis_is_refused_with_all_that_are() -> None:
    output = "--axis is 'parsecs'; use one of device-hours, hours, flops, tokens, steps, money"
    with pytest.raises(ValueError, match=f"^{output}$"):
        Axis.parse("parsecs", "--axis")
    with pytest.raises(typer.BadParameter, match=output):
        parse_axis("parsecs")
