"""A run that is killed with -9 again and again: ``ostinato bench kills``, twenty times, is this at length."""

from __future__ import annotations

import pytest

from lab import kills as bench
from ostinato.model.native import BuildError, load

pytestmark = pytest.mark.slow


def test_killed_while_it_steps_and_while_it_loads_it_is_as_if_nothing_had_happened() -> None:
    """Kills after later steps ended with other bytes, and five before the first row left "0.0 s lost"."""
    try:
        load()
    except BuildError as error:
        pytest.skip(f"bitwise only with the native kernels: {error}")
    plan = bench.Kills(kills=2, late=1, after=1, steps=5, checkpoint_every=2)
    result = plan.measure(print)
    assert result["equal"], result["differs"]
    assert len(result["kills"]) == 2 and result["late"] >= 1
    assert all(row["counted_s"] > 0 for row in result["kills"]), result["kills"]
