"""Fast arithmetic against its slow twin: closed-form backwards, adapted maps, experts; routing as a value."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_layers import experts_loop
from torch import Tensor

from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from ostinato.model.lora import Lora, lora_linear
from ostinato.model.moe import (
    ExpertLora,
    choose_experts,
    compute_routing_margins,
    experts,
    grouped_linear,
    route,
)
from ostinato.model.ops import TORCH_OPS


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x1, x2) as a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[:, None, :half]
    return torch.cat((turned.real, turned.imag), dim=-1)


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    theta = normal(rows, dim // 2, seed=9)
    return torch.cat((theta, theta), -1).cos(), torch.cat((theta, theta), -1).sin()


def test_elementwise_forwards() -> None:
    x, w = normal(5, 3, 8), normal(8, seed=1)
    cos, sin = angles(5, 8)
    torch.testing.assert_close(rms_norm(x, w, 1e-3), naive_rms_norm(x, w, 1e-3))
    torch.testing.assert_close(rope(x, cos, sin), naive_rope(x, cos, sin))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(silu_mul(x), gate / (1 + (-gate).exp()) * up)
    normed, total = add_rms_norm(x, x * 2, w, 1e-3)
    torch.testing.assert_close(total, x * 3)
    torch.testing.assert_close(normed, naive_rms_norm(x * 3, w, 1e-3))


def test_closed_form_backwards_match_finite_differences() -> None:
    x, w = normal(3, 2, 6, grad=True), normal(6, seed=1, grad=True)
    cos, sin = angles(3, 6)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, w))
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(silu_mul, (normal(4, 10, grad=True),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_sampling_run_the_same_arithmetic(dtype: torch.dtype) -> None:
    """The first importance ratio is exactly 1 only if autograd changes no bit of a forward."""
    x, w = normal(7, 4, 16, dtype=dtype), normal(16, seed=1, dtype=dtype)
    cos, sin = (t.to(dtype) for t in angles(7, 16))
    calls = [lambda: rms_norm(x, w, 1e-5), lambda: rope(x, cos, sin), lambda: silu_mul(x)]
    for call in calls:
        with torch.no_grad():
            sampled = call()
        assert torch.equal(sampled, call())


def test_rms_norm_rounds_before_it_scales() -> None:
    """transformers rounds the normalised value to bf16 before it multiplies by the weight."""
    x, w = normal(64, 32, dtype=torch.bfloat16), normal(32, seed=1, dtype=torch.bfloat16)
    wide = x.float()
    expected = w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, w, 1e-5), expected)


def test_linear_can_accumulate_in_fp32() -> None:
    x, w = normal(3, 300, dtype=torch.bfloat16), normal(5, 300, seed=1, dtype=torch.bfloat16)
    out = TORCH_OPS.linear(x, w, None, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ w.float().T)


@pytest.mark.parametrize("bias", [False, True])
def test_lora_linear_is_the_plain_composition(bias: bool) -> None:
    x, w, a, b = (normal(*s, seed=i, grad=i != 1) for i, s in enumerate([(6, 5), (7, 5), (3, 5), (7, 3)]))
    offset = normal(7, seed=8) if bias else None
    plain = F.linear(x, w, offset) + 0.7 * (x @ a.T) @ b.T
    fast = lora_linear(x, w, offset, Lora(a, b, 0.7))
    torch.testing.assert_close(fast, plain)
    upstream = normal(6, 7, seed=9)
    expected = torch.autograd.grad(plain, (x, a, b), upstream)
    torch.testing.assert_close(torch.autograd.grad(fast, (x, a, b), upstream), expected)


def test_lora_linear_also_trains_the_base() -> None:
    x, w, a, b = (normal(*s, seed=i, grad=True) for i, s in enumerate([(6, 5), (7, 5), (3, 5), (7, 3)]))
    lora_linear(x, w, None, Lora(a, b, 0.7)).sum().backward()
    assert w.grad is not None and a.grad is not None


def expert_lora(scheme: str, count: int, dim: int, width: int, rank: int, dtype: torch.dtype) -> ExpertLora:
    per_expert = scheme == "per_expert"
    return ExpertLora(
        normal(*([count] if per_expert else []), 2 * rank, dim, seed=11, dtype=dtype, grad=True),
        normal(count, 2 * width, 2 * rank, seed=12, dtype=dtype, grad=True),
        normal(count, rank, width, seed=13, dtype=dtype, grad=True),
        normal(*([count] if per_expert else []), dim, rank, seed=14, dtype=dtype, grad=True),
        0.3,
    )


@pytest.mark.parametrize("scheme", ["none", "shared_outer", "per_expert"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grouped_experts_are_the_loop(scheme: str, dtype: torch.dtype) -> None:
    count, dim, width, rank, rows, k = 5, 8, 12, 4, 9, 2
    x = normal(rows, dim, dtype=dtype, grad=True)
    weights = normal(rows, k, seed=3, dtype=dtype, grad=True)
    ids = torch.stack(
        [torch.randperm(count, generator=torch.Generator().manual_seed(i))[:k] for i in range(rows)]
    )
    gate_up = normal(count, 2 * width, dim, seed=4, dtype=dtype)
    down = normal(count, dim, width, seed=5, dtype=dtype)
    lora = None if scheme == "none" else expert_lora(scheme, count, dim, width, rank, dtype)
    fast, slow = (f(x, ids, weights, gate_up, down, lora) for f in (experts, experts_loop))
    rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (1e-9, 1e-9)
    torch.testing.assert_close(fast, slow, rtol=rtol, atol=atol)
    leaves = [x, weights, *(lora[:4] if lora else ())]
    upstream = normal(rows, dim, seed=6, dtype=dtype)
    ours, expected = (torch.autograd.grad(out, leaves, upstream) for out in (fast, slow))
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_grouped_linear_with_any_group_sizes(sizes: list[int], dtype: torch.dtype) -> None:
    x, weight = normal(sum(sizes), 8, dtype=dtype), normal(len(sizes), 4, 8, seed=1, dtype=dtype)
    out = grouped_linear(x, weight, torch.tensor(sizes).cumsum(0).to(torch.int32))
    owner = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    expected = (
        torch.stack([weight[e] @ row for e, row in zip(owner, x, strict=True)])
        if owner
        else x.new_zeros(0, 4)
    )
    torch.testing.assert_close(out, expected)


# ---- routing as a value: the choice, the replay of a choice, and what cannot be a choice


QWEN = MoEConfig(num_experts=8, top_k=3, intermediate_size=4, layers=(0, 1), norm_topk=True)
OLMOE = replace(QWEN, norm_topk=False)
DEEPSEEK = replace(
    QWEN, scoring=Scoring.SIGMOID, scaling=2.5, num_groups=4, topk_groups=2, correction_bias=True
)
BIAS = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.5, -0.5, 0.1, 0.0])


def logits(rows: int, seed: int = 0, experts: int = 8) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def test_softmax_then_top_k_by_hand() -> None:
    row = torch.tensor([[math.log(p) for p in (0.1, 0.4, 0.05, 0.2, 0.05, 0.1, 0.06, 0.04)]])
    ids, weights, _ = route(row, replace(OLMOE, top_k=2))
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.2]]))
    _, normalised, _ = route(row, replace(QWEN, top_k=2))
    torch.testing.assert_close(normalised, torch.tensor([[2 / 3, 1 / 3]]))


def test_group_limit_and_correction_bias_by_hand() -> None:
    """Groups (0 1) (2 3) (4 5) (6 7) score by their best two, 0.9 0.8 1.3 1.0 with the bias: the last win.

    Expert 0 has the best raw score but its group loses; the weights come from raw scores, without the bias.
    """
    scores = torch.tensor([[0.8, 0.1, 0.4, 0.4, 0.3, 0.5, 0.7, 0.2]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.1, 0.0])
    moe = replace(DEEPSEEK, top_k=2)
    assert sorted(choose_experts(scores, moe, bias)[0].tolist()) == [4, 6]
    ids, weights, _ = route(scores.logit(), moe, bias)
    raw = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert raw == pytest.approx({4: 2.5 * 0.3 / 1.0, 6: 2.5 * 0.7 / 1.0})


@pytest.mark.parametrize("moe", [QWEN, OLMOE, DEEPSEEK])
@pytest.mark.parametrize("experts", [6, 8, 16])
def test_a_token_is_routed_alike_in_every_batch(moe: MoEConfig, experts: int) -> None:
    """torch's sigmoid rounds otherwise in what is left over after whole vectors: a token's weights, and then
    its log-probabilities, were off by a bit when others were in the batch (DeepSeek's router)."""
    moe, x = replace(moe, num_experts=experts, num_groups=1, topk_groups=1), logits(41, experts=experts)
    ids, weights, _ = route(x, moe)
    for rows in range(1, 41):
        some_ids, some_weights, _ = route(x[:rows], moe)
        assert torch.equal(some_ids, ids[:rows]) and torch.equal(some_weights, weights[:rows])


@pytest.mark.parametrize("moe", [QWEN, replace(DEEPSEEK, num_groups=1, topk_groups=1)])
def test_a_margin_is_what_a_logit_must_move_for_a_flip(moe: MoEConfig) -> None:
    """The last expert chosen falls by a little less, and stays; by a little more, and is left out."""
    x = logits(30)
    ids, gaps = choose_experts(x, moe, None), compute_routing_margins(x, moe)
    assert (gaps > 0).all()
    for share, stays in ((0.99, True), (1.01, False)):
        moved = x.clone()
        moved[torch.arange(30), ids[:, -1]] -= share * gaps
        same = (choose_experts(moved, moe, None).sort().values == ids.sort().values).all(dim=-1)
        assert (same == stays).all()


def test_a_margin_with_a_correction_bias_is_never_too_large() -> None:
    """A sigmoid's slope is at most 1/4: a logit that moves by less than the margin flips no choice."""
    x, moe = logits(200), replace(DEEPSEEK, num_groups=1, topk_groups=1)
    ids, gaps = choose_experts(x.sigmoid(), moe, BIAS), compute_routing_margins(x, moe, BIAS)
    assert (gaps >= 0).all()
    moved = x.clone()
    moved[torch.arange(200), ids[:, -1]] -= 0.99 * gaps
    assert torch.equal(choose_experts(moved.sigmoid(), moe, BIAS).sort().values, ids.sort().values)


def test_no_margin_where_every_expert_is_chosen() -> None:
    assert compute_routing_margins(logits(3), replace(QWEN, top_k=8)).isnan().all()
    only_one_group = replace(DEEPSEEK, topk_groups=1, top_k=2, num_groups=4)
    assert compute_routing_margins(logits(3), only_one_group, BIAS).isnan().all()
