"""model.fp32_head is of the sampler and of the trainer (ScaleRL, arXiv 2510.13786, A.19)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from nouns import sample_of
from worlds import KERNELS, answers, tiny_dense

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Request, Sampling

# one token in, one token out: attention over a single key rounds nothing, so only the heads can differ
REQUESTS = [
    Request(tokens=np.array([n + 1], np.int32), sampling=Sampling(max_tokens=1), seed=(0, n))
    for n in range(60)
]


def decoder_of(fp32_head: bool) -> Decoder:
    """With logits of some tens, which are multiples of 1/8 or 1/4 in bfloat16."""
    decoder = Decoder(
        parse_config(
            tiny_dense(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=64,
                tie_word_embeddings=False,
                initializer_range=0.3,
            )
        ),
        dtype=torch.bfloat16,
        fp32_head=fp32_head,
    ).init_weights(seed=0)
    decoder.head_weight.data.mul_(8)
    return decoder


def sampled(fp32_head: bool, kernels: Kernels | None) -> list[Completion]:
    return answers(LocalEngine(decoder_of(fp32_head), kernels=kernels, kv_memory_mb=1), REQUESTS)


def furthest(said: Sequence[Completion], fp32_head: bool, kernels: Kernels | None) -> float:
    """The largest |log p| between sampler and trainer, whose head is in fp32 or not."""
    samples = [
        sample_of(
            np.append(request.tokens, done.tokens),
            1,
            logprobs=np.append(np.float32(0), done.logprobs),
            group=number,
        )
        for number, (request, done) in enumerate(zip(REQUESTS, said, strict=True))
    ]
    decoder = decoder_of(fp32_head)
    adapters = init_adapters(decoder.config, AdapterSpec(rank=2, targets=("attn",)), seed=0)
    trainer = PolicyTrainer(
        decoder,
        adapters,
        algorithm("cispo"),
        optimizer=OptimizerSettings(lr=1e-6),
        ops=kernels.training if kernels else TORCH_OPS,
    )
    weights = aggregation_weights(samples, Aggregation.PROMPT)
    batch = pack(samples, weights, tokens_per_microbatch=1000)
    return trainer.measure(batch, floor=False)["arms"]["native"]["abs_max"]


@pytest.mark.parametrize("kernels", KERNELS)
def test_with_the_flag_both_sides_score_alike_and_one_without_it_does_not(kernels: Kernels | None) -> None:
    """Logits of 8 bits are off by more than a tenth of a nat here, so one switch is for both sides. The test
    before this one compared a softmax with another, and never set the flag."""
    said = sampled(True, kernels)
    assert furthest(said, True, kernels) < 1e-4
    assert furthest(said, False, kernels) > 0.1
    assert furthest(sampled(False, kernels), True, kernels) > 0.1
