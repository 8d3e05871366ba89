"""Curves over compute and tables of a ledger: what may not be told is not drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_ledger import a_step, killed_and_resumed, start

from ostinato.observe.ledger import Summary, summary
from ostinato.observe.report.facts import compute_text
from ostinato.observe.report.forecast import places
from ostinato.observe.report.ledger import tables

computes = st.lists(st.floats(1e-3, 1e22), min_size=1, max_size=30, unique=True).map(sorted)


@given(computes, st.floats(1e-3, 1e22))
def test_evaluations_are_places_and_stand_apart(compute: list[float], last: float) -> None:
    """Neighbours without a place between them would be joined by a line."""
    measured = np.array(compute)
    if len(measured) > 1 and np.min(measured[1:] / measured[:-1]) < 1 + 1e-9:
        return
    at = places(compute, last)
    assert np.all(np.diff(at) > 0) and np.isin(measured, at).all()
    assert at[-1] == pytest.approx(max(last, compute[-1]))
    assert np.all(np.diff(np.searchsorted(at, measured)) > 1)


@pytest.mark.parametrize(
    ("C", "text"),
    [
        (0.0, "0"),
        (0.125, "0.125"),
        (12.34567, "12.35"),
        (30_213.4, "30,210"),
        (4.0512e18, "4.051e18"),
        (1e21, "1e21"),
        (1e-5, "1e-5"),
        (float("inf"), "never"),
        (float("nan"), "-"),
    ],
)
def test_compute_as_text(C: float, text: str) -> None:
    assert compute_text(C) == text


# -- the ledger


def books(rows: list[dict[str, Any]]) -> dict[str, Summary]:
    return {"run": summary(rows)}


def shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, ...]]:
    found = tables(books(rows))
    return {
        (table.title, name.partition("\n")[0]): tuple(cells) for table in found for name, *cells in table.rows
    }


def test_the_tables_of_a_ledger_by_hand() -> None:
    found = shares(killed_and_resumed())
    assert found["Device time, pool local", "sample"] == ("44.0 s   27.5%",)  # of 1 x 48 + 4 x 28
    assert found["Device time, pool local", "lost"] == ("6.0 s    3.8%",)
    assert found["Device time, pool local", "all"] == ("2 min 40 s  100.0%",)
    assert found["Wall clock", "loading"] == ("12.0 s   15.8%",)
    assert found["FLOPs of training", "useful"] == ("8.1 k   49.1%",)
    assert found["FLOPs of training", "wasted: repeated"] == ("6 k   36.4%",)
    assert found["Tokens", "not trained: repeated"] == ("100   25.0%",)
    assert found["Compute", "restarts"] == ("1",) and found["Compute", "tokens"] == ("400",)
    assert found["Evaluation, in no compute", "FLOPs"] == ("400       -",)


def test_runs_stand_side_by_side_and_what_none_has_is_left_out() -> None:
    short = [start(1, 0.0, price=0.0), a_step(1, 1, 15.0)]
    both = {"long": summary(killed_and_resumed()), "short": summary(short)}
    made = {table.title: table for table in tables(both)}
    assert made["Tokens"].head == ["long", "short"]
    by_name = {name.partition("\n")[0]: cells for name, *cells in made["Compute"].rows}
    assert by_name["bill"] == ["0.12 USD", ""]  # the price of the second is not known
    assert tables({}) == []


def test_every_amount_has_its_currency() -> None:
    euros = [
        row | {"currency": "EUR"} if row["event"] == "start" else row for row in killed_and_resumed(2000.0)
    ]
    made = {table.title: table for table in tables({"a": summary(killed_and_resumed()), "b": summary(euros)})}
    by_name = {name.partition("\n")[0]: cells for name, *cells in made["Compute"].rows}
    assert by_name["money"] == ["0.1178 USD", "24.54 EUR"] and by_name["bill"] == ["0.12 USD", "26.76 EUR"]
