"""Experts kept by several ranks give what they give on one: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nouns import scattered
from thread_links import ThreadLinks, on_threads
from torch import Tensor

from ostinato.model.moe import ExpertLora, experts
from ostinato.parallel import placement
from ostinato.parallel.experts import Copies, ExpertParallel

HIDDEN, WIDTH, RANK = 8, 8, 4
SCHEMES = ("none", "per_expert", "shared_outer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows of every rank, their routing, and which rank keeps which of ``num`` experts."""

    rows: tuple[int, ...]  # by rank
    num: int
    top_k: int
    ranks: int  # that rows are exchanged among
    scheme: str = "shared_outer"
    skewed: bool = False  # all rows to the same experts
    contiguous: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Leaves by name: rows, weights, stored weights and factors of the whole model."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        total, E = sum(self.rows), self.num
        found = {"x": normal(total, HIDDEN), "weights": normal(total, self.top_k)}
        found |= {"gate_up": normal(E, 2 * WIDTH, HIDDEN), "down": normal(E, HIDDEN, WIDTH)}
        if self.scheme != "none":
            shared = self.scheme == "shared_outer"
            found["gate_up_a"] = normal(*(() if shared else (E,)), 2 * RANK, HIDDEN)
            found["gate_up_b"] = normal(E, 2 * WIDTH, 2 * RANK)
            found["down_a"] = normal(E, RANK, WIDTH)
            found["down_b"] = normal(*(() if shared else (E,)), HIDDEN, RANK)
        return {name: leaf.requires_grad_() for name, leaf in found.items()}

    def slopes(self) -> Tensor:
        """Of the loss by the output."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(sum(self.rows), HIDDEN, generator=generator, dtype=torch.float64).to(self.dtype)

    def ids(self) -> Tensor:
        """[T, K], distinct in a row."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        scores = torch.rand(1 if self.skewed else sum(self.rows), self.num, generator=generator)
        return scores.topk(self.top_k, dim=1).indices.expand(sum(self.rows), -1)

    def owner(self) -> np.ndarray:
        make = placement.place_contiguously if self.contiguous else scattered
        return make(1, self.num, self.ranks)


def lora_of(leaves: dict[str, Tensor]) -> ExpertLora | None:
    if "down_b" not in leaves:
        return None
    return ExpertLora(*(leaves[name] for name in ("gate_up_a", "gate_up_b", "down_a", "down_b")), scale=0.5)


def results(leaves: dict[str, Tensor], out: Tensor, slopes: Tensor) -> dict[str, Tensor]:
    (out * slopes).sum().backward()
    grads = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }
    return {"out": out.detach(), **grads}


def on_one_rank(case: Case) -> dict[str, Tensor]:
    leaves = case.tensors()
    x, weights, gate_up, down = (leaves[name] for name in ("x", "weights", "gate_up", "down"))
    out = experts(x, case.ids(), weights, gate_up, down, lora_of(leaves))
    return results(leaves, out, case.slopes())


def on_this_rank(case: Case, links: Any, rank: int, tensor: int = 1) -> dict[str, Tensor]:
    """A part is cut from a leaf of the whole size, so gradients are zero elsewhere, and their sum over ranks
    is the gradient, whether it was kept once or by all."""
    leaves, owner = case.tensors(), case.owner()
    start = sum(case.rows[:rank])
    own = slice(start, start + case.rows[rank])
    kept = torch.from_numpy(np.flatnonzero(owner[0] == links.place("e")))
    slots = torch.from_numpy(placement.number_slots(owner)[0])[case.ids()[own]]
    width, column = WIDTH // tensor, links.place("t") if tensor > 1 else 0
    part = slice(column * width, (column + 1) * width)

    def cut(name: str) -> Tensor:
        leaf = leaves[name]
        leaf = leaf[kept] if leaf.dim() == 3 else leaf
        if name in ("gate_up", "gate_up_b"):
            return leaf.unflatten(-2, (2, WIDTH))[..., part, :].flatten(-3, -2)
        return leaf[..., part] if name in ("down", "down_a") else leaf

    here = {name: cut(name) for name in leaves if name not in ("x", "weights")}
    parallel = ExpertParallel(links=links, tensor=tensor)
    out = parallel(
        leaves["x"][own], slots, leaves["weights"][own], here["gate_up"], here["down"], lora_of(here)
    )
    return results(leaves, out, case.slopes()[own])


def together(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    summed = {name: sum(part[name] for part in parts) for name in parts[0] if name != "out"}
    return {"out": torch.cat([part["out"] for part in parts]), **summed}  # type: ignore[dict-item]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], within: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=within * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


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
    """Nothing to do is done together, forward and backward: no rank waits for one that has left."""
    case = Case(rows=(0, 0), num=4, top_k=2, ranks=2, dtype=torch.float32)
    found = on_all_threads(case)
    assert found["out"].shape == (0, HIDDEN)
    assert not any(value.any() for value in found.values())


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), unique=True, max_size=20), st.booleans())
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
