"""``model.exact``: the forward of training gives the sampler's log-probabilities, bit for bit, and training's
gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from exactness import WORLDS, check_equal, parts_of, passes_of, sampled, samples_of
from hypothesis import given, settings
from worlds import DEEPSEEK, KINDS, NATIVE, SIZES, VOCAB, adapters_of, tiny_dense

from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters
from ostinato.model.named import find_model_folder
from ostinato.model.native import Kernels
from ostinato.types import Request, Sampling

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no compiler")

DENSE = {
    "llama": tiny_dense(initializer_range=0.3, max_position_embeddings=256),
    "biased": tiny_dense(initializer_range=0.3, attention_bias=True, mlp_bias=True, head_dim=24),
    "qk-norm": tiny_dense(model_type="qwen3", initializer_range=0.3, head_dim=16, tie_word_embeddings=False),
    "latent": {**SIZES, **DEEPSEEK, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
}
FAMILIES = [*DENSE, *KINDS]


@cache
def model(name: str, dtype: torch.dtype, scheme: str) -> tuple[Decoder, Adapters]:
    if name == "seed-moe":
        decoder = load_model(find_model_folder("asset:seed-moe"), dtype=dtype)
    else:
        config = parse_config(DENSE[name] if name in DENSE else {**SIZES, **KINDS[name]})
        decoder = Decoder(config, dtype=dtype).init_weights(1)
    targets = ("attn", "mlp", "shared", "experts", "router")[: 5 if decoder.config.moe else 2]
    size = 0.02 if name == "seed-moe" else 0.2
    return decoder, adapters_of(decoder, 2, size, targets=targets, expert_scheme=scheme)


def kernels() -> Kernels:
    assert NATIVE is not None
    return NATIVE


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(world=WORLDS)
def test_every_row_has_the_samplers_log_probability(name: str, world: dict[str, Any]) -> None:
    check_equal(*model(name, world["dtype"], world["scheme"]), world, kernels(), kernels().exact)


@settings(max_examples=5, deadline=None)
@given(world=WORLDS)
def test_every_row_of_seed_moe_has_too(world: dict[str, Any]) -> None:
    decoder, adapters = model("seed-moe", world["dtype"], world["scheme"])
    check_equal(decoder, adapters, {**world, "budget": 400}, kernels(), kernels().exact)


@pytest.mark.parametrize("name", ["qk-norm", "softmax-renormalised", "sigmoid-bias-groups", "latent"])
@pytest.mark.parametrize("scheme", ["shared_outer", "per_expert"])
def test_gradients_are_those_of_training(name: str, scheme: str) -> None:
    """In fp32, where the two forwards are a rounding apart, and so are the gradients."""
    decoder, adapters = model(name, torch.float32, scheme)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in (21, 21, 5)]
    prompts[1] = prompts[0]
    requested = [
        Request(tokens=p, sampling=Sampling(max_tokens=9), seed=(0, k)) for k, p in enumerate(prompts)
    ]
    samples = samples_of(requested, sampled(decoder, adapters, requested, 4, kernels()), [0, 0, 1])
    moe = decoder.config.moe is not None
    (part,) = parts_of(samples, 400, moe=moe, replay=True)
    found = []
    for ops in (kernels().training, kernels().exact):
        for leaf in adapters.parameters():
            leaf.requires_grad_().grad = None
        passes = passes_of(decoder, adapters, ops)
        hidden, _ = passes.forward(part, adapters)
        logprobs, _ = passes.logprobs(hidden, part, want_entropy=True)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append([leaf.grad.clone() for leaf in adapters.parameters() if leaf.grad is not None])
        for leaf in adapters.parameters():
            leaf.requires_grad_(False).grad = None
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()) + 1e-7)
