"""Whose gradients are summed over whom, and who has which part of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_runs import EVERYTHING, LAYOUTS, MODELS

from ostinato.model.config import parse_config
from ostinato.model.lora import AdapterSpec, ExpertScheme, adapter_shapes
from ostinato.model.share import is_expert, placed
from ostinato.parallel.fingerprint import parameter_shapes
from ostinato.parallel.layout import Layout
from ostinato.parallel.leaves import summed_over
from ostinato.parallel.seats import keeps, seats
from ostinato.parallel.shares import shares_of


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    """All parameters, and all factors of both expert schemes."""
    config = parse_config(MODELS[model])
    found = parameter_shapes(config)
    for scheme in ExpertScheme:
        spec = AdapterSpec(rank=4, targets=EVERYTHING, expert_scheme=scheme)
        for name, pair in adapter_shapes(config, spec).items():
            found |= {f"{name}.{part}": shape for part, shape in zip("AB", pair, strict=True)}
    return found


@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(MODELS)), st.data())
def test_parts_cover_a_tensor_once(text: str, model: str, data: st.DataObject) -> None:
    layout, config = Layout.parse(text), parse_config(MODELS[model])
    shares = [shares_of(layout, config, rank) for rank in range(layout.world)]
    shapes = tensors(model)
    name = data.draw(st.sampled_from(sorted(shapes)))
    covered = np.zeros(shapes[name], int)
    for seat in seats(config, shares, name, shapes[name]):
        grid = np.ix_(*([index for span in spans for index in span] for spans in seat.spans))
        covered[grid] += 1
    assert (covered == 1).all()


@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(MODELS)), st.data())
def test_a_gradient_is_summed_over_all_that_keep_the_same_part(
    text: str, model: str, data: st.DataObject
) -> None:
    """Following the axes of a leaf from one rank leads to every rank of its stage with the same part, and no
    other."""
    layout, config = Layout.parse(text), parse_config(MODELS[model])
    shapes = tensors(model)
    name = data.draw(st.sampled_from(sorted(shapes)))
    shape, shares = shapes[name], [shares_of(layout, config, rank) for rank in range(layout.world)]
    keepers = [rank for rank in range(layout.world) if any(keeps(config, one, name) for one in shares[rank])]
    parts = {rank: placed(config, shares[rank][0], name, shape) for rank in keepers}
    rank = data.draw(st.sampled_from(keepers))
    reached = {rank}
    for axis in summed_over(name, shape, shares[rank][0], layout):
        reached = {other for one in reached for other in layout.group(axis, one)}
    stage = layout.coords(rank).pipeline
    same = {
        other for other in keepers if parts[other] == parts[rank] and layout.coords(other).pipeline == stage
    }
    assert reached == same
    if is_expert(name, shape) and layout.expert_tensor == 1:
        assert len(reached) == layout.expert_replicas


@pytest.mark.parametrize("text", ["d2f2", "d4e2f2", "d4t2e8f2"])
def test_a_piece_is_summed_over_the_ranks_that_have_the_same_piece(text: str) -> None:
    layout, config = Layout.parse(text), parse_config(MODELS["moe"])
    shapes = parameter_shapes(config)
    for name in ("layers.0.attn.qkv", "layers.0.moe.router"):
        share = shares_of(layout, config, 0)[0]
        reached = {0}
        for axis in summed_over(name, shapes[name], share, layout, in_pieces=True):
            reached = {other for one in reached for other in layout.group(axis, one)}
        whole = name.endswith("router") or layout.tensor == 1
        assert len(reached) == layout.stage_ranks // layout.shard // (1 if whole else layout.tensor)
