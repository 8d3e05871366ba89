"""The simulator's counterpart: the loop and the pool, with samplers that sleep. Timings are a benchmark's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ostinato.bench.simulate_real import played
from ostinato.pipeline.simulate import Setup, simulate
from ostinato.pipeline.simulate_sampler import Cost
from ostinato.pipeline.simulate_traces import Stream
from ostinato.rollout.schedule import Policy


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
