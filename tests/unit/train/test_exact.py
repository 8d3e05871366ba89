"""``model.exact``: the forward of training gives the sampler's log-probabilities, bit for bit, and training's
gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import DEEPSEEK, KINDS, NATIVE, SIZES, VOCAB, adapters_of, answers, tiny_dense

from ostinato.algo.pack import pack
from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters
from ostinato.model.named import model_folder
from ostinato.model.ops import Ops
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.local import LocalPasses
from ostinato.train.passes import ScoreOptions
from ostinato.types import Completion, Request, Sample, Sampling

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
        decoder = load_model(model_folder("asset:seed-moe"), dtype=dtype)
    else:
        config = parse_config(DENSE[name] if name in DENSE else {**SIZES, **KINDS[name]})
        decoder = Decoder(config, dtype=dtype).init_weights(1)
    targets = ("attn", "mlp", "shared", "experts", "router")[: 5 if decoder.config.moe else 2]
    size = 0.02 if name == "seed-moe" else 0.2
    return decoder, adapters_of(decoder, 2, size, targets=targets, expert_scheme=scheme)


def sampled(
    decoder: Decoder, adapters: Adapters, requests: list[Request], max_batch: int
) -> list[Completion]:
    engine = LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=8, max_batch=max_batch, context_limit=256)
    engine.publish(adapters, 1)
    return answers(engine, requests)


def samples_of(requests: list[Request], found: list[Completion], groups: list[int]) -> list[Sample]:
    samples = []
    for number, (request, done, group) in enumerate(zip(requests, found, groups, strict=True)):
        prompt, total = len(request.tokens), len(request.tokens) + len(done.tokens)
        zeros, mask = np.zeros(prompt, np.float32), np.arange(total) >= prompt
        experts = None
        if done.experts is not None and done.prompt_experts is not None:
            experts = np.concatenate([done.prompt_experts, done.experts])
        support = None
        if done.support is not None:
            support = type(done.support).concatenate([done.support.whole(prompt), done.support])
        samples.append(
            Sample(
                tokens=np.concatenate([request.tokens, done.tokens]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.concatenate([zeros, done.logprobs]),
                advantages=mask.astype(np.float32),
                versions=np.where(mask, 1, -1).astype(np.int32),
                group=group,
                prompt_len=prompt,
                uid=str(number),
                experts=experts,
                support=support,
            )
        )
    return samples


def parts_of(samples: list[Sample], budget: int, *, moe: bool, replay: bool) -> list[Inputs]:
    weights = [sample.loss_mask.astype(np.float64) for sample in samples]
    batch = pack(samples, weights, tokens_per_microbatch=budget, version=1)
    return [as_inputs(one, torch.device("cpu"), moe=moe, replay=replay) for one in batch.microbatches]


def passes_of(decoder: Decoder, adapters: Adapters, ops: Ops, **changes: Any) -> LocalPasses:
    options = {"temperature": 1.0, "recompute": False, "entropy_grad": False, **changes}
    return LocalPasses(decoder, adapters, ops=ops, **options)


def exact() -> Ops:
    assert NATIVE is not None
    return NATIVE.exact


WORLDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "scheme": st.sampled_from(["shared_outer", "per_expert"]),
        "groups": st.lists(
            st.tuples(st.integers(1, 40), st.lists(st.integers(1, 24), min_size=1, max_size=4)),
            min_size=1,
            max_size=4,
        ),
        "seed": st.integers(0, 99),
        "max_batch": st.integers(1, 6),
        "budget": st.sampled_from([65, 90, 400]),
        "temperature": st.sampled_from([1.0, 0.7, 1.5]),
        "filters": st.sampled_from([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 9}]),
        "replay": st.booleans(),
        "recompute": st.booleans(),
    }
)


def check_equal(name: str, world: dict[str, Any]) -> None:
    decoder, adapters = model(name, world["dtype"], world["scheme"])
    rng = np.random.default_rng(world["seed"])
    vocab = decoder.config.vocab_size
    requests, groups = [], []
    for group, (prompt, lengths) in enumerate(world["groups"]):
        tokens = rng.integers(0, vocab, prompt).astype(np.int32)
        for sibling, length in enumerate(lengths):
            sampling = Sampling(temperature=world["temperature"], max_tokens=length, **world["filters"])
            requests.append(Request(tokens=tokens, sampling=sampling, seed=(world["seed"], group, sibling)))
            groups.append(group)
    samples = samples_of(requests, sampled(decoder, adapters, requests, world["max_batch"]), groups)
    passes = passes_of(
        decoder, adapters, exact(), temperature=world["temperature"], recompute=world["recompute"]
    )
    moe = decoder.config.moe is not None
    for part in parts_of(samples, world["budget"], moe=moe, replay=world["replay"]):
        for as_trained in (True, False):
            (scores,) = passes.score([part], ScoreOptions(as_trained=as_trained, native=moe))
            assert scores.logprobs is not None
            assert torch.equal(scores.logprobs, part.behaviour)
            if moe and part.carried is not None and scores.native is not None:
                known = part.carried[..., :1] >= 0
                assert bool(((scores.native == part.carried) | ~known).all())


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(world=WORLDS)
def test_every_row_has_the_samplers_log_probability(name: str, world: dict[str, Any]) -> None:
    check_equal(name, world)


@settings(max_examples=5, deadline=None)
@given(world=WORLDS)
def test_every_row_of_seed_moe_has_too(world: dict[str, Any]) -> None:
    check_equal("seed-moe", {**world, "budget": 400})


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
    samples = samples_of(requested, sampled(decoder, adapters, requested, 4), [0, 0, 1])
    moe = decoder.config.moe is not None
    (part,) = parts_of(samples, 400, moe=moe, replay=True)
    found = []
    assert NATIVE is not None
    for ops in (NATIVE.training, NATIVE.exact):
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
