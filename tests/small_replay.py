"""A tiny mixture of experts, samples with the routes that it chooses itself, and trainers on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nouns import sample_of
from trainer_options import trainer_options
from worlds import VOCAB, tiny_moe

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec
from ostinato.train.local import LocalPasses
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import NO_EXPERT, Batch, Sample

PROMPT = 10
RAW = tiny_moe(
    num_hidden_layers=4,
    head_dim=8,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=16,
    mlp_only_layers=[0],
    max_position_embeddings=128,
)
DENSE = {**RAW, "mlp_only_layers": [0, 1, 2, 3]}
SLOW = TrainerSection(lr=1e-3)
GRPO, BYPASS = algorithm("grpo", correction="token_truncate"), algorithm("grpo")


def decoder_of(raw: dict[str, Any] = RAW) -> Decoder:
    return Decoder(parse_config(raw)).init_weights(seed=0)


def adapters_of(decoder: Decoder, *targets: str) -> Adapters:
    """With B drawn too, so that the policy is not the base and every factor has a gradient."""
    spec = AdapterSpec(rank=4, alpha=8, targets=targets or ("attn",))
    adapters, generator = init_adapters(decoder.config, spec, seed=1), torch.Generator().manual_seed(2)
    for _, b in adapters.tensors.values():
        b.data = torch.randn(b.shape, generator=generator) * 0.1
    return adapters


def samples_of(
    decoder: Decoder,
    adapters: Adapters | None,
    groups: int = 3,
    siblings: int = 3,
    answer: int = 20,
    prompt: int = PROMPT,
) -> list[Sample]:
    """Groups of siblings with the experts that the model itself chooses for them, as an engine would."""
    rng, samples = np.random.default_rng(0), []
    for group in range(groups):
        context = rng.integers(0, VOCAB, size=prompt)
        for sibling in range(siblings):
            tokens = np.concatenate([context, rng.integers(0, VOCAB, size=answer + sibling)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= prompt
            advantages = np.where(mask, rng.standard_normal(), 0).astype("f4")
            with torch.no_grad():
                where = torch.from_numpy(tokens.astype(np.int64)), torch.arange(len(tokens))
                hidden, routing = decoder(*where, CausalAttention(), adapters=adapters)
                log_p = decoder.logits(hidden).log_softmax(-1)
            logprobs = np.zeros(len(tokens), "f4")
            logprobs[1:] = log_p[:-1].gather(1, where[0][1:, None])[:, 0].numpy()
            experts = None if routing is None else routing.numpy().copy()
            if experts is not None:
                experts[-1] = NO_EXPERT
            samples.append(
                sample_of(
                    tokens,
                    prompt,
                    logprobs=np.where(mask, logprobs, 0),
                    advantages=advantages,
                    group=group,
                    uid=f"{group}#{sibling}",
                    experts=experts,
                )
            )
    return samples


def batch_of(samples: list[Sample], budget: int = 200, minibatches: int = 1, version: int = 0) -> Batch:
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    return pack(samples, weights, tokens_per_microbatch=budget, minibatches=minibatches, version=version)


def with_experts(samples: list[Sample], experts: list[np.ndarray]) -> list[Sample]:
    return [replace(sample, experts=ids) for sample, ids in zip(samples, experts, strict=True)]


def trainer_of(decoder: Decoder, adapters: Adapters | None = None, **options: Any) -> PolicyTrainer:
    options = trainer_options(**{"algorithm": GRPO, "settings": SLOW} | options)
    return PolicyTrainer(decoder, adapters or adapters_of(decoder), options.pop("algorithm"), **options)


def bytes_of(trainer: PolicyTrainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.tensors().items()}


def random_experts(sample: Sample, seed: int = 0) -> np.ndarray:
    assert sample.experts is not None
    shape = (*sample.experts.shape[:2], RAW["num_experts"])
    drawn = np.random.default_rng(seed).random(shape).argsort(-1)[..., : sample.experts.shape[2]]
    return np.where(sample.experts == NO_EXPERT, NO_EXPERT, drawn).astype(np.int16)


def local_passes(trainer: PolicyTrainer) -> LocalPasses:
    assert isinstance(trainer._passes, LocalPasses)
    return trainer._passes
