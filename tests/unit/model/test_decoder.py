"""The decoder against itself: cached and full, packed and apart, merged and not, replayed, recomputed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.naive_cache import NaiveCache
from reference.plain_layers import DenseMaskAttention
from rounding import hidden_rounding
from torch import Tensor
from worlds import DEEPSEEK, adapters_of, tiny_dense

from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.peft_io import compute_rounding_error, merge_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.weights import Moe
from ostinato.types import Segment

MOE = {"num_experts": 6, "num_experts_per_tok": 2}
RAW: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**MOE, "head_dim": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": MOE,
    "olmoe": {**MOE, "clip_qkv": 1.5},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
}
FAMILIES = list(RAW)
SPARSE = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"]
BASE = {"tie_word_embeddings": False, "max_position_embeddings": 64, "initializer_range": 0.2}
TOKENS = torch.tensor([3, 17, 5, 42, 60, 8, 8, 51, 2])
POSITIONS = torch.arange(len(TOKENS))


def tiny(family: str, **options: Any) -> Decoder:
    return Decoder(
        parse_config(tiny_dense(**{**BASE, **RAW[family], "model_type": family})), **options
    ).init_weights(1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cached_decode_is_the_full_forward(family: str) -> None:
    decoder = tiny(family)
    full, routing = decoder(TOKENS, POSITIONS, CausalAttention())
    cache = NaiveCache()
    pieces = [decoder(TOKENS[a:b], POSITIONS[a:b], cache) for a, b in ((0, 5), (5, 6), (6, 9))]
    bound = hidden_rounding(decoder.config, len(TOKENS), full)
    torch.testing.assert_close(torch.cat([hidden for hidden, _ in pieces]), full, atol=bound, rtol=0)
    if family in SPARSE:
        assert torch.equal(torch.cat([ids for _, ids in pieces]), routing)
    else:
        assert routing is None


@settings(max_examples=20, deadline=None)
@given(prompt=st.integers(1, 4), answers=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@torch.no_grad()
def test_packed_siblings_equal_separate_sequences(prompt: int, answers: list[int]) -> None:
    decoder = tiny("qwen3_moe")
    rows = [torch.arange(length) * 7 % 61 + i for i, length in enumerate([prompt, *answers])]
    segments, positions, start = [Segment(start=0, stop=prompt)], [torch.arange(prompt)], prompt
    for answer in answers:
        segments.append(Segment(start=start, stop=start + answer, prefix_start=0, prefix_stop=prompt))
        positions.append(torch.arange(prompt, prompt + answer))
        start += answer
    packed, _ = decoder(torch.cat(rows), torch.cat(positions), DenseMaskAttention(segments))
    for segment, row in zip(segments[1:], rows[1:], strict=True):
        alone, _ = decoder(torch.cat((rows[0], row)), torch.arange(prompt + len(row)), CausalAttention())
        bound = hidden_rounding(decoder.config, len(alone), alone)
        torch.testing.assert_close(packed[segment.start : segment.stop], alone[prompt:], atol=bound, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_fresh_adapters_are_the_base_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    decoder = tiny(family, dtype=dtype)
    adapters = init_adapters(
        decoder.config, AdapterSpec(rank=4, targets=("attn", "mlp", "shared", "experts", "router"))
    )
    base, _ = decoder(TOKENS, POSITIONS, CausalAttention())
    assert torch.equal(decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters)[0], base)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", list(ExpertScheme))
@torch.no_grad()
def test_merged_equals_unmerged(family: str, scheme: ExpertScheme) -> None:
    decoder = tiny(family)
    adapters = adapters_of(
        decoder, expert_scheme=scheme, expert_rank=2, targets=("attn", "mlp", "shared", "experts", "router")
    )
    base, routing = decoder(TOKENS, POSITIONS, CausalAttention())
    unmerged, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters, routing=routing)
    merged, _ = merge_adapters(decoder, adapters)(TOKENS, POSITIONS, CausalAttention(), routing=routing)
    assert (unmerged - base).abs().max() > 1e-2
    torch.testing.assert_close(merged, unmerged, atol=2e-5, rtol=1e-5)
    assert torch.equal(decoder(TOKENS, POSITIONS, CausalAttention())[0], base), "the original was changed"


@pytest.mark.parametrize("size", [1e-6, 0.2])
def test_rounding_error_of_a_merge_is_the_share_of_the_update_that_is_lost(size: float) -> None:
    """A merged 16-bit model behaved as if it had not been trained (unsloth issue 1877): what RL adds to a
    weight is often below half a unit in its last place, and the export did not say so."""
    decoder = tiny("llama")
    adapters = adapters_of(decoder, size=size)
    assert compute_rounding_error(decoder, merge_adapters(decoder, adapters), adapters) < 1e-2
    narrow = copy.deepcopy(decoder).bfloat16()
    error = compute_rounding_error(narrow, merge_adapters(narrow, adapters), adapters)
    assert (error == pytest.approx(1.0, abs=0.05)) if size < 1e-3 else (error < 0.2)
    assert compute_rounding_error(narrow, narrow, adapters) == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_training_forward_is_the_sampling_forward(family: str) -> None:
    """Under autograd and without it, with trained adapters, in fp32: not one bit apart."""
    decoder = tiny(family)
    adapters = adapters_of(decoder)
    with torch.no_grad():
        sampled, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters.prepare(torch.float32))
    trained, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters)
    assert trained.requires_grad
    assert torch.equal(sampled, trained)


def gradients(decoder: Decoder, adapters: Any, **options: Any) -> list[Tensor]:
    hidden, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters, **options)
    return list(torch.autograd.grad(decoder.logits(hidden).square().sum(), list(adapters.parameters())))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_recomputing_changes_no_bit_and_keeps_a_residual_a_layer(family: str) -> None:
    """A layer kept its residual and the norm of it too: 5.4 GB more of Qwen3-32B at 8,192 rows."""
    decoder = tiny(family)
    adapters = adapters_of(decoder, targets=("attn", "mlp", "shared", "experts"))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (len(TOKENS), decoder.config.hidden_size):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters, recompute=True)
    plain, _ = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters)
    assert torch.equal(hidden, plain) and len(kept) == decoder.config.num_layers
    again, once = (gradients(decoder, adapters, recompute=recompute) for recompute in (True, False))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, once, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_adapter_gradients_are_those_through_merged_weights(family: str) -> None:
    """Chain rule by hand: dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, with dL/dW of the merged model."""
    decoder = tiny(family)
    adapters = adapters_of(decoder, targets=("attn", "mlp", "shared", "experts"))
    merged = merge_adapters(decoder, adapters).set_trainable(True)
    with torch.no_grad():
        _, routing = decoder(TOKENS, POSITIONS, CausalAttention(), adapters=adapters)
    hidden, _ = merged(TOKENS, POSITIONS, CausalAttention(), routing=routing)
    merged.logits(hidden).square().sum().backward()
    expected = []
    stored = {id(p): p.grad for p in merged.parameters()}
    for name, (a, b) in adapters.tensors.items():
        weight = merged.named_linears()[name].weight
        full = stored[id(weight._base if weight._base is not None else weight)]
        assert full is not None
        grad = torch.as_strided(full, weight.shape, weight.stride(), weight.storage_offset())
        scale = adapters.spec.get_scale(name)
        grad_a, grad_b = scale * b.detach().mT @ grad, scale * grad @ a.detach().mT
        expected += [g.sum(0) if g.dim() > t.dim() else g for g, t in ((grad_a, a), (grad_b, b))]
    actual = gradients(decoder, adapters, routing=routing)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_gradients_reach_fp32_factors_through_bf16() -> None:
    decoder = tiny("qwen3_moe", dtype=torch.bfloat16)
    adapters = adapters_of(decoder)
    for gradient, parameter in zip(gradients(decoder, adapters), adapters.parameters(), strict=True):
        assert gradient.dtype == parameter.dtype == torch.float32
        assert gradient.isfinite().all() and gradient.abs().max() > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@torch.no_grad()
def test_fp32_head(family: str) -> None:
    """Tied (llama here) or not: bf16 hidden states and weights, fp32 products and sums; off, bf16 logits."""
    decoder = tiny(family, dtype=torch.bfloat16, fp32_head=True)
    hidden, _ = decoder(TOKENS, POSITIONS, CausalAttention())
    logits = decoder.logits(hidden)
    assert (decoder.head_weight is decoder.embed) == (family == "llama")
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ decoder.head_weight.float().T, atol=0, rtol=0)
    decoder.fp32_head = False
    assert decoder.logits(hidden).dtype == torch.bfloat16


def test_full_training_gradients_match_finite_differences() -> None:
    """Every parameter of a float64 model, in one random direction each."""
    decoder = tiny("qwen3_moe", dtype=torch.float64).double().set_trainable(True)
    with torch.no_grad():
        _, routing = decoder(TOKENS, POSITIONS, CausalAttention())

    def loss() -> Tensor:
        hidden, _ = decoder(TOKENS, POSITIONS, CausalAttention(), routing=routing)
        return decoder.logits(hidden).square().mean()

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
            above = loss()
            parameter.sub_(direction, alpha=2e-6)
            below = loss()
            parameter.add_(direction, alpha=1e-6)
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        assert float(above - below) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-7), name


@torch.no_grad()
def test_copies_and_moves_keep_slots_and_parameters_together() -> None:
    """The layers hold their weights in plain slots; a copy or a move must not leave the slots behind."""
    decoder = tiny("deepseek_v3")
    twin = copy.deepcopy(decoder).to("cpu", torch.float64)
    assert len({id(p) for p in twin.parameters()} & {id(p) for p in decoder.parameters()}) == 0
    for block in twin.blocks:
        assert block.attn_norm.dtype == torch.float64
    moe = twin.blocks[1].mlp
    assert isinstance(moe, Moe)
    assert moe.router is dict(twin.named_parameters())["layers.1.moe.router"]
    assert moe.correction_bias is dict(twin.named_parameters())["layers.1.moe.correction_bias"]
    assert twin.blocks[0].next_norm is twin.blocks[1].attn_norm
    assert twin.blocks[1].next_norm is twin.norm
    expected, _ = decoder(TOKENS, POSITIONS, CausalAttention())
    hidden, _ = twin(TOKENS, POSITIONS, CausalAttention())
    torch.testing.assert_close(hidden.float(), expected, atol=1e-4, rtol=1e-4)
