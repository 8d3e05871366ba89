"""The sampler's action space is the trainer's: what top-k, top-p and min-p kept, from draw to gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds import KERNELS, answers, tiny_decoder

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.model.native import Kernels
from ostinato.rollout.convert import samples
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Group, Prompt, Request, Sample, Sampling, Stop, Trajectory, Turn

GAP = "sampling/sampling_logp_difference/max"
FILTERS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def decoder_of() -> Decoder:
    return tiny_decoder(head_dim=8)


def played(decoder: Decoder, sampling: Sampling, kernels: Kernels | None = None) -> list[Sample]:
    """Three prompts with three siblings each, as the engine answers them and as they are converted."""
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=4, context_limit=128)
    rng, made = np.random.default_rng(3), []
    prompts = [rng.integers(0, 61, 5 + n).astype(np.int32) for n in range(3)]
    asked = [Request(tokens=prompts[n // 3], sampling=sampling, seed=(5, n)) for n in range(9)]
    done = [
        Trajectory(turns=(Turn(context=request.tokens, completion=one),), stop=Stop.LENGTH, seed=request.seed)
        for request, one in zip(asked, answers(engine, asked), strict=True)
    ]
    for g in range(3):
        group = Group(
            prompt=Prompt(uid=str(g), text="?"), trajectories=tuple(done[3 * g : 3 * g + 3]), step=1
        )
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
