"""Layouts: one string, and who is where in it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.model.config import parse_config
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import AXES

SIZES = st.sampled_from((1, 2, 3, 4))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    data, tensor, pipeline, context = (draw(SIZES) for _ in range(4))
    cut = draw(st.sampled_from((1, tensor)))
    slots = data * context * (tensor if cut == 1 else 1)
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=draw(st.sampled_from([e for e in range(1, slots + 1) if slots % e == 0])),
        expert_tensor=cut,
        virtual=draw(st.sampled_from((1, 2))) if pipeline > 1 else 1,
        shard=draw(st.sampled_from([f for f in range(1, data + 1) if data % f == 0])),
    )


SMALL = layouts().filter(lambda layout: layout.world <= 48)  # where every rank looks at every other


@given(layouts())
def test_a_layout_is_its_string(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    for rank in range(layout.world):
        assert layout.rank(layout.coords(rank)) == rank


@settings(deadline=None)
@given(SMALL)
def test_groups_of_an_axis_cut_the_world(layout: Layout) -> None:
    """Every rank is in one group of each axis, at its own place; ranks ascend with places, as in torch."""
    for axis in AXES:
        groups = {layout.group(axis, rank) for rank in range(layout.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        for group in groups:
            assert list(group) == sorted(group)
            assert [layout.place(axis, rank) for rank in group] == list(range(len(group)))
    sizes = {axis: len(layout.group(axis, 0)) for axis in AXES}
    assert sizes["e"] == layout.expert and sizes["r"] == layout.expert_replicas and sizes["f"] == layout.shard
    assert sizes["dc"] == layout.data * layout.context == sizes["dcf"] * layout.shard
    assert sizes["rows"] == layout.row_shards and sizes["s"] == layout.stage_ranks


@settings(deadline=None)
@given(SMALL)
def test_microbatches_are_coupled_where_experts_or_pieces_span_data_ranks(layout: Layout) -> None:
    """Also where e is smaller than the slots of a data rank, and does not divide them: d2c3e2."""
    groups = [layout.group(axis, rank) for axis in ("e", "f") for rank in range(layout.world)]
    spans = any(len({layout.coords(rank).data for rank in group}) > 1 for group in groups)
    assert layout.couples_microbatches == spans


@given(layouts(), st.integers(1, 40))
def test_chunks_are_all_layers_in_order(layout: Layout, more: int) -> None:
    chunks = layout.chunk_layers(layout.chunks + more)
    assert [layer for chunk in chunks for layer in chunk] == list(range(layout.chunks + more))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    of_stages = [layout.chunks_of(stage) for stage in range(layout.pipeline)]
    assert sorted(chunk for chunks in of_stages for chunk in chunks) == list(range(layout.chunks))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("d2q4", "use each of"),
        ("d2d2", "use each of"),
        ("2d", "write factors like"),
        ("d0", "use at least 1"),
        ("d2e3", "does not divide"),
        ("t4x2", "use x1, or x4"),
        ("d4f3", "does not divide d4"),
        ("v2", "without stages"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t3", "num_attention_heads"),
        ("t4", "num_key_value_heads"),
        ("p4", "use fewer stages"),
        ("d2e2", "has none"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(text: str, said: str) -> None:
    config = parse_config(
        {
            "model_type": "llama",
            "vocab_size": 60,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    Layout.parse("d2t2p3").refuse(config)
    with pytest.raises(ValueError, match=said):
        Layout.parse(text).refuse(config)
