"""Agents' episodes on the packaged model, from the engine to the trainer's rows: nothing that is known runs
again, and the routes that are trained on are those that the trainer chooses itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from worlds import KERNELS, NATIVE

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import alignment
from ostinato.engine.local import LocalEngine
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters
from ostinato.model.named import model_folder
from ostinato.model.native import Kernels
from ostinato.model.packed import PackedAttention
from ostinato.rollout.convert import samples
from ostinato.rollout.play import Ask, Stage, play
from ostinato.types import Completion, Group, Prompt, Reward, Sample, Sampling

pytestmark = pytest.mark.slow

TURNS, SIBLINGS = 8, 3
# a sixth of the vocabulary ends an answer, so that they have all lengths and none is cut
SAMPLING = Sampling(max_tokens=80, min_tokens=2, stop_tokens=tuple(range(0, 295, 6)))
ASKS = [
    Ask(prompt=Prompt(uid=f"p{i}", text=""), seed=(0, 1, i), group_size=SIBLINGS, step=1) for i in range(2)
]


@cache
def model(dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(model_folder("asset:seed-moe"), dtype=dtype)


class Agent:
    """Eight turns of a text that does not depend on what is said. ``called`` hears of each turn."""

    def __init__(self, prompt: Prompt, called: Callable[[], None] = lambda: None) -> None:
        self._rng, self._turns, self._called = np.random.default_rng(int(prompt.uid[1:])), 1, called

    def start(self) -> np.ndarray:
        return self._rng.integers(3, 290, 37).astype(np.int32)

    async def step(self, completion: Completion) -> np.ndarray | None:
        self._called()
        self._turns += 1
        if self._turns > TURNS:
            return None
        return self._rng.integers(3, 290, int(self._rng.integers(1, 30))).astype(np.int32)


class Parity:
    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=float(k % 2)) for k in range(len(group.trajectories))]


def played(engine: LocalEngine, env: Callable[[Prompt], Agent] = Agent) -> list[Group]:
    stage = Stage(engine=engine, env=env, grader=Parity(), sampling=SAMPLING, context_limit=900)
    groups = [item.group for item in asyncio.run(play(stage, ASKS, lambda index, item: None))]
    engine._scheduler.cache.check([])
    assert all(len(one.turns) == TURNS for group in groups for one in group.trajectories)
    return groups


def engine(kernels: Kernels | None = NATIVE, dtype: torch.dtype = torch.float32) -> LocalEngine:
    return LocalEngine(model(dtype), kernels=kernels, kv_memory_mb=32, context_limit=900)


def made(groups: Sequence[Group]) -> list[Sample]:
    return [one for i, group in enumerate(groups) for one in samples(group, i, np.ones(SIBLINGS))]


def chosen(tokens: np.ndarray, adapters: Adapters | None = None) -> np.ndarray:
    """By the model itself, for all tokens but the last."""
    row = torch.from_numpy(tokens[:-1]).long()
    with torch.inference_mode():
        _, routing = model()(row, torch.arange(len(row)), CausalAttention(), adapters=adapters)
    assert routing is not None
    return routing.numpy()


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_trainers_rows_choose_what_was_recorded(kernels: Kernels | None) -> None:
    ours = engine(kernels)
    groups = played(ours)
    sequences = made(groups)
    for group in groups:
        for trajectory in group.trajectories:
            known = 0
            for turn in trajectory.turns[1:]:
                before = trajectory.turns[trajectory.turns.index(turn) - 1]
                known += len(before.context) + len(before.completion.tokens)
                assert turn.completion.cached_tokens == known - 1
    # every row once: of a group's prompt, all but the last token are run by the first sibling alone
    shared = sum((SIBLINGS - 1) * (len(group.trajectories[0].turns[0].context) - 1) for group in groups)
    rows = sum(len(sample.tokens) - 1 for sample in sequences) - shared
    assert ours.counters.prefilled + ours.counters.decoded == rows
    weights = aggregation_weights(sequences, Aggregation.TOKEN)
    for part in pack(sequences, weights, tokens_per_microbatch=1024).microbatches:
        with torch.inference_mode():
            _, routing = model()(
                torch.from_numpy(part.tokens).long(),
                torch.from_numpy(part.positions).long(),
                PackedAttention(part.segments),
            )
        assert routing is not None and part.experts is not None and part.experts.dtype == np.int8
        np.testing.assert_array_equal(part.experts, routing.numpy())


def test_in_bf16_the_trainer_chooses_nearly_the_same() -> None:
    """Flips of near-ties only: what the gate of the trainer lets pass."""
    for sample in made(played(engine(dtype=torch.bfloat16))):
        assert sample.experts is not None
        assert alignment([chosen(sample.tokens)], [sample.experts[:-1]]).min() > 0.95
