"""What no change of the house may change: tests/net.py, against what is kept of this kind of machine."""

from __future__ import annotations

import importlib.util
import json

import net
import pytest

from ostinato.model.native import BuildError, load

pytestmark = pytest.mark.slow


def test_adapters_forecasts_and_the_plan_are_as_recorded() -> None:
    try:
        load()
    except BuildError as error:
        pytest.skip(f"bitwise only with the native kernels: {error}")
    if importlib.util.find_spec("ray") is None:
        pytest.skip("one of the runs needs Ray")
    before = net.kept()
    assert before is not None
    found = net.results(lambda line: None)
    same_start = found["adapters"]["killed and resumed"] == found["adapters"]["quickstart, seed 0"]
    assert same_start, "a killed and resumed run has another adapter than an undisturbed one"
    if before["adapters"] is None:  # another kind of machine: its bytes are its own
        before, found = ({**side, "adapters": {}} for side in (before, found))
    wrong = net.differences(json.loads(json.dumps(before)), json.loads(json.dumps(found)))
    assert not wrong, "\n".join(wrong)
