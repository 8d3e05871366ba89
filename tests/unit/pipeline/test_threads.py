"""One process that samples and trains at once shares base tensors, kernels and their scratch between two
threads: what comes out is what comes out of one after the other, to the last bit."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from nouns import sample_of
from worlds import KERNELS, VOCAB, tiny

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.engine.local import LocalEngine
from ostinato.model.lora import Adapters, AdapterSpec, init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.pipeline.signals import in_thread
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Completion, Request, Sampling

STEPS = 3  # of the trainer while the engine samples


class Both:
    """An engine and a trainer on one decoder."""

    def __init__(self, kernels: Kernels | None, dtype: torch.dtype) -> None:
        decoder = tiny("softmax-renormalised", dtype)
        adapters = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8), 0)
        self.trainer = PolicyTrainer(
            decoder,
            adapters,
            algorithm("grpo"),
            optimizer=OptimizerSettings(lr=1e-2),
            ops=kernels.training if kernels else TORCH_OPS,
            replay_threshold=0.0,
        )
        self.engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=8, context_limit=64)
        self.policy = shaken(adapters)

    async def sample(self) -> list[Completion]:
        self.engine.publish(self.policy, 0)  # which forgets the prefix tree
        sampling, rng = Sampling(max_tokens=24, top_p=0.95), np.random.default_rng(0)
        requests = [
            Request(tokens=rng.integers(0, VOCAB, 9).astype(np.int32), sampling=sampling, seed=(0, i))
            for i in range(8)
        ]
        found = {index: completion async for index, completion in self.engine.generate(requests)}
        return [found[index] for index in range(len(requests))]

    def train(self, batch: Batch) -> str:
        for _ in range(STEPS):
            self.trainer.step(batch)
        tensors = sorted(self.trainer.tensors().items())
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in tensors)).hexdigest()


def shaken(adapters: Adapters) -> Adapters:
    """A policy that is not the base."""
    copy = adapters.detach_copy()
    rng = torch.Generator().manual_seed(3)
    for tensor in copy.parameters():
        tensor.data += 0.05 * torch.randn(tensor.shape, generator=rng)
    return copy


def batch_of(answers: Sequence[Completion]) -> Batch:
    samples = [
        sample_of(
            one.tokens,
            4,
            logprobs=np.where(np.arange(len(one.tokens)) >= 4, one.logprobs, 0).astype(np.float32),
            advantages=np.full(len(one.tokens), (-1.0) ** i, np.float32),
            group=i,
        )
        for i, one in enumerate(answers)
    ]
    weights = [np.full(len(one.tokens), 1e-2, np.float32) for one in samples]
    return pack(samples, weights, tokens_per_microbatch=64, version=0)


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_to_train_and_to_sample_at_once_is_to_do_one_after_the_other(
    kernels: Kernels | None, dtype: torch.dtype
) -> None:
    turns, at_once = Both(kernels, dtype), Both(kernels, dtype)
    answers = asyncio.run(turns.sample())
    batch = batch_of(answers)
    trained = turns.train(batch)

    async def together() -> tuple[str, list[list[Completion]]]:
        training = asyncio.create_task(in_thread(lambda: at_once.train(batch)))
        sampled = [await at_once.sample()]
        while not training.done():
            sampled.append(await at_once.sample())
        return await training, sampled

    digest, sampled = asyncio.run(together())
    assert digest == trained
    assert all(same(answers, some) for some in sampled)
