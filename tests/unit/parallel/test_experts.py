"""Experts kept by several ranks give what they give on one: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_experts import (
    HIDDEN,
    SCHEMES,
    Case,
    assert_same,
    on_one_rank,
    on_this_rank,
    together,
)
from thread_links import ThreadLinks, on_threads
from torch import Tensor

from ostinato.parallel.experts import Copies


def on_all_threads(case: Case, tensor: int = 1) -> dict[str, Tensor]:
    def work(links: ThreadLinks) -> dict[str, Tensor]:
        return on_this_rank(case, links, links.place("e") * tensor + links.place("t"), tensor)

    return together(on_threads(len(case.rows), work, tensor=tensor))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, kept = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    num = ranks * kept
    return Case(
        rows=tuple(draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))),
        num=num,
        top_k=draw(st.integers(1, min(4, num))),
        ranks=ranks,
        scheme=draw(st.sampled_from(SCHEMES)),
        skewed=draw(st.booleans()),
        contiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases())
def test_ranks_give_what_one_rank_gives(case: Case) -> None:
    if not sum(case.rows):
        return
    assert_same(on_all_threads(case), on_one_rank(case), 1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_widths_cut_over_tensor_ranks(scheme: str, ranks: int) -> None:
    """The width of every expert over two tensor ranks: their rows are gathered, partial sums scattered."""
    case = Case(rows=(5, 5, 3, 3)[: 2 * ranks], num=4, top_k=3, ranks=ranks, scheme=scheme)
    assert_same(on_all_threads(case, tensor=2), on_one_rank(case), 1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [(7, 6), (13, 0)])
@pytest.mark.parametrize("skewed", [False, True])
def test_in_fp32_within_rounding(scheme: str, rows: tuple[int, ...], skewed: bool) -> None:
    """The grouped product takes these; with all rows to one expert, some rank gets none at all."""
    case = Case(
        rows=rows, num=4, top_k=1 if skewed else 2, ranks=2, scheme=scheme, skewed=skewed, dtype=torch.float32
    )
    assert_same(on_all_threads(case), on_one_rank(case), 5e-6)


def test_no_row_anywhere() -> None:
    """Nothing to do is done together, forward and backward: nobody waits for a rank that has left."""
    case = Case(rows=(0, 0), num=4, top_k=2, ranks=2, dtype=torch.float32)
    found = on_all_threads(case)
    assert found["out"].shape == (0, HIDDEN)
    assert not any(value.any() for value in found.values())


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), unique=True, max_size=20),
    st.booleans(),
)
def test_copies_by_the_book(pairs: list[tuple[int, int]], weighted: bool) -> None:
    """spread and collect are transposes of each other, and what a loop over the pairs gives."""
    row, destination = (torch.tensor([pair[n] for pair in pairs], dtype=torch.int64) for n in (0, 1))
    copies = Copies.of(row, destination, 6)
    order = sorted(range(len(pairs)), key=lambda n: pairs[n][1])  # stable
    assert copies.order.tolist() == order
    assert copies.row.tolist() == [pairs[n][0] for n in order]
    for turn in copies.turns:
        assert len(set(copies.row[turn].tolist())) == len(turn)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(copies.spread(x), x[copies.row])
    y = torch.randn(len(pairs), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(pairs), dtype=torch.float64, requires_grad=True) if weighted else None
    wanted = torch.zeros(6, 3, dtype=torch.float64)
    for n, one in enumerate(order):
        scale = 1.0 if weights is None else weights[n].item()
        wanted[pairs[one][0]] += scale * y[n].detach()
    torch.testing.assert_close(copies.collect(y, weights), wanted)
    inputs = (y,) if weights is None else (y, weights)
    assert torch.autograd.gradcheck(lambda *given: copies.collect(*given), inputs)
    assert torch.autograd.gradcheck(copies.spread, (x,))
