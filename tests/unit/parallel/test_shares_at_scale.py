"""A model of 1T parameters over 64 ranks, without its weights: every rank's share on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
import torch.distributed as dist

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.share import Share, is_cut, is_expert, placed, size_of
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.shares import shares_of
from ostinato.plan.named import find_model

# GB of bf16 weights at the fullest stage, as the reference has them
TABLE = {
    "p8t8e8": 34.4,
    "p4d2t8e16": 34.7,
    "p8d2t4e8": 35.0,
    "p4d8t2e16": 37.3,
    "p8d8e8": 38.5,
    "p2d4t8e32": 34.2,
    "d8t8e64": 35.0,
    "d64e64": 54.6,
}
OTHERS = ("p2d4t8e4x8", "p8d4t2e4x2", "p4v2d2t8e16")
HIDDEN = 7168
EXPERT = 3 * HIDDEN * 2048  # parameters of one
PARAMETERS = 1_026_408_232_448  # Kimi K2, correction biases included


@cache
def kimi() -> ModelConfig:
    return find_model("kimi-k2").config


@cache
def whole_shapes() -> dict[str, tuple[int, ...]]:
    whole = Decoder(kimi(), device="meta")
    return {name: tuple(weight.shape) for name, weight in whole.named_parameters()}


def published(layout: Layout) -> float:
    """The reference's formula, in GB: n layers of experts in a stage, one embedding matrix at each end; all
    but experts is cut by t, and there are no routers, norms or dense layers."""
    n, ends = math.ceil(61 / layout.pipeline), 2 if layout.pipeline == 1 else 1
    rest = n * (101.1e6 + EXPERT) + ends * 163840 * HIDDEN
    return 2 * (n * EXPERT * 384 / layout.expert + rest / layout.tensor) / 1e9


def by_hand(layout: Layout) -> float:
    """The same with what it leaves out: layers as they are dealt, the first of them dense; routers and
    down-projections to latents whole on every rank. Norms and biases are a few KB."""
    latents, heads = HIDDEN * (1536 + 576), 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * HIDDEN
    sizes = []
    for stage, span in enumerate(layout.chunk_layers(61)):
        dense, ends = 0 in span, (stage == 0) + (stage == layout.pipeline - 1)
        moe = len(span) - dense
        cut = len(span) * heads + moe * EXPERT + dense * 3 * HIDDEN * 18432 + ends * 163840 * HIDDEN
        whole = len(span) * latents + moe * 384 * HIDDEN
        sizes.append(moe * EXPERT * 384 / layout.expert + cut / layout.tensor + whole)
    return 2 * max(sizes) / 1e9


def shares(layout: Layout) -> Iterator[tuple[int, Share]]:
    for rank in range(layout.world):
        for share in shares_of(layout, kimi(), rank):
            yield rank, share


def replicas(layout: Layout, share: Share, name: str, shape: tuple[int, ...]) -> int:
    """How many ranks keep the same part of a tensor, from what the axes mean."""
    if is_expert(name, shape):
        uncut = layout.expert_tensor if not is_cut(share, name, shape) else 1
        return layout.expert_replicas * uncut
    return layout.stage_ranks if not is_cut(share, name, shape) else layout.data * layout.context


@pytest.mark.slow
@pytest.mark.parametrize("text", [*TABLE, *OTHERS])
def test_every_rank_has_what_placed_says(text: str) -> None:
    """Shape by shape on the meta device; all ranks together have the model, as often as there are replicas.

    Where 64 whole depths would be made, ranks that keep as much of the same layers share one.
    """
    layout, shapes = Layout.parse(text), whole_shapes()
    assert layout.world == 64 and sum(map(prod, shapes.values())) == PARAMETERS
    total, by_rank = 0.0, [0] * 64
    made: dict[Share, dict[str, tuple[int, ...]]] = {}
    seen: dict[Share, tuple[int, float]] = {}
    for rank, share in shares(layout):
        one = share if layout.pipeline == 8 else alike(share)
        if one not in made:
            part = Decoder(kimi(), device="meta", dtype=torch.bfloat16, share=one)
            made[one] = {name: tuple(weight.shape) for name, weight in part.named_parameters()}
        if share not in seen:  # replicas are alike
            distinct = 0.0
            for name, shape in made[one].items():
                kept = placed(kimi(), share, name, shapes[name])
                assert shape == tuple(sum(map(len, spans)) for spans in kept), name
                distinct += prod(shape) / replicas(layout, share, name, shapes[name])
            seen[share] = sum(map(prod, made[one].values())), distinct
        by_rank[rank] += seen[share][0]
        total += seen[share][1]
    assert total == pytest.approx(PARAMETERS, rel=1e-12)
    if text in TABLE:
        assert published(layout) == pytest.approx(TABLE[text], abs=0.06)
        assert 2 * max(by_rank) / 1e9 == pytest.approx(by_hand(layout), rel=1e-4)


def alike(share: Share) -> Share:
    """One that keeps as much of the same layers, and other parts of them."""
    ids = None if share.experts is None else (tuple(range(len(share.experts[0]))),) * 60
    return replace(share, tensor_rank=0, expert_tensor_rank=0, experts=ids)


def test_under_a_group_of_64_ranks() -> None:
    """torch's own groups of 64 ranks, of which 63 are fake: rank 0's mesh and its share."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = Layout.parse("p4d2t8e16")
    dist.init_process_group("fake", rank=17, world_size=64, store=FakeStore())
    try:
        mesh = Mesh(layout, "meta")
        sizes = {axis: mesh.size(axis) for axis in ("p", "d", "t", "e", "r", "s")}
        assert sizes == {"p": 4, "d": 2, "t": 8, "e": 16, "r": 1, "s": 16}
        assert all(dist.get_process_group_ranks(mesh.group(axis)) for axis, size in sizes.items() if size > 1)
        (share,) = shares_of(layout, kimi(), mesh.rank)
        part = Decoder(kimi(), device=mesh.device, dtype=torch.bfloat16, share=share)
        kept = (size_of(placed(kimi(), share, n, whole_shapes()[n])) for n, _ in part.named_parameters())
        assert sum(weight.numel() for weight in part.parameters()) == sum(kept)
    finally:
        dist.destroy_process_group()
