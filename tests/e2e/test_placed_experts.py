"""Which rank keeps which experts changes nothing that is learned, and may change at a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layout_runs import MODELS, Case, Run, batch_of, trained
from ranks import on_ranks

from ostinato.model.config import parse_config
from ostinato.parallel.load import expert_loads, rank_loads
from ostinato.parallel.placement import contiguous, placed_experts, scattered
from ostinato.train.gate import without_routes
from ostinato.train.totals import balance

pytestmark = pytest.mark.slow

MOE_LAYERS, EXPERTS = 3, 8


def assert_alike(found: Run, wanted: Run, steps: slice = slice(None)) -> None:
    assert found.losses == pytest.approx(wanted.losses[steps], rel=1e-9)
    assert found.identity["base"] == wanted.identity["base"]
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("layout", "way"), [("d2e2", "shared_outer"), ("d2t2e4", "per_expert")])
def test_experts_anywhere_learn_what_one_rank_learns(layout: str, way: str) -> None:
    """Another placement in every layer; then half of the run under one and half under another."""
    ranks = 2 if layout == "d2e2" else 4
    case = Case(way=way, steps=4, dtype=torch.float64)
    wanted = trained(0, 1, "", case)
    here, there = (placed_experts(scattered(MOE_LAYERS, EXPERTS, ranks, seed), ranks) for seed in (0, 1))
    whole, *_ = on_ranks(ranks, trained, layout, replace(case, placement=here))
    assert_alike(whole, wanted)
    half, *_ = on_ranks(ranks, trained, layout, replace(case, placement=here, steps=2))
    saved = half.tensors, half.counters
    rest, *_ = on_ranks(ranks, trained, layout, replace(case, placement=there, restored=saved))
    assert_alike(rest, wanted, slice(2, None))


def test_a_run_tells_how_uneven_its_own_ranks_are() -> None:
    """Under a layout by the placement in use, on one rank as if neighbours lay on as many as divide them."""
    owner = scattered(MOE_LAYERS, EXPERTS, 2)
    case = Case(steps=1, placement=placed_experts(owner, 2))
    apart, *_ = on_ranks(2, trained, "d2e2", case)
    alone = trained(0, 1, "", case)
    assert apart.metrics[0]["routing/straggler_ranks"] == 2
    assert alone.metrics[0]["routing/straggler_ranks"] == EXPERTS
    assert alone.metrics[0]["routing/straggler"] >= apart.metrics[0]["routing/straggler"] >= 1
    assert alone.metrics[0]["routing/capacity_factor"] == apart.metrics[0]["routing/capacity_factor"]


def test_the_metric_is_of_every_microbatch() -> None:
    """Loads of microbatches are not added up: in each of them ranks wait for each other."""
    moe, batch = parse_config(MODELS["moe"]).moe, batch_of(Case(), 0)
    owner = contiguous(MOE_LAYERS, EXPERTS, 4)
    assert moe is not None and len(batch.microbatches) > 1
    carried = [one.experts for one in batch.microbatches if one.experts is not None]
    by_rank = [rank_loads(expert_loads(one, EXPERTS), owner, 4) for one in carried]
    largest, mean = (sum(loads.sum() for loads in f(by_rank)) for f in (_largest, _mean))
    assert balance(batch, moe, owner)["routing/straggler"] == pytest.approx(largest / mean)
    assert balance(without_routes(batch), moe, owner) == {}


def _largest(by_rank: list[np.ndarray]) -> list[np.ndarray]:
    return [loads.max(axis=1) for loads in by_rank]


def _mean(by_rank: list[np.ndarray]) -> list[np.ndarray]:
    return [loads.mean(axis=1) for loads in by_rank]
