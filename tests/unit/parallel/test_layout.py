"""Layouts, and what they mean for tensors, gradients and experts; a model of 1T parameters over 64 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_runs import EVERYTHING, LAYOUTS, MODELS
from nouns import scattered
from plan_world import KIMI_LAYOUTS
from worlds import tiny_dense

from ostinato.apps.plan.problem import find_model
from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.shapes import AdapterSpec, ExpertScheme, compute_adapter_shapes
from ostinato.model.share import Share, count_elements, find_spans, is_cut, is_expert
from ostinato.parallel import load, placement
from ostinato.parallel.collectives import AXES, Mesh
from ostinato.parallel.elements import stage_elements
from ostinato.parallel.fingerprint import parameter_shapes
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import find_summed_axes, has_part, owned_parts, shares_of
from ostinato.types import NO_EXPERT

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
    every = {layout.coords(rank) for rank in range(layout.world)}
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    assert every == set(itertools.product(*map(range, sizes)))


@pytest.mark.slow
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
    ("text", "output"),
    [
        ("d2q4", "use each of"),
        ("d2d2", "use each of"),
        ("2d", "write factors like"),
        ("tp2pp2ep8", "write factors like t2p2e8 of"),
        ("d0", "use at least 1"),
        ("d2e3", "does not divide"),
        ("t4x2", "use x1, or x4"),
        ("d4f3", "does not divide d4"),
        ("v2", "without stages"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(text: str, output: str) -> None:
    with pytest.raises(ValueError, match=output):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("t3", "num_attention_heads"),
        ("t4", "num_key_value_heads"),
        ("p4", "use fewer stages"),
        ("d2e2", "has none"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(text: str, output: str) -> None:
    config = parse_config(tiny_dense(vocab_size=60, num_hidden_layers=3))
    Layout.parse("d2t2p3").refuse(config)
    with pytest.raises(ValueError, match=output):
        Layout.parse(text).refuse(config)


# ---- whose gradients are summed over whom, and who has which part of a tensor


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    """All parameters, and all factors of both expert schemes."""
    config = parse_config(MODELS[model])
    found = parameter_shapes(config)
    for scheme in ExpertScheme:
        spec = AdapterSpec(rank=4, targets=EVERYTHING, expert_scheme=scheme)
        for name, pair in compute_adapter_shapes(config, spec).items():
            found |= {f"{name}.{part}": shape for part, shape in zip("AB", pair, strict=True)}
    return found


@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(MODELS)), st.data())
def test_parts_cover_a_tensor_once(text: str, model: str, data: st.DataObject) -> None:
    layout, config = Layout.parse(text), parse_config(MODELS[model])
    shares = [shares_of(layout, config, rank) for rank in range(layout.world)]
    shapes = tensors(model)
    name = data.draw(st.sampled_from(sorted(shapes)))
    covered = np.zeros(shapes[name], int)
    for part in owned_parts(config, shares, name, shapes[name]):
        grid = np.ix_(*([index for span in spans for index in span] for spans in part.spans))
        covered[grid] += 1
    assert (covered == 1).all()


@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(MODELS)), st.data())
def test_a_gradient_is_summed_over_all_with_the_same_part(text: str, model: str, data: st.DataObject) -> None:
    """Following the axes of a leaf from one rank leads to every rank of its stage with the same part, and no
    other."""
    layout, config = Layout.parse(text), parse_config(MODELS[model])
    shapes = tensors(model)
    name = data.draw(st.sampled_from(sorted(shapes)))
    shape, shares = shapes[name], [shares_of(layout, config, rank) for rank in range(layout.world)]
    keepers = [
        rank for rank in range(layout.world) if any(has_part(config, one, name) for one in shares[rank])
    ]
    parts = {rank: find_spans(config, shares[rank][0], name, shape) for rank in keepers}
    rank = data.draw(st.sampled_from(keepers))
    reached = {rank}
    for axis in find_summed_axes(name, shape, shares[rank][0]):
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
        for axis in find_summed_axes(name, shapes[name], share, in_pieces=True):
            reached = {other for one in reached for other in layout.group(axis, one)}
        whole = name.endswith("router") or layout.tensor == 1
        assert len(reached) == layout.stage_ranks // layout.shard // (1 if whole else layout.tensor)


# ---- loads of experts and ranks, and placements: against brute force, a loop, and published figures


def drawn(seed: int, layers: int, experts: int, sigma: float = 0.7) -> np.ndarray:
    """Log-normal popularity, as loads."""
    return np.random.default_rng(seed).lognormal(0.0, sigma, (layers, experts))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """(loads [1, E], ranks), small enough for brute force."""
    ranks, each = draw(st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2), (2, 5)]))
    loads = draw(st.lists(st.integers(0, 50), min_size=ranks * each, max_size=ranks * each))
    return np.array([loads]), ranks


def splits(experts: tuple[int, ...], each: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to cut experts into sets of ``each``; the first expert is always in the first set."""
    if not experts:
        yield []
        return
    for others in itertools.combinations(experts[1:], each - 1):
        chosen = (experts[0], *others)
        for rest in splits(tuple(one for one in experts if one not in chosen), each):
            yield [chosen, *rest]


def optimum(loads: np.ndarray, ranks: int) -> float:
    """The smallest largest load of a rank, by trying everything."""
    ids = tuple(range(len(loads)))
    return min(max(loads[list(one)].sum() for one in split) for split in splits(ids, len(loads) // ranks))


# ---- loads


def test_loads_are_what_a_loop_counts() -> None:
    rng = np.random.default_rng(0)
    routes = np.stack([rng.permuted(np.arange(6))[:2] for _ in range(40)]).reshape(20, 2, 2).astype(np.int8)
    routes[[3, 7]] = NO_EXPERT
    wanted = np.zeros((2, 6), int)
    for token in routes:
        for layer, ids in enumerate(token):
            for one in ids:
                if one != NO_EXPERT:
                    wanted[layer, one] += 1
    assert load.expert_loads(routes, 6).tolist() == wanted.tolist()
    owner = scattered(2, 6, 3)
    by_rank = [[wanted[layer][owner[layer] == rank].sum() for rank in range(3)] for layer in range(2)]
    assert load.rank_loads(wanted, owner, 3).tolist() == by_rank


def test_an_id_that_is_no_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="experts are 0 to 3"):
        load.expert_loads(np.array([[[0, 4]]]), 4)


def test_the_factors_by_hand() -> None:
    """Two layers of four experts on two ranks, with 6 and 2 to do in the first, 4 and 4 in the second."""
    loads = np.array([[4, 2, 1, 1], [2, 2, 3, 1]])
    found = load.measure_imbalance(loads, placement.place_contiguously(2, 4, 2), 2)
    assert found == load.Imbalance(ranks=2, straggler=10 / 8, worst_straggler=1.5, capacity=2.0)
    assert found.metrics["routing/straggler_ranks"] == 2.0
    idle = load.measure_imbalance(np.zeros((2, 4)), placement.place_contiguously(2, 4, 2), 2)
    assert idle.straggler == idle.worst_straggler == idle.capacity == 1.0


PUBLISHED = {8: (1.17, 1.08, 1.30), 16: (1.32, 1.18, 1.52), 32: (1.58, 1.36, 1.92), 64: (2.05, 1.65, 2.66)}


@pytest.mark.parametrize("ranks", PUBLISHED)
def test_stragglers_of_log_normal_popularity_are_the_published_ones(ranks: int) -> None:
    """384 experts, sigma 0.7, 2,000 draws: mean and 5 to 95 % range. Where popularity is drawn independently,
    experts that lie as they come and experts placed at random are the same law."""
    loads, owner = drawn(0, 2000, 384), placement.place_contiguously(2000, 384, ranks)
    found = load.compute_stragglers(load.rank_loads(loads, owner, ranks))
    mean, low, high = PUBLISHED[ranks]
    assert found.mean() == pytest.approx(mean, abs=0.012)
    assert np.quantile(found, [0.05, 0.95]) == pytest.approx([low, high], abs=0.04)
    apart = load.compute_stragglers(load.rank_loads(loads, scattered(2000, 384, ranks), ranks))
    assert apart.mean() == pytest.approx(mean, abs=0.02)


# ---- placements


@settings(max_examples=60, deadline=None)
@given(problems())
def test_near_the_optimum(problem: tuple[np.ndarray, int]) -> None:
    loads, ranks = problem
    owner = placement.place_by_load(loads, ranks)
    assert np.bincount(owner[0], minlength=ranks).tolist() == [loads.shape[1] // ranks] * ranks
    largest = load.rank_loads(loads, owner, ranks).max()
    best = optimum(loads[0], ranks)
    assert best <= largest <= best * 4 / 3 + 1e-9  # Graham's bound for LPT, which swaps only improve


def test_nodes_are_even_before_their_ranks() -> None:
    loads = drawn(4, 6, 64)
    by_node = placement.place_by_load(loads, 16, nodes=4)
    assert (np.sort(by_node, axis=1) == placement.place_contiguously(6, 64, 16)).all()
    spread = load.compute_stragglers(load.rank_loads(loads, by_node // 4, 4))
    assert spread.max() < 1.01
    assert load.measure_imbalance(loads, by_node, 16).straggler < 1.25  # what the freedom that is left allows


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: placement.place_contiguously(1, 6, 4),
        lambda: placement.place_by_load(np.ones((1, 8)), 4, nodes=3),
    ],
)
def test_what_does_not_come_out_even_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="divisor"):
        wrong()


def test_slots_are_places_among_all_that_ranks_keep() -> None:
    owner = scattered(3, 12, 4, seed=1)
    placed = placement.placed_experts(owner, 4)
    assert (placement.owner_of(placed) == owner).all()
    for slots, ranks in zip(placement.number_slots(owner), placed, strict=True):
        in_a_row = [expert for kept in ranks for expert in kept]
        assert [int(slots[expert]) for expert in in_a_row] == list(range(12))
    assert (placement.number_slots(placement.place_contiguously(1, 6, 3)) == np.arange(6)).all()


@given(problems())
def test_swaps_only_improve(problem: tuple[np.ndarray, int]) -> None:
    loads, ranks = problem
    owner = placement.place_contiguously(1, loads.shape[1], ranks)[0]
    descending = []
    for one, other in placement.find_swaps(loads[0], owner, ranks):
        descending.append(sorted(np.bincount(owner, weights=loads[0], minlength=ranks), reverse=True))
        owner[one], owner[other] = owner[other], owner[one]
    descending.append(sorted(np.bincount(owner, weights=loads[0], minlength=ranks), reverse=True))
    assert descending == sorted(descending, reverse=True)
    assert len({tuple(one) for one in descending}) == len(descending)


# ---- a model of 1T parameters over 64 ranks, without its weights: every rank's share on the meta device


TEXTS = [*KIMI_LAYOUTS, "p2d4t8e4x8", "p8d4t2e4x2", "p4v2d2t8e16"]
PARAMETERS = 1_026_408_232_448  # Kimi K2, correction biases included


@cache
def kimi() -> ModelConfig:
    return find_model("kimi-k2").config


@cache
def whole_shapes() -> dict[str, tuple[int, ...]]:
    whole = Decoder(kimi(), device="meta")
    return {name: tuple(weight.shape) for name, weight in whole.named_parameters()}


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
@pytest.mark.parametrize("text", TEXTS)
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
                kept = find_spans(kimi(), share, name, shapes[name])
                assert shape == tuple(sum(map(len, spans)) for spans in kept), name
                distinct += prod(shape) / replicas(layout, share, name, shapes[name])
            seen[share] = sum(map(prod, made[one].values())), distinct
        by_rank[rank] += seen[share][0]
        total += seen[share][1]
    assert total == pytest.approx(PARAMETERS, rel=1e-12)
    stages = [stage_elements(kimi(), None, layout, stage) for stage in range(layout.pipeline)]
    assert max(by_rank) == max(one.trainable + one.untrained for one in stages), "as the planner counts"


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
        kept = (
            count_elements(find_spans(kimi(), share, n, whole_shapes()[n]))
            for n, _ in part.named_parameters()
        )
        assert sum(weight.numel() for weight in part.parameters()) == sum(kept)
    finally:
        dist.destroy_process_group()
