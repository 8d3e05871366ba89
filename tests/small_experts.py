"""A mixture of experts on one rank and in parts: cases, and what each rank makes of its part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.model.moe import ExpertLora, experts
from ostinato.parallel import placement
from ostinato.parallel.experts import ExpertParallel

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
        make = placement.contiguous if self.contiguous else placement.scattered
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


def output_here(case: Case, links: Any, rank: int, tensor: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """(leaves, own rows of the output). A part is cut from a leaf of the whole size, so gradients are zero
    elsewhere, and their sum over ranks is the gradient, whether it was kept once or by all."""
    leaves, owner = case.tensors(), case.owner()
    start = sum(case.rows[:rank])
    own = slice(start, start + case.rows[rank])
    kept = torch.from_numpy(np.flatnonzero(owner[0] == links.place("e")))
    slots = torch.from_numpy(placement.slots(owner)[0])[case.ids()[own]]
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
    return leaves, out


def on_this_rank(case: Case, links: Any, rank: int, tensor: int = 1) -> dict[str, Tensor]:
    leaves, out = output_here(case, links, rank, tensor)
    start = sum(case.rows[:rank])
    return results(leaves, out, case.slopes()[start : start + case.rows[rank]])


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
