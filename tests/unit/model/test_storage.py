"""Matrices stored in bf16 under fp32 arithmetic: the numbers are those of an fp32 model of the same values,
in the forward and in the backward, by torch and by the native kernels, in half the memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from worlds import KERNELS, VOCAB, adapters_of, tiny_moe

from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.heads import head_products


@pytest.fixture(params=KERNELS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The arithmetic of a trainer."""
    return request.param.training if request.param else TORCH_OPS


def pair() -> tuple[Decoder, Decoder]:
    """The same values, matrices stored in bf16 and in fp32."""
    config = parse_config(
        tiny_moe(
            hidden_size=48,
            intermediate_size=160,
            moe_intermediate_size=136,
            mlp_only_layers=[0],
            initializer_range=0.2,
        )
    )
    narrow = Decoder(config, storage=torch.bfloat16).init_weights(0)
    wide = Decoder(config)
    with torch.no_grad():
        for ours, theirs in zip(wide.parameters(), narrow.parameters(), strict=True):
            ours.copy_(theirs)
    return narrow, wide


def gradients(decoder: Decoder, ops: Ops, adapted: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, and the gradients of all factors (of the embedded input without adapters)."""
    adapters = adapters_of(decoder, 0) if adapted else None
    factors = [factor for each in adapters.tensors.values() for factor in each] if adapters else []
    for factor in factors:
        factor.requires_grad_(True)
    tokens = torch.arange(24) % VOCAB
    start = decoder.embed[tokens].to(decoder.dtype).detach().requires_grad_(True)
    hidden, _ = decoder.forward(
        tokens, torch.arange(24), CausalAttention(), adapters=adapters, ops=ops, residual=start
    )
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), [leaf.grad for leaf in (start, *factors) if leaf.grad is not None]


@pytest.mark.parametrize("adapted", [True, False])
def test_the_numbers_are_those_of_the_same_values_in_fp32(ops: Ops, adapted: bool) -> None:
    narrow, wide = pair()
    (ours, own), (twin, theirs) = gradients(narrow, ops, adapted), gradients(wide, TORCH_OPS, adapted)
    assert ours.dtype == torch.float32 and len(own) == len(theirs) > 0
    # sums of at most 160 products in another order, a few dozen of them in a row
    bound = 40 * 160 * 2**-24
    for found, wanted in zip([ours, *own], [twin, *theirs], strict=True):
        assert (found - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max()))


def test_the_head_multiplies_in_fp32(ops: Ops) -> None:
    """The slopes of logits were rounded to the type of the head: stored in bf16, a gradient in bf16."""
    narrow, wide = pair()
    logits, slopes = head_products(narrow, ops)
    if logits is None or slopes is None:
        pytest.skip("both products widen the head")
    hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))
    found = logits(hidden, narrow.head_weight)
    torch.testing.assert_close(found, hidden @ wide.head_weight.T, rtol=1e-5, atol=48 * 2**-24 * 10)
    back = slopes(found, narrow.head_weight)
    scale = float(found.abs().sum(-1).max())
    assert (back - found @ wide.head_weight).abs().max() <= 61 * 2**-24 * scale


def test_half_the_memory_and_what_stays_wide() -> None:
    narrow, wide = pair()
    assert narrow.storage == torch.bfloat16 and wide.storage == torch.float32
    assert narrow.dtype == wide.dtype == torch.float32
    kinds = {p.dim() > 1: p.dtype for p in narrow.parameters()}
    assert kinds == {True: torch.bfloat16, False: torch.float32}
