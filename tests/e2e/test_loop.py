"""The loop on real parts: a tiny random mixture-of-experts, the in-process engine, the trainer, checkpoints.

Run as a script it is the process that the tests kill: ``python test_loop.py FOLDER STEPS KILL_STEP``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import DRAFTS_PAY

from ostinato.algo.algorithms import algorithm
from ostinato.cli.build import new_drafting
from ostinato.cli.drafts import Memory, new_memory, save_history
from ostinato.config import DraftSection
from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.model.native import Kernels, load
from ostinato.model.native.build import BuildError
from ostinato.pipeline.evaluate import Evaluation
from ostinato.pipeline.loop import Finish, Loop, LoopState, Plan
from ostinato.rollout.play import Stage
from ostinato.run import RunFolder
from ostinato.train.checkpoint import Checkpoint, load_checkpoint, oldest_step, save_checkpoint
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, Prompt, Reward, Sampling

pytestmark = pytest.mark.slow

# this file is also a script: its processes find the package, and what tests share
PYTHONPATH = os.pathsep.join(str(Path(__file__).parents[up]) for up in (2, 1))

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
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
    """The share of even tokens. At ``kill_step``, with half of the groups judged, the process dies."""

    def __init__(self, kill_step: int = -1) -> None:
        self._kill_step, self._num_judged = kill_step, 0

    async def grade(self, group: Group) -> list[Reward]:
        if group.step == self._kill_step:
            await asyncio.sleep(0)
            self._num_judged += 1
            if self._num_judged == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        said = [np.concatenate([turn.completion.tokens for turn in t.turns]) for t in group.trajectories]
        return [Reward(value=float((tokens % 2 == 0).mean())) for tokens in said]


def kernels() -> Kernels | None:
    try:
        return load()
    except BuildError:
        return None


def remembered(folder: RunFolder) -> Memory | None:
    """The memory that a run in ``folder`` goes on with; None without a compiler."""
    saved = folder.history if folder.history.exists() else None
    return new_memory(DraftSection(memory_mb=4), saved, print)


def trained(folder: RunFolder) -> tuple[Decoder, PolicyTrainer, Checkpoint | None]:
    """Model and trainer as the newest checkpoint of ``folder`` left them; new ones without."""
    decoder = Decoder(parse_config(CONFIG)).init_weights(seed=0)
    adapters = init_adapters(decoder.config, ADAPTER, 0)
    trainer = PolicyTrainer(
        decoder, adapters, algorithm("grpo"), optimizer=OptimizerSettings(lr=5e-2), max_refused=2
    )
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    checkpoint = load_checkpoint(folder.checkpoints, identity=trainer.identity())
    if checkpoint is not None:
        trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    return decoder, trainer, checkpoint


def sampler(decoder: Decoder, memory: Memory | None) -> LocalEngine:
    """An engine that drafts from ``memory`` whenever it can, or does not draft."""
    if memory is None:
        return LocalEngine(decoder, kernels=kernels(), kv_memory_mb=8)
    return LocalEngine(
        decoder,
        kernels=kernels(),
        kv_memory_mb=8,
        drafter=memory.drafter,
        expect=memory.expect,
        cost=DRAFTS_PAY,
    )


def saving(folder: RunFolder, trainer: PolicyTrainer, memory: Memory | None) -> Callable[[LoopState], int]:
    """A checkpoint, and what drafts are made of."""

    def save(state: LoopState) -> int:
        made = Checkpoint(
            step=state.step,
            tensors=trainer.tensors(),
            state={"trainer": trainer.counters(), "loop": state.to_json()},
            identity=trainer.identity(),
        )
        save_checkpoint(folder.checkpoints, made)
        if memory is not None:
            save_history(memory.history, folder.history, print)
        return oldest_step(folder.checkpoints)

    return save


def build(
    path: Path,
    *,
    steps: int,
    kill_step: int = -1,
    epoch: int = 12,
    drafts: bool = True,
    **plan: Any,
) -> tuple[Loop, PolicyTrainer]:
    """A run in ``path``, resumed from the checkpoint that is there; ``plan`` is more of the plan."""
    folder = RunFolder(path)
    decoder, trainer, checkpoint = trained(folder)
    memory = remembered(folder) if drafts else None
    engine = sampler(decoder, memory)

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
        stage=Stage(
            engine=engine,
            env=TwoTurns,
            grader=Even(kill_step),
            sampling=SAMPLING,
            context_limit=64,
        ),
        tasks=Stream(epoch),
        trainer=trainer,
        algorithm=algorithm("grpo"),
        folder=folder,
        state=LoopState(**checkpoint.state["loop"]) if checkpoint else LoopState(),
        evaluations=[
            Evaluation(
                split="eval", prompts=[Prompt(uid=f"e{i}", text=str(i)) for i in range(8)], sampling=SAMPLING
            )
        ],
        drafting=new_drafting(memory, engine) if memory else None,
        save=saving(folder, trainer, memory),
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


def test_siblings_share_their_prompt(tmp_path: Path) -> None:
    """3 prompt tokens, 4 siblings: the first computes them, the others find what whole blocks allow and redo
    at least the last one; a second turn computes its reply and the token before it, not the history."""
    loop, _ = build(tmp_path, steps=1)
    asyncio.run(loop.run())
    (row,) = loop.folder.metrics.rows()
    assert row["tokens/prefilled"] < row["tokens/context"] + 16


def test_drafts_change_no_byte_of_a_run(tmp_path: Path) -> None:
    """Two epochs and a half of drafts from history and siblings against plain decoding: the same parameters,
    optimizer moments and metrics."""
    if kernels() is None:
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


def test_overlap_without_staleness_is_the_synchronous_loop(tmp_path: Path) -> None:
    """In a thread, with the engine in the event loop, and published to in flight: the same bytes."""
    (plain, trainer), (overlap, again) = (
        build(tmp_path / name, steps=6, overlap=name == "overlap") for name in ("plain", "overlap")
    )
    for loop in (plain, overlap):
        asyncio.run(loop.run())
    assert digest(again) == digest(trainer)
    rows = [list(loop.folder.metrics.rows()) for loop in (plain, overlap)]
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


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


@pytest.mark.parametrize("kill_step", [4, 7])
def test_kill_9_and_resume_is_bitwise(tmp_path: Path, kill_step: int) -> None:
    """Eight steps at once, against eight with a kill -9 among the rollouts of one of them: the same bytes in
    every parameter and optimizer moment, the same logs, and no finished group sampled twice. The groups that
    are played again have other company than before, so this needs kernels that work row by row."""
    if kernels() is None:
        pytest.skip("no compiler: torch's kernels round a row differently in a batch of another size")
    whole, trainer = build(tmp_path / "whole", steps=8)
    asyncio.run(whole.run())

    torn = tmp_path / "torn"
    command = [sys.executable, __file__, str(torn), "8", str(kill_step)]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, capture_output=True, timeout=400, env=environment)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()

    resumed, again = build(torn, steps=8)
    covered = (kill_step - 1) // 2 * 2
    assert resumed.state.step == covered
    asyncio.run(resumed.run())
    assert digest(again) == digest(trainer)
    logs = [[steady(row) for row in loop.folder.metrics.rows()] for loop in (whole, resumed)]
    assert logs[0] == logs[1]
    spooled = {row["step"]: row["rollout/from_spool"] for row in resumed.folder.metrics.rows()}
    assert spooled[kill_step] == 2
    assert all(spooled[step] == 4 for step in range(covered + 1, kill_step))
    assert sum(row["step"] == 8 for row in resumed.folder.eval.rows()) == 1


def test_sigterm_saves_and_the_process_ends_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), "100000", "-1"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 240
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0 and b"terminated" in output
    loop, _ = build(tmp_path, steps=100000)
    assert loop.state.step == max(row["step"] for row in loop.folder.metrics.rows())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run, _ = build(Path(sys.argv[1]), steps=int(sys.argv[2]), kill_step=int(sys.argv[3]))
    print(asyncio.run(run.run()).why)
