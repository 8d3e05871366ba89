"""One process of ``bench repeat``: the same short run again and again.

argv: JSON with folder, dtype, native, threads, prompts, group, new_tokens, steps. A task, whatever it holds,
is answered with {"sampled", "trained"}: digests of a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.contender import serve
from lab.train import PROMPTS
from lab.train_worker import rollouts
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.model.native import Kernels, load
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.pipeline.credit import assign
from ostinato.render import Renderer
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Prompt


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    kernels = load() if task["native"] else None
    decoder = load_model(task["folder"], dtype=getattr(torch, task["dtype"]), device="cpu", fp32_head=True)
    renderer = Renderer(Path(task["folder"]))
    serve(f"{torch.get_num_threads()} threads", lambda _: run(decoder, kernels, renderer, task))


def run(
    decoder: Decoder, kernels: Kernels | None, renderer: Renderer, task: Mapping[str, Any]
) -> dict[str, str]:
    """A run of its own: a new engine, adapter and optimizer on the same weights."""
    adapters = init_adapters(decoder.config, AdapterSpec(rank=16, alpha=32), seed=0)
    grpo = algorithm("grpo", drop_zero_variance=False)
    ops = kernels.training if kernels else TORCH_OPS
    trainer = PolicyTrainer(decoder, adapters, grpo, optimizer=OptimizerSettings(lr=1e-3), ops=ops)
    engine = LocalEngine(decoder, kernels=kernels, decode=renderer.decode, kv_memory_mb=64)
    engine.publish(trainer.adapters(), 0)
    prompts = [Prompt(uid=str(i), text=text) for i, text in enumerate(PROMPTS[: task["prompts"]])]
    sampled, trained = hashlib.sha256(), hashlib.sha256()
    for step in range(task["steps"]):
        groups = asyncio.run(rollouts(engine, renderer, prompts, task, step))
        credit = assign(groups, grpo, min_verdicts=2, answer_tokens=task["new_tokens"])
        batch = pack(credit.samples, credit.weights, tokens_per_microbatch=512, version=step)
        sampled.update(sampled_bytes(batch))
        trainer.step(batch)
        engine.publish(trainer.adapters(), step + 1)
    for name, tensor in sorted(trainer.tensors().items()):
        trained.update(name.encode() + tensor_bytes(tensor))
    return {"sampled": sampled.hexdigest()[:16], "trained": trained.hexdigest()[:16]}


def sampled_bytes(batch: Batch) -> bytes:
    """Tokens, log-probabilities and experts of a batch."""
    arrays = [
        array
        for one in batch.microbatches
        for array in (one.tokens, one.targets, one.logprobs, one.experts)
        if array is not None
    ]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bits of a tensor of any dtype."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
