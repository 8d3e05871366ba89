"""One name for each axis of compute, on every side of the program."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer

from ostinato.axis import Axis
from ostinato.cli.scale_reading import Reading, axis_of
from ostinato.config import Recipe
from ostinato.every import Every
from ostinato.observe import ledger
from ostinato.observe.report.ledger import AXES


def test_device_hours_have_one_name_and_papers_another() -> None:
    """`scale ledger` told device-hours and a forecast asked for them, `scale fit --axis device-hours` refused
    them, and a recipe refused gpu-hours."""
    for name in ("device-hours", "gpu-hours"):
        assert axis_of(name) is Axis(name) is Axis.DEVICE_HOURS
        assert Every.parse(f"0.5 {name}", "eval.every") == Every(amount=0.5, unit=Axis.DEVICE_HOURS)
        assert Recipe.parse({"name": "x", "forecast": {"axis": name}}).forecast.axis is Axis.DEVICE_HOURS
    assert Axis.DEVICE_HOURS.unit == "device-hours" and Axis.FLOPS.unit == "FLOP"


def test_what_can_be_counted_is_one_list() -> None:
    assert set(ledger.AXES) == set(AXES) == set(Axis)
    assert "axis" in [field.name for field in fields(Reading)]


def test_what_is_no_axis_is_refused_with_all_that_are() -> None:
    said = "--axis is 'parsecs'; use one of device-hours, hours, flops, tokens, steps, money"
    with pytest.raises(ValueError, match=f"^{said}$"):
        Axis.parse("parsecs", "--axis")
    with pytest.raises(typer.BadParameter, match=said):
        axis_of("parsecs")
