"""A pass with rows of several policies gives each row what a pass of its own policy would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import adapters_of, tiny_decoder

from ostinato.model import moe as twin
from ostinato.model.cuda import mixture, policies
from ostinato.model.cuda.paged import Tiles, cut_tiles
from ostinato.model.lora import stack_adapters
from ostinato.model.moe import ExpertLora
from ostinato.model.ops import TORCH_OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def owners_of(counts: list[int], room: int) -> tuple[np.ndarray, Tiles]:
    """Rows of places in any order, and tiles with room for more, as a graph has them."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32)[::-1], counts)
    tiles = np.concatenate((cut_tiles(owners, 1), np.zeros((2, room), np.int32)), axis=1)
    return owners, Tiles(*torch.from_numpy(tiles).to(DEVICE))


@settings(max_examples=10)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=3).filter(any),
    st.sampled_from([(8, 5, 1), (20, 70, 3), (33, 16, 17), (40, 8, 66)]),
    st.integers(0, 2),
    st.integers(0, 99),
)
def test_every_row_has_the_update_of_its_own(
    counts: list[int], sizes: tuple[int, int, int], room: int, seed: int
) -> None:
    """With several splits of the inputs, rows inside of wider ones, and NaN behind the last."""
    (inputs, columns, rank), total = sizes, sum(counts)
    owners, tiles = owners_of(counts, room)
    x, y = drawn(seed, total + 3, inputs + 2), drawn(seed + 1, total + 3, columns)
    a, b = drawn(seed + 2, len(counts), rank, inputs), drawn(seed + 3, len(counts), columns, rank)
    x[total:], y[total:] = torch.nan, torch.nan
    x, y = x[:total, 1:-1], y[:total]
    want = torch.cat(
        [TORCH_OPS.add_lora(y[[t]], x[[t]], a[p], b[p], 0.5) for t, p in enumerate(owners.tolist())]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "SPAN", 16)
        patch.setattr(policies, "DEPTH", 16)
        got = policies.add_lora(y, x, a, b, 0.5, owners=torch.from_numpy(owners).to(DEVICE), tiles=tiles)
    assert got is y and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
    st.sampled_from([(2, 1), (4, 2)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_row_has_the_experts_of_its_own(
    counts: list[int], sizes: tuple[int, int], shared: bool, seed: int
) -> None:
    (num, top_k), (hidden, width, rank), count = sizes, (20, 9, 3), len(counts)
    owners, _ = owners_of(counts, 0)
    total = len(owners)
    x, weights = drawn(seed, total, hidden), drawn(seed + 1, total, top_k).softmax(1)
    ids = drawn(seed + 2, total, num).topk(top_k, dim=1).indices
    gate_up, down = drawn(seed + 3, num, 2 * width, hidden), drawn(seed + 4, num, hidden, width)
    own = () if shared else (num,)
    shapes = (*own, 2 * rank, hidden), (num, 2 * width, 2 * rank), (num, rank, width), (*own, hidden, rank)
    factors = [drawn(seed + 5 + i, count, *shape) for i, shape in enumerate(shapes)]
    with torch.no_grad():
        found = mixture.experts(
            x, ids, weights, gate_up, down, ExpertLora(*factors, scale=0.5),
            owners=torch.from_numpy(owners).to(DEVICE),
        )  # fmt: skip
        wide = [tensor.double() for tensor in (x, weights, gate_up, down, *factors)]
        want = torch.cat(
            [
                twin.experts(
                    wide[0][[t]], ids[[t]], wide[1][[t]], wide[2], wide[3],
                    ExpertLora(*(factor[p] for factor in wide[4:]), scale=0.5),
                )
                for t, p in enumerate(owners.tolist())
            ]
        )  # fmt: skip
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dense", [True, False])
def test_policies_of_any_ranks_targets_and_schemes_are_stacked(dense: bool) -> None:
    """Each place of the stack is its policy, with the scale in B, and zeros up to the largest rank."""
    decoder = tiny_decoder(num_hidden_layers=2)
    targets = ("attn",) if dense else ("attn", "experts", "router")
    options: list[dict[str, Any]] = [
        {"rank": 2, "alpha": 3.0, "targets": targets, "expert_scheme": "shared_outer"},
        {"rank": 5, "alpha": 8.0, "targets": ("attn.q", *targets[1:2]), "expert_scheme": "per_expert"},
    ]
    each = [adapters_of(decoder, seed, 0.3, **option) for seed, option in enumerate(options)]
    whole = stack_adapters([each[0], None, each[1]], decoder.config, torch.float32)
    for layer, ours in enumerate(whole.layers):
        for place, adapters in ((0, each[0]), (1, None), (2, each[1])):
            own = None if adapters is None else adapters.prepare(torch.float32).layers[layer]
            for name in ("qkv", "o", "router"):
                stack, lora = getattr(ours, name), own and getattr(own, name)
                if stack is None:
                    continue
                x = drawn(0, 4, stack.a.shape[-1])
                found = stack.scale * x @ stack.a[place].T @ stack.b[place].T
                want = lora.scale * x @ lora.a.T @ lora.b.T if lora else torch.zeros_like(found)
                torch.testing.assert_close(found, want)
            assert (ours.experts is None) == dense
            if ours.experts is not None:
                found = ours.experts.down_b[place] @ ours.experts.down_a[place]
                lora = own and own.experts
                want = lora.scale * lora.down_b @ lora.down_a if lora else torch.zeros_like(found)
                torch.testing.assert_close(found, want.expand_as(found))
