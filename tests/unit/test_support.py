"""The sampler's action space is the trainer's: what top-k, top-p and min-p kept, from draw to gradient."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from rounding import rounding
from small_replay import local_passes
from small_world import KERNELS

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack, pad
from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.model.native import Kernels
from ostinato.rollout.convert import samples
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Group, Prompt, Request, Sample, Sampling, Stop, Trajectory, Turn

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
GAP = "sampling/sampling_logp_difference/max"
FILTERS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def decoder_of(seed: int = 0) -> Decoder:
    return Decoder(parse_config(CONFIG)).init_weights(seed)


def played(decoder: Decoder, sampling: Sampling, kernels: Kernels | None = None) -> list[Sample]:
    """Three prompts with three siblings each, as the engine answers them and as they are converted."""
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=4, context_limit=128)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 61, 5 + n).astype(np.int32) for n in range(3)]
    asked = [Request(tokens=prompts[n // 3], sampling=sampling, seed=(5, n)) for n in range(9)]

    async def collect() -> dict[int, Trajectory]:
        return {
            n: Trajectory(
                turns=(Turn(context=asked[n].tokens, completion=done),), stop=Stop.LENGTH, seed=(5, n)
            )
            async for n, done in engine.generate(asked)
        }

    done = asyncio.run(collect())
    made = []
    for g in range(3):
        siblings = tuple(done[3 * g + k] for k in range(3))
        group = Group(prompt=Prompt(uid=str(g), text="?"), trajectories=siblings, step=1)
        made += samples(group, g, np.array([1.0, -0.5, -0.5]))
    return made


def gap(decoder: Decoder, batch: Batch, temperature: float, *, full: bool = False) -> dict[str, float]:
    """What a step measures; its update is next to nothing."""
    adapters = None if full else init_adapters(decoder.config, AdapterSpec(rank=2), 0)
    decoder.trainable(full)
    trainer = PolicyTrainer(
        decoder,
        adapters,
        algorithm("grpo"),
        optimizer=OptimizerSettings(lr=1e-12),
        temperature=temperature,
    )
    return dict(trainer.step(batch).metrics)


def without_support(batch: Batch) -> Batch:
    return replace(batch, microbatches=tuple(replace(one, support=None) for one in batch.microbatches))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_sampler_and_trainer_agree_to_rounding(filters: str, kernels: Kernels | None) -> None:
    """At equal weights, on a mixture of experts with its routes replayed. Scored over the whole vocabulary
    the same tokens look off-policy, which was our account of every truncated run before supports."""
    decoder = decoder_of()
    sampling = Sampling(max_tokens=12, temperature=0.8, **FILTERS[filters])
    mine = played(decoder, sampling, kernels)
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=40)
    seen = gap(decoder, batch, 0.8)
    assert seen[GAP] < 2e-5
    assert 1 < seen["sampling/support_mean"] < 61
    counts = np.concatenate([one.support.counts for one in batch.microbatches if one.support is not None])
    assert seen["sampling/support_mean"] == pytest.approx(counts.mean())
    assert seen["sampling/support_bytes"] == pytest.approx(4 + 4 * counts.mean())
    blind = gap(decoder, without_support(batch), 0.8)
    assert blind[GAP] > 0.05 and "sampling/support_mean" not in blind


def test_a_trainable_head_agrees_too() -> None:
    """It goes another way: logits recomputed chunk by chunk in backward."""
    decoder = decoder_of()
    mine = played(decoder, Sampling(max_tokens=12, top_p=0.8))
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=400)
    frozen, full = gap(decoder, batch, 1.0), gap(decoder, batch, 1.0, full=True)
    assert full[GAP] < 2e-5 and full["entropy"] == pytest.approx(frozen["entropy"], rel=1e-5)


def test_packing_and_padding_carry_the_same_supports() -> None:
    decoder = decoder_of()
    mine = played(decoder, Sampling(max_tokens=8, top_k=5))
    weights = aggregation_weights(mine, Aggregation.TOKEN)
    packed, padded = (
        gap(decoder, batch, 1.0)
        for batch in (pack(mine, weights, tokens_per_microbatch=30), pad(mine, weights))
    )
    # advantages of 1 and -0.5 cancel in a loss of 4e-8: what is rounded is a mean of magnitudes of 1 at most
    apart = rounding(torch.float32, sum(int(one.loss_mask.sum()) for one in mine), 1.0)
    for name in ("entropy", "loss", "sampling/support_mean", "sampling/support_bytes"):
        assert packed[name] == pytest.approx(padded[name], rel=1e-4, abs=apart)


def test_the_reference_policy_has_the_same_action_space() -> None:
    """Without an update the policy is its own reference: the KL is 0 where both are over the support."""
    decoder = decoder_of()
    mine = played(decoder, Sampling(max_tokens=8, top_p=0.6))
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=60)
    trainer = PolicyTrainer(
        decoder,
        init_adapters(decoder.config, AdapterSpec(rank=2), 0),
        algorithm("grpo", kl_coef=0.1),
        optimizer=OptimizerSettings(lr=1e-12),
    )
    (part, *_) = [trainer._guard.inputs(one) for one in batch.microbatches]
    (scored,) = trainer._with_reference([part])
    assert scored.reference is not None
    np.testing.assert_allclose(scored.reference.numpy(), part.source.logprobs, atol=2e-5)


def test_a_token_outside_of_its_support_is_refused_by_name() -> None:
    (one, *_) = played(decoder_of(), Sampling(max_tokens=4, top_k=3))
    assert one.support is not None
    place = int(np.flatnonzero(one.loss_mask)[1])
    outside = next(token for token in range(61) if token not in one.support.take(np.array([place])).ids)
    tokens = one.tokens.copy()
    tokens[place] = outside
    wrong = replace(one, tokens=tokens)
    with pytest.raises(ValueError, match=f"sample 0#0: token {place} is not in its support"):
        pack([wrong], aggregation_weights([wrong], Aggregation.TOKEN), tokens_per_microbatch=40)


def test_gradients_are_those_of_a_masked_softmax() -> None:
    """Of the whole trainer, against autograd through a log-softmax with everything else at minus infinity."""
    decoder = decoder_of().trainable(False)
    mine = played(decoder, Sampling(max_tokens=8, top_p=0.7))
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=400)
    adapters = init_adapters(decoder.config, AdapterSpec(rank=2), 0)
    trainer = PolicyTrainer(decoder, adapters, algorithm("grpo"), optimizer=OptimizerSettings(lr=1e-3))
    (part,) = [trainer._guard.inputs(one) for one in batch.microbatches]
    assert part.source.support is not None
    hidden = torch.randn(len(part.rows), 32, requires_grad=True)
    mask = torch.zeros(len(part.rows), 61, dtype=torch.bool)
    for row, kept in enumerate(part.source.support.split(1)):
        mask[row, torch.from_numpy(kept.ids).long()] = True
    masked = torch.log_softmax((hidden @ decoder.head_weight.T).masked_fill(~mask, -torch.inf), dim=-1)
    expected = masked[torch.arange(len(mask)), part.targets]
    got, _ = local_passes(trainer).logprobs(hidden, part, want_entropy=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn(len(mask))
    grads = [torch.autograd.grad((x * probe).sum(), hidden)[0] for x in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
