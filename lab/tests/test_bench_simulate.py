"""``ostinato bench simulate``: rows, bounds that hold, and recorded traces that can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate import (
    ARMS,
    DATA,
    RECORDED,
    Arm,
    Simulate,
    bound_s,
    work_s,
    world,
)
from lab.simulator.events import Mode, simulate
from lab.simulator.traces import Trace, read_cost


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_are_whole(name: str) -> None:
    path = DATA / f"simulator-{name}.json"
    trace = Trace.read(path)
    epochs, prompts, samples = trace.lengths.shape
    assert epochs >= 3 and samples == 16 and trace.prompts.shape == (prompts,)
    assert trace.lengths.min() >= 1
    cost = read_cost(path, 64)
    assert cost.slots == 64 and all(a <= b for a, b in zip(cost.base[1:], cost.base[2:], strict=False))
    assert Trace.read(path).to_json() == trace.to_json()


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(ARMS), st.integers(0, 2), st.integers(0, 9))
def test_nothing_is_faster_than_its_bound(arm: Arm, staleness: int, seed: int) -> None:
    """All the work, and for each round its longest answer within staleness + 1 steps."""
    plan = Simulate(counted=2, slots=8, seed=seed)
    setup, stream = world("quickstart", 2, staleness, plan)
    if arm.mode is Mode.ROUNDS and staleness == 0:
        return
    setup = replace(setup, policy=arm.policy, mode=arm.mode, oracle=arm.oracle)
    done = simulate(setup, stream)
    assert done.steps_s[-1] >= work_s(setup.cost, stream) / setup.workers
    if arm.mode is Mode.PIPELINE:
        assert (
            done.steps_s[-1] * (1 + staleness / setup.steps) >= setup.steps * bound_s(setup, stream) * 0.999
        )
