"""Experts of a sampler's pass in Triton are their torch twins: the choice, the sort, products, the sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.model import moe as twin
from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.cuda import mixture as cuda
from ostinato.model.cuda.elementwise import silu_mul
from ostinato.model.moe import ExpertLora

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mixture(experts: int, top_k: int, scoring: Scoring, norm: bool) -> MoEConfig:
    return MoEConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=8,
        layers=(0,),
        scoring=scoring,
        norm_topk=norm,
        scaling=1.0 if norm else 2.5,
    )


@settings(max_examples=12)
@given(
    st.integers(1, 7),
    st.sampled_from([(4, 2), (5, 5), (12, 3), (8, 1)]),
    st.sampled_from(list(Scoring)),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_choice(rows: int, sizes: tuple[int, int], scoring: Scoring, flag: bool, seed: int) -> None:
    moe, logits = mixture(*sizes, scoring, flag), 2 * draw(seed, rows, sizes[0])
    bias = draw(seed + 1, sizes[0]) if flag else None
    with torch.no_grad():
        ids, weights, native = cuda.route(logits, moe, bias)
        expected, theirs, _ = twin.route(logits, moe, bias)
    assert ids is native and torch.equal(ids, expected)
    assert (weights - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_ids_are_in_range_whatever_the_logits_are() -> None:
    logits = torch.full((3, 6), torch.nan, device=DEVICE)
    logits[1], logits[2, 1:] = -torch.inf, 0.0
    with torch.no_grad():
        ids, _, _ = cuda.route(logits, mixture(6, 4, Scoring.SOFTMAX, True))
    assert ((ids >= 0) & (ids < 6)).all() and all(len(set(row)) == 4 for row in ids.tolist())


@settings(max_examples=12)
@given(st.integers(1, 9), st.sampled_from([(3, 1), (4, 2), (9, 3)]), st.integers(0, 99))
def test_the_sort(rows: int, sizes: tuple[int, int], seed: int) -> None:
    experts, top_k = sizes
    ids = draw(seed, rows, experts).topk(top_k, dim=1).indices
    found = cuda.sort_pairs(ids, experts)
    expected = ids.flatten().sort(stable=True)
    assert torch.equal(found.order.long(), expected.indices)
    assert torch.equal(found.places[found.order.long()].cpu(), torch.arange(ids.numel(), dtype=torch.int32))
    numbers = torch.arange(experts, device=DEVICE)
    assert torch.equal(found.spans[1].long(), torch.searchsorted(expected.values, numbers, right=True))
    assert torch.equal(found.spans[0, 1:], found.spans[1, :-1]) and found.spans[0, 0] == 0


@pytest.mark.slow
@settings(max_examples=16)
@given(
    st.integers(1, 20),
    st.sampled_from([(2, 1), (4, 2), (6, 3)]),
    st.sampled_from(["none", "shared_outer", "per_expert"]),
    st.sampled_from([(8, 8), (20, 33), (70, 5)]),
    st.integers(0, 99),
)
def test_the_mixture(
    rows: int, sizes: tuple[int, int], scheme: str, widths: tuple[int, int], seed: int
) -> None:
    (num, top_k), (hidden, width), rank = sizes, widths, 1 + seed % 5
    x = draw(seed, rows, hidden)
    ids = draw(seed + 1, rows, num).topk(top_k, dim=1).indices
    weights = draw(seed + 2, rows, top_k).softmax(1)
    gate_up, down = draw(seed + 3, num, 2 * width, hidden), draw(seed + 4, num, hidden, width)
    lora = None
    if scheme != "none":
        own = (num,) if scheme == "per_expert" else ()
        lora = ExpertLora(
            draw(seed + 5, *own, 2 * rank, hidden),
            draw(seed + 6, num, 2 * width, 2 * rank),
            draw(seed + 7, num, rank, width),
            draw(seed + 8, *own, hidden, rank),
            0.5,
        )
    with torch.no_grad():
        found = cuda.experts(x, ids, weights, gate_up, down, lora)
        wide = None if lora is None else ExpertLora(*(f.double() for f in lora[:4]), scale=lora.scale)
        expected = twin.experts(x.double(), ids, weights.double(), gate_up.double(), down.double(), wide)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
def test_training_and_large_passes_take_the_twin(grad: bool) -> None:
    rows = 3 if grad else cuda.MAX_ROWS + 1
    x, gate_up, down = draw(0, rows, 8), draw(1, 2, 16, 8), draw(2, 2, 8, 8)
    ids, weights = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE), torch.ones(rows, 1, device=DEVICE)
    with torch.set_grad_enabled(grad):
        found = cuda.experts(x, ids, weights, gate_up, down)
        assert torch.equal(found, twin.experts(x, ids, weights, gate_up, down, gate=silu_mul))
        torch.testing.assert_close(found, twin.experts(x, ids, weights, gate_up, down), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, gate_up, down = draw(0, 9, 16), draw(1, 3, 16, 16), draw(2, 3, 16, 8)
    ids = draw(3, 9, 3).topk(2, dim=1).indices
    weights = draw(4, 9, 2).softmax(1)
    with torch.no_grad():
        whole = cuda.experts(x, ids, weights, gate_up, down)
        for row in (0, 4, 8):
            one = slice(row, row + 1)
            alone = cuda.experts(x[one], ids[one], weights[one], gate_up, down)
            # the matrix product of the interpreter is BLAS, where a row's place in a tile matters
            assert (alone[0] - whole[row]).abs().max() <= (0 if DEVICE == "cuda" else 1e-5)
