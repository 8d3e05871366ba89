"""The loop on real parts: a tiny random mixture-of-experts, the in-process engine, the trainer, history."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import DRAFTS_PAY, NATIVE, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.config import DraftSection
from ostinato.engine.local import LocalEngine
from ostinato.launch.drafts import Memory, new_memory, save_history
from ostinato.launch.loop import new_drafting
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.pipeline.evaluate import Evaluation
from ostinato.pipeline.loop import Finish, Loop, LoopState, Plan
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import RunFolder
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, Prompt, Reward, Sampling

pytestmark = pytest.mark.slow


CONFIG = tiny_moe(
    vocab_size=64, head_dim=8, moe_intermediate_size=32, tie_word_embeddings=False, initializer_range=0.3
)
ADAPTER = AdapterSpec(rank=4, alpha=8)
# top-p, so that supports go wherever completions go: through drafts, kills and the spool
SAMPLING = Sampling(max_tokens=6, stop_tokens=(0,), top_p=0.9)


class Stream:
    """``epoch`` prompts, again and again."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._epoch

    def prompt(self, index: int) -> Prompt:
        return Prompt(uid=str(index % self._epoch), text=str(index % self._epoch))


class TwoTurns:
    """Asks, hears an answer, and, if that ended by itself, asks once more: groups of ragged lengths."""

    def __init__(self, prompt: Prompt) -> None:
        self._start = [1, 2, 3 + int(prompt.text or 0) % 61]
        self._more = True

    def start(self) -> np.ndarray:
        return np.array(self._start, np.int32)

    async def step(self, completion: Completion) -> np.ndarray | None:
        self._more, more = False, self._more
        return np.array([5, 5], np.int32) if more else None


class Even:
    """The share of even tokens."""

    async def grade(self, group: Group) -> list[Reward]:
        said = [np.concatenate([turn.completion.tokens for turn in t.turns]) for t in group.trajectories]
        return [Reward(value=float((tokens % 2 == 0).mean())) for tokens in said]


def trained() -> tuple[Decoder, PolicyTrainer]:
    decoder = Decoder(parse_config(CONFIG)).init_weights(seed=0)
    adapters = init_adapters(decoder.config, ADAPTER, 0)
    trainer = PolicyTrainer(decoder, adapters, algorithm("grpo"), optimizer=OptimizerSettings(lr=5e-2))
    return decoder, trainer


def sampler(decoder: Decoder, memory: Memory | None) -> LocalEngine:
    """An engine that drafts from ``memory`` whenever it can, or does not draft."""
    if memory is None:
        return LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=8)
    return LocalEngine(
        decoder,
        kernels=NATIVE,
        kv_memory_mb=8,
        drafter=memory.drafter,
        expect=memory.expect,
        cost=DRAFTS_PAY,
    )


def build(
    path: Path, *, steps: int, epoch: int = 12, drafts: bool = True, **plan: Any
) -> tuple[Loop, PolicyTrainer]:
    """A run in ``path``; ``plan`` is more of the plan."""
    folder, (decoder, trainer) = RunFolder(path), trained()
    folder.path.mkdir(exist_ok=True)
    memory = new_memory(DraftSection(memory_mb=4), None) if drafts else None
    engine = sampler(decoder, memory)

    def save(state: LoopState) -> int:
        if memory is not None:
            save_history(memory.history, folder.history)
        return state.step

    loop = Loop(
        plan=Plan(
            steps=steps,
            prompts_per_step=4,
            group_size=4,
            answer_tokens=12,
            tokens_per_microbatch=128,
            checkpoint_every=2,
            trajectories_every=2,
            flops=FlopModel.of(decoder.config, ADAPTER),
            **plan,
        ),
        stage=RolloutContext(
            engine=engine,
            env=TwoTurns,
            grader=Even(),
            sampling=SAMPLING,
            context_limit=64,
        ),
        tasks=Stream(epoch),
        trainer=trainer,
        algorithm=algorithm("grpo"),
        folder=folder,
        state=LoopState(),
        evaluations=[
            Evaluation(
                split="eval", prompts=[Prompt(uid=f"e{i}", text=str(i)) for i in range(8)], sampling=SAMPLING
            )
        ],
        drafting=new_drafting(memory, engine) if memory else None,
        save=save,
    )
    return loop, trainer


def digest(trainer: PolicyTrainer) -> str:
    """Of every byte of parameters and optimizer."""
    tensors = sorted(trainer.tensors().items())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in tensors)).hexdigest()


def steady(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what depends on the clock, on which other groups were in the prefix tree, or on drafts."""
    loose = ("time", "seconds", "per_s", "from_spool", "prefilled", "flops", "draft", "accepted")
    exact = ("draft/history_tokens", "draft/reuse", "flops/compute", "total/compute_flops")
    return {
        name: value for name, value in row.items() if name in exact or not any(word in name for word in loose)
    }


def unaided(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without anything about drafts."""
    return {name: value for name, value in steady(row).items() if not name.startswith("draft/")}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_it_learns_and_every_part_reports(tmp_path: Path) -> None:
    loop, _ = build(tmp_path, steps=12, epoch=1000)
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


def test_drafts_change_no_byte_of_a_run(tmp_path: Path) -> None:
    """Two epochs and a half of drafts from history and siblings against plain decoding: the same parameters,
    optimizer moments and metrics."""
    if NATIVE is None:
        pytest.skip("no compiler: torch's kernels round a row differently in a batch of another size")
    (plain, trainer), (drafting, again) = (
        build(tmp_path / name, steps=8, drafts=drafts)
        for name, drafts in (("plain", False), ("drafting", True))
    )
    for loop in (plain, drafting):
        asyncio.run(loop.run())
    assert digest(again) == digest(trainer)
    logs = [[unaided(row) for row in loop.folder.metrics.rows()] for loop in (plain, drafting)]
    assert logs[0] == logs[1]
    rows = list(drafting.folder.metrics.rows())
    assert all("draft/reuse" in row for row in rows[3:]) and "draft/reuse" not in rows[2]
    assert sum(row["tokens/accepted"] for row in rows) > 0
    assert drafting.folder.history.exists() and len(list(drafting.folder.drafts.rows())) == 8


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
    loop, _ = build(tmp_path, steps=24, epoch=1000, overlap=True, staleness=2)
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
