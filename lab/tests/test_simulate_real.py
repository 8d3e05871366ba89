"""The simulator's counterpart: the loop and the pool, with samplers that sleep. Timings are a benchmark's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.simulate_real import played
from lab.simulate_run import fitted, recorded, token_seconds, train_seconds
from lab.simulator.events import Setup, simulate
from lab.simulator.policies import Policy
from lab.simulator.sampler import Cost
from lab.simulator.traces import Stream
from ostinato.observe.timeline import Span
from ostinato.run import RunFolder

pytestmark = pytest.mark.lab


def test_the_loop_plays_what_the_simulator_simulates(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = 12
    stream = Stream(
        lengths=rng.integers(1, 20, (groups, 4)),
        prompts=np.full(groups, 3),
        uids=[str(i % 4) for i in range(groups)],
        history={},
    )
    setup = Setup(
        workers=2,
        cost=Cost(base=(0.0, 0.002, 0.002, 0.003, 0.003)),
        prompts=2,
        steps=6,
        staleness=1,
        policy=Policy.LONGEST_FIRST,
        train_s=0.01,
        warmup=1,
    )
    real, simulated = played(setup, stream, tmp_path), simulate(setup, stream)
    assert len(real["step_s"]) == setup.last - setup.warmup
    assert real["staleness_max"] <= 1 and simulated.staleness_max <= 1
    assert set(real["utilisation"]) == {"sampler-0", "sampler-1", "trainer"}
    assert all(0 < share <= 1 for share in real["utilisation"].values())


def test_a_run_folder_is_simulated_with_its_own_seconds(tmp_path: Path) -> None:
    """What the fitted simulator takes from a run: its groups, the trainer's seconds, seconds per token."""
    rng = np.random.default_rng(1)
    stream = Stream(
        lengths=rng.integers(1, 20, (10, 4)), prompts=np.full(10, 3), uids=[str(i % 5) for i in range(10)]
    )
    cost = Cost(base=(0.0, 0.004, 0.005, 0.006, 0.007))
    setup = Setup(workers=2, cost=cost, prompts=2, steps=5, train_s=0.02, warmup=1)
    played(setup, stream, tmp_path)
    folder = RunFolder(tmp_path / "run")
    found = recorded(folder, 4)
    assert (found.lengths == stream.lengths).all() and found.uids == stream.uids
    assert (found.prompts == 3).all()
    spans = [Span.of(row) for row in folder.timeline.rows()]
    seconds = train_seconds(spans)
    assert len(seconds) == 5 and min(seconds) >= 0.02
    token_s = token_seconds(spans, found)
    flat = replace(setup, cost=Cost(base=(0.0, 1.0, 1.0, 1.0, 1.0)), trained_s=seconds, train_s=0.0)
    like, outcome = fitted(flat, found, token_s)
    assert outcome.token_s == pytest.approx(token_s, rel=0.05)
    assert like.cost.base[1] < 0.1
    with pytest.raises(ValueError, match=r"train with log\.trajectories_every = 1"):
        recorded(RunFolder.create(tmp_path / "other", ""), 4)
