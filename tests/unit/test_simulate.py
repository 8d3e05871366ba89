"""The simulator of pipelines: equal to its slow twin, to arithmetic by hand, and to the laws of the feed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.pipeline.simulate import Gate, Mode, Setup, simulate
from ostinato.pipeline.simulate_plain import PlainGate, simulate_plain
from ostinato.pipeline.simulate_sampler import Cost
from ostinato.pipeline.simulate_traces import H100_7B, Stream, log_normal, stability
from ostinato.rollout.schedule import Policy


def stream(lengths: np.ndarray, prompts: int | np.ndarray = 3) -> Stream:
    groups = len(lengths)
    return Stream(
        lengths=lengths, prompts=np.broadcast_to(prompts, (groups,)), uids=[str(i % 5) for i in range(groups)]
    )


def uneven(seed: int, slots: int) -> Cost:
    """Passes whose times are hardly ever equal by chance."""
    rng = np.random.default_rng(seed)
    return Cost(
        base=(0.0, *np.cumsum(rng.uniform(0.1, 1.0, slots)).tolist()),
        attended_s=float(rng.uniform(0, 0.02)),
        prefill_s=float(rng.uniform(0, 0.05)),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Setup, Stream]:
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    mode = draw(st.sampled_from(Mode))
    staleness = 1 if mode is Mode.ROUNDS else draw(st.integers(0, 3))
    steps = staleness + draw(st.integers(2, 5))
    prompts = draw(st.integers(1, 6))
    setup = Setup(
        workers=draw(st.integers(1, 4)),
        cost=uneven(seed, draw(st.integers(1, 9))),
        prompts=prompts,
        steps=steps,
        staleness=staleness,
        mode=mode,
        policy=draw(st.sampled_from(Policy)),
        oracle=draw(st.booleans()),
        train_s=float(rng.uniform(0, 30)),
        train_token_s=float(rng.uniform(0, 0.1)),
        publish_s=float(rng.uniform(0, 2)),
        grade_s=float(rng.uniform(0, 3)),
        graders=draw(st.integers(0, 2)),
        warmup=0,
    )
    lengths = np.ceil(rng.lognormal(2.0, 0.9, (steps * prompts, draw(st.integers(1, 4))))).astype(int)
    return setup, stream(lengths, rng.integers(1, 20, steps * prompts))


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_the_closed_form_is_what_single_passes_add_up_to(world: tuple[Setup, Stream]) -> None:
    fast, slow = simulate(*world), simulate_plain(*world)
    assert fast.trained == slow.trained
    assert fast.steps_s == pytest.approx(slow.steps_s, rel=1e-9)
    assert fast.staleness_mean == pytest.approx(slow.staleness_mean)
    assert fast.staleness_max == slow.staleness_max
    for name in ("bubble_share", "publish_share", "trainer_idle_share", "tokens_per_s", "batch_mean"):
        assert getattr(fast, name) == pytest.approx(getattr(slow, name), rel=1e-6, abs=1e-9)
