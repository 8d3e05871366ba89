"""One run of our GRPO step, or of supervised training, as a contender of ``bench train``: the pieces of the
loop, without its bookkeeping.

argv: JSON with folder, dtype, prompts (texts), group, new_tokens, steps, tokens_per_microbatch, threads.
Prints one JSON object: {"ready", "step_s": [...], "split": {rollout, train, publish}, "peak_mb"}.
With rows (a JSON file of input_ids and completion_mask) in place of prompts they are learned, 8 a step:
{"ready", "step_s", "step_tokens", "tokens", "loss", "peak_mb"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.settings import native_kernels
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.pipeline.credit import assign_credit
from ostinato.protocols import Engine
from ostinato.render import Renderer
from ostinato.train.accumulate import Accumulator, Adam
from ostinato.train.supervised import make_row, supervised
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Group, Prompt, Request, Reward, Sampling, Trajectory, Turn


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    answers.write(json.dumps(run(task) if "prompts" in task else supervise(task)) + "\n")


def supervise(task: Mapping[str, Any]) -> dict[str, Any]:
    kernels = native_kernels()
    dtype = getattr(torch, task["dtype"])
    decoder = load_model(task["folder"], dtype=dtype, device="cpu", fp32_head=True)
    learner = Accumulator(
        decoder,
        init_adapters(decoder.config, AdapterSpec(rank=16, alpha=32), seed=0),
        ops=kernels.training if kernels else TORCH_OPS,
        tokens_per_microbatch=task["tokens_per_microbatch"],
    )
    given = json.loads(Path(task["rows"]).read_text())
    ids = [np.array(row["input_ids"]) for row in given]
    rows = [make_row(one, np.array(row["completion_mask"]) == 1) for one, row in zip(ids, given, strict=True)]
    step_s, step_tokens, losses = [], [], []
    for first in range(0, len(rows), 8):
        start = time.perf_counter()
        sums = supervised(learner, rows[first : first + 8], learn=True)
        learner.optim_step(Adam(lr=1e-5, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=1.0))
        step_s.append(time.perf_counter() - start)
        step_tokens.append(sum(map(len, ids[first : first + 8])))
        losses.append(sums["loss"] / sums["count"])
    found = {"step_s": step_s, "step_tokens": step_tokens, "tokens": sum(step_tokens)}
    return {**_label(kernels), **found, "loss": statistics.fmean(losses)}


def _label(kernels: object) -> dict[str, Any]:
    label = f"ostinato, {'native' if kernels else 'torch'} kernels, {torch.get_num_threads()} threads"
    return {"ready": label, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    kernels = native_kernels()
    dtype = getattr(torch, task["dtype"])
    renderer, spec = Renderer(Path(task["folder"])), AdapterSpec(rank=16, alpha=32)
    native = task["backend"] == "native"
    decoder, adapters, engine = (
        _native(task, dtype, spec, renderer, kernels)
        if native
        else _transformers(task, dtype, spec, renderer, kernels)
    )
    grpo = algorithm("grpo", drop_zero_variance=False)
    trainer = PolicyTrainer(
        decoder,
        adapters,
        grpo,
        settings=TrainerSection(lr=1e-5),
        ops=kernels.training if kernels and native else TORCH_OPS,
    )
    engine.publish(trainer.adapters(), 0)
    prompts = [Prompt(uid=str(i), text=text) for i, text in enumerate(task["prompts"])]
    step_s: list[float] = []
    split = {"rollout": 0.0, "train": 0.0, "publish": 0.0}
    for step in range(task["steps"]):
        start = time.perf_counter()
        groups = asyncio.run(rollouts(engine, renderer, prompts, task, step))
        sampled = time.perf_counter()
        credit = assign_credit(groups, grpo, min_verdicts=2, answer_tokens=task["new_tokens"])
        batch = pack(
            credit.samples, credit.weights, tokens_per_microbatch=task["tokens_per_microbatch"], version=step
        )
        trainer.step(batch)
        trained = time.perf_counter()
        engine.publish(trainer.adapters(), step + 1)
        end = time.perf_counter()
        step_s.append(end - start)
        if step:  # the first warms up
            split["rollout"] += sampled - start
            split["train"] += trained - sampled
            split["publish"] += end - trained
    shares = {name: seconds / max(1, task["steps"] - 1) for name, seconds in split.items()}
    return {**_label(kernels), "step_s": step_s, "split": shares}


def _native(
    task: Mapping[str, Any],
    dtype: torch.dtype,
    spec: AdapterSpec,
    renderer: Renderer,
    kernels: Kernels | None,
) -> tuple[Any, Any, Engine]:
    decoder = load_model(task["folder"], dtype=dtype, device="cpu", fp32_head=True)
    engine = LocalEngine(decoder, kernels=kernels, decode=renderer.decode, kv_memory_mb=256)
    return decoder, init_adapters(decoder.config, spec, seed=0), engine


def _transformers(
    task: Mapping[str, Any],
    dtype: torch.dtype,
    spec: AdapterSpec,
    renderer: Renderer,
    kernels: Kernels | None,
) -> tuple[Any, Any, Engine]:
    from ostinato.hf.factors import init_sites
    from ostinato.hf.model import load_transformers
    from ostinato.hf.sampler import TransformersEngine

    model = load_transformers(Path(task["folder"]), dtype=dtype, device="cpu")
    engine = TransformersEngine(
        model, decode=renderer.decode, context_limit=model.config.max_positions, kernels=kernels
    )
    return model, init_sites(model.sites, spec, 0, model.device), engine


async def rollouts(
    engine: Engine, renderer: Renderer, prompts: Sequence[Prompt], task: Mapping[str, Any], step: int
) -> list[Group]:
    """Siblings of every prompt, ``new_tokens`` each, with the reward that the TRL script gives too."""
    sampling = Sampling(max_tokens=task["new_tokens"])
    contexts = [renderer.prompt(prompt) for prompt in prompts]
    requests = [
        Request(tokens=context, sampling=sampling, seed=(0, step, index, member))
        for index, context in enumerate(contexts)
        for member in range(task["group"])
    ]
    done: dict[int, Trajectory] = {}
    async for place, completion in engine.generate(requests):
        turn = Turn(context=contexts[place // task["group"]], completion=completion)
        reward = Reward(value=float(len(set(completion.text))))
        done[place] = Trajectory(
            turns=(turn,), stop=completion.stop, seed=requests[place].seed, reward=reward
        )
    group = task["group"]
    return [
        Group(prompt=prompt, trajectories=tuple(done[index * group + m] for m in range(group)), step=step)
        for index, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    main()
