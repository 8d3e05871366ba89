"""The loop on real parts, a tiny mixture of experts; and what no change of the house may change."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import net
import numpy as np
import pytest
import torch
from small_loop import Stream
from small_loop import plan as plan_of
from worlds import NATIVE, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel
from ostinato.model.lora import init_adapters
from ostinato.model.native import BuildError, load_kernels
from ostinato.model.shapes import AdapterSpec
from ostinato.pipeline.evaluate import Evaluation
from ostinato.pipeline.loop import Finish, Loop, LoopState
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import RunFolder
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, Prompt, Reward, Sampling

pytestmark = pytest.mark.slow

CONFIG = tiny_moe(
    vocab_size=64, head_dim=8, moe_intermediate_size=32, tie_word_embeddings=False, initializer_range=0.3
)
ADAPTER = AdapterSpec(rank=4, alpha=8)
# top-p, so that supports go wherever completions go
SAMPLING = Sampling(max_tokens=6, stop_tokens=(0,), top_p=0.9)


class TwoTurns:
    """Asks, hears an answer, and, if that ended by itself, asks once more: groups of ragged lengths."""

    def __init__(self, prompt: Prompt) -> None:
        self._start = [1, 2, 3 + int(prompt.uid[1:]) % 61]
        self._more = True

    def start(self) -> np.ndarray:
        return np.array(self._start, np.int32)

    async def step(self, completion: Completion) -> np.ndarray | None:
        self._more, more = False, self._more
        return np.array([5, 5], np.int32) if more else None


class Even:
    """The share of even tokens."""

    async def grade(self, group: Group) -> list[Reward]:
        output = [np.concatenate([turn.completion.tokens for turn in t.turns]) for t in group.trajectories]
        return [Reward(value=float((tokens % 2 == 0).mean())) for tokens in output]


def build(path: Path, *, steps: int, **plan: Any) -> Loop:
    """A run in ``path``; ``plan`` is more of the plan."""
    decoder = Decoder(parse_config(CONFIG)).init_weights(seed=0)
    adapters = init_adapters(decoder.config, ADAPTER, 0)
    path.mkdir(exist_ok=True)
    engine = LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=8)
    sizes: dict[str, Any] = {"prompts_per_step": 4, "group_size": 4, "answer_tokens": 12, **plan}
    held_out = [Prompt(uid=f"e{i}", text=str(i)) for i in range(8)]
    return Loop(
        plan=plan_of(
            steps=steps,
            tokens_per_microbatch=128,
            checkpoint_every=2,
            trajectories_every=2,
            flops=FlopModel.of(decoder.config, ADAPTER),
            **sizes,
        ),
        stage=RolloutContext(engine=engine, env=TwoTurns, grader=Even(), sampling=SAMPLING, context_limit=64),
        tasks=Stream(),
        trainer=PolicyTrainer(decoder, adapters, algorithm("grpo"), settings=TrainerSection(lr=5e-2)),
        algorithm=algorithm("grpo"),
        folder=RunFolder(path),
        state=LoopState(),
        evaluations=[Evaluation(split="eval", prompts=held_out, sampling=SAMPLING)],
        save=lambda state: state.step,
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_it_learns_and_every_part_reports(tmp_path: Path) -> None:
    loop = build(tmp_path, steps=12)
    assert asyncio.run(loop.run()).why is Finish.DONE
    rows = list(loop.folder.metrics.rows())
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert rows[0]["turns/mean"] > 1
    for row in rows:
        assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/wasted"]
        # routes were replayed through both turns, and the tokens that top-p had kept
        assert row["sampling/sampling_logp_difference/max"] < 1e-4 and row["sampling/support_mean"] < 64
        assert row["routing/bytes_per_token"] > row["routing/packed_bytes_per_token"] > 0
        assert row["rollout/failed"] == row["rollout/no_verdict"] == row["refused_step"] == 0
        assert {"step_time", "num_tokens", "grad_norm", "entropy", "frac_reward_zero_std"} <= row.keys()
    evals = list(loop.folder.eval.rows())
    assert [row["step"] for row in evals] == [0, 12] and evals[1]["reward"] > evals[0]["reward"]
    shown = next(loop.folder.trajectories.rows())
    assert shown["turns"][0]["experts"] is not None and shown["reward"] is not None


def deliberate(engine: LocalEngine) -> type[TwoTurns]:
    """Episodes that ask again under the next policy, so that answers are of two policies however long a step
    takes; after a second in any case, for that policy may wait for them."""

    class Deliberate(TwoTurns):
        async def step(self, completion: Completion) -> np.ndarray | None:
            for _ in range(100):
                if engine.served[0] > completion.versions[-1]:
                    break
                await asyncio.sleep(0.01)
            return await super().step(completion)

    return Deliberate


def test_with_overlap_it_learns_from_tokens_of_several_policies(tmp_path: Path) -> None:
    """What began under one policy goes on under the next, and no token is too old."""
    loop = build(tmp_path, steps=24, overlap=True, staleness=2)
    assert isinstance(loop.stage.engine, LocalEngine)
    loop.stage = replace(loop.stage, env=deliberate(loop.stage.engine))
    assert asyncio.run(loop.run()).why is Finish.DONE
    rows = list(loop.folder.metrics.rows())
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.1
    learned = [row for row in rows if not row["empty_step"]]
    assert max(row["staleness/max"] for row in learned) == 2
    assert 1 < np.mean([row["staleness/mean"] for row in learned]) < 2
    policies = [
        {version for turn in shown["turns"] for version in turn["versions"]}
        for shown in loop.folder.trajectories.rows()
    ]
    assert max(map(len, policies)) > 1


# ---- what no change of the house may change: tests/net.py, against what is kept of this kind of machine


@pytest.mark.parametrize(
    "wanted", [net.EVERYDAY, pytest.param((), marks=pytest.mark.lab)], ids=["few", "all"]
)
def test_adapters_forecasts_and_the_plan_are_as_recorded(wanted: tuple[str, ...]) -> None:
    """A killed run that is resumed has the same adapter: test_faults, test_sharded_runs and test_ray."""
    before = net.kept()
    assert before is not None
    same_machine = before["adapters"] is not None
    if same_machine:
        try:
            load_kernels()
        except BuildError as error:
            pytest.skip(f"bitwise only with the native kernels: {error}")
        pytest.importorskip("ray", reason="one of the runs needs Ray")
    before["adapters"] = before["adapters"] or {}  # another kind of machine: its bytes are its own
    names = [name for part in ("adapters", "forecasts") for name in before[part]]
    wanted = tuple(name for name in names if not wanted or name in wanted)
    for part in ("adapters", "forecasts"):
        before[part] = {name: value for name, value in before[part].items() if name in wanted}
    wrong = net.differences(before, json.loads(json.dumps(net.results(wanted, say=lambda line: None))))
    assert not wrong, "\n".join(wrong)
