"""TinyLoRA against its slow definition: few numbers for all maps, frozen directions of the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import drawn
from torch import Tensor
from worlds import NATIVE, VOCAB, answers, generator, tiny_decoder

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.peft_io import load_peft, merge, save_peft
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.tied import TiedAdapters, tied_adapters
from ostinato.train.optimizer import OptimizerSettings
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Request, Sampling

TOKENS, POSITIONS = torch.arange(12) % VOCAB, torch.arange(12)
SCHEMES = [*ExpertScheme]


def tied(decoder: Decoder, count: int = 5, seed: int = 0, size: float = 0.3, **spec: Any) -> TiedAdapters:
    """That change what it says."""
    found = tied_adapters(decoder, AdapterSpec(**{"rank": 2, "alpha": 2.0, **spec}), count, seed)
    found.numbers.normal_(0, size, generator=generator(seed))
    return found


def decoder_of(**changes: Any) -> Decoder:
    return tiny_decoder(mlp_only_layers=[0], **changes)


def top(weight: Tensor, rank: int) -> Tensor:
    """Projection [in, in] onto the largest right singular vectors."""
    v = torch.linalg.svd(weight.double()).Vh[:rank]
    return v.mT @ v


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(1, 3), st.integers(1, 60), st.integers(0, 9))
def test_updates_are_those_of_the_definition(scheme: ExpertScheme, rank: int, count: int, seed: int) -> None:
    """Map by map and number by number; the directions by torch's own SVD, where its values are apart."""
    decoder = decoder_of()
    found = tied(decoder, min(count, 14 * rank**2), seed, rank=rank, expert_scheme=scheme, alpha=3.0)
    ordinary, place = Adapters(found.spec, found.tensors, found.config), 0
    for k, (name, (a, b)) in enumerate(ordinary.tensors.items()):
        weight, core = decoder.named_linears()[name].weight, torch.zeros(rank, rank)
        for own in found._mixes[k]:
            core += found.numbers[place % len(found.numbers)] * own
            place += 1
        q, u = found._tensors[name]
        torch.testing.assert_close(b @ a, u @ core @ q)
        if scheme == ExpertScheme.PER_EXPERT or ".experts." not in name:
            for one, w in zip(
                q.reshape(-1, *q.shape[-2:]), weight.reshape(-1, *weight.shape[-2:]), strict=True
            ):
                values = torch.linalg.svdvals(w)
                if values[rank] < 0.8 * values[rank - 1]:
                    torch.testing.assert_close((one.mT @ one).double(), top(w, rank), atol=1e-2, rtol=0)
            torch.testing.assert_close(u, weight @ q.mT)
        elif name.endswith("down"):  # one basis for all that the experts put out
            torch.testing.assert_close(q, u.mT @ weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_is_that_of_ordinary_factors_and_of_merged_weights(scheme: str) -> None:
    decoder = decoder_of()
    found = tied(decoder, expert_scheme=scheme)
    published = found.detach_copy()
    with torch.no_grad():
        one, routing = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=found)
        other, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=published)
        merged, _ = merge(decoder, published)(TOKENS, POSITIONS, CausalAttention(), routing=routing)
        base, _ = decoder(TOKENS, POSITIONS, CausalAttention())
    assert torch.equal(one, other) and not torch.allclose(one, base)
    torch.testing.assert_close(one, merged, atol=2e-4, rtol=2e-4)
    assert type(published) is Adapters and not any(leaf.requires_grad for leaf in published.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_match_finite_differences(scheme: str) -> None:
    decoder = decoder_of(dtype=torch.float64)
    single = tied(decoder, 7, expert_scheme=scheme)
    frozen = {name: (a.double(), u.double()) for name, (a, u) in single._tensors.items()}
    with torch.no_grad():
        _, routing = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=single.detach_copy())

    def loss(numbers: Tensor) -> Tensor:
        found = TiedAdapters(single.spec, frozen, single.config, single._mixes.double(), numbers)
        hidden, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=found, routing=routing)
        return decoder.logits(hidden).log_softmax(-1)[:, 3].sum()

    assert torch.autograd.gradcheck(loss, single.numbers.double().requires_grad_(), atol=1e-5, rtol=1e-4)


def batch(seed: int) -> Batch:
    samples = drawn(np.random.default_rng(seed), VOCAB, 5, [6, 9, 7])
    return pack(samples, aggregation_weights(samples, Aggregation.TOKEN), tokens_per_microbatch=40)


def trainer_of(decoder: Decoder, adapters: TiedAdapters) -> PolicyTrainer:
    return PolicyTrainer(decoder, adapters, algorithm("grpo"), optimizer=OptimizerSettings(lr=0.1))


def test_a_trainer_moves_the_numbers_alone_and_goes_on_from_its_checkpoint() -> None:
    decoder = decoder_of()
    trainer = trainer_of(decoder, tied_adapters(decoder, AdapterSpec(rank=2), 13))
    before = trainer.adapters()
    trainer.step(batch(0))
    saved = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    assert saved["parameters.numbers"].shape == (13,) and saved["parameters.numbers"].all()
    trainer.step(batch(1))
    again = trainer_of(decoder, tied_adapters(decoder, AdapterSpec(rank=2), 13))
    again.restore(saved, trainer.counters() | {"steps": 1})
    again.step(batch(1))
    ends = [one.adapters() for one in (trainer, again)]
    assert ends[0] is not None and ends[1] is not None and before is not None
    for name, value in ends[0].state_dict().items():
        assert torch.equal(value, ends[1].state_dict()[name])
        assert torch.equal(value, before.state_dict()[name]) == name.endswith("A")
    with pytest.raises(ValueError, match="13"):
        trainer_of(decoder, tied_adapters(decoder, AdapterSpec(rank=2), 5)).restore(saved, trainer.counters())


@pytest.mark.skipif(NATIVE is None, reason="no compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_sampler_has_the_trainers_policy(scheme: str) -> None:
    decoder = decoder_of()
    trainer = trainer_of(decoder, tied(decoder, expert_scheme=scheme))
    engine = LocalEngine(decoder, kernels=NATIVE, kv_memory_mb=8, context_limit=64)
    engine.publish(trainer.adapters(), 1)
    prompt = np.arange(5, dtype=np.int32)
    (done,) = answers(engine, [Request(tokens=prompt, sampling=Sampling(max_tokens=8), seed=(0,))])
    (sample,) = drawn(np.random.default_rng(0), VOCAB, 5, [len(done.tokens)])
    sample.tokens[:] = np.concatenate([prompt, done.tokens])
    packed = pack([sample], [sample.loss_mask.astype(float)], tokens_per_microbatch=64)
    (scored,) = trainer.score(packed)
    np.testing.assert_allclose(scored[-len(done.tokens) :], done.logprobs, atol=1e-4)


def test_it_is_exported_as_an_ordinary_adapter(tmp_path: Any) -> None:
    decoder = decoder_of()
    found = tied(decoder)
    save_peft(found, decoder, tmp_path)
    loaded = load_peft(tmp_path, decoder)
    assert all(torch.equal(one, loaded.state_dict()[name]) for name, one in found.state_dict().items())


@pytest.mark.parametrize(
    ("adapter", "more", "words"),
    [
        ({"kind": "full"}, {}, "adapter.kind 'full'"),
        ({"expert_rank": 2}, {}, "adapter.expert_rank 2"),
        ({"path": "run"}, {}, "adapter.path 'run'"),
        ({}, {"parallel": {"layout": "d2"}}, "parallel.layout is 'd2'"),
    ],
)
def test_settings_that_cannot_be_are_refused(adapter: dict, more: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe.parse({"adapter": {"tied": 13, **adapter}, **more})


def test_more_numbers_than_places_and_ranks_wider_than_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="places for 56"):
        tied_adapters(decoder_of(), AdapterSpec(rank=2), 57)
    with pytest.raises(ValueError, match="24 wide"):
        tied_adapters(decoder_of(), AdapterSpec(rank=25), 1)
