"""What the benches of replay makes of its measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nouns import sample_of
from worlds import tiny_moe

from lab import planted, replay
from lab.paired import Paired
from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import alignment
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.observe.mismatch import arm, routers
from ostinato.types import NO_EXPERT, Batch, Sample

# ---- two ways in turn


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.floats(0.5, 2))
def test_a_slower_machine_changes_no_ratio(seconds: list[float], factor: float) -> None:
    pairs = Paired(base=tuple(seconds), other=tuple(factor * s for s in seconds))
    low, high = pairs.interval
    assert pairs.ratio == pytest.approx(factor) and low == pytest.approx(factor) == pytest.approx(high)


@given(st.integers(6, 40))
def test_the_interval_of_a_median_is_the_widest_cut_that_keeps_95_percent(n: int) -> None:
    pairs = Paired(base=(1.0,) * n, other=tuple(float(i) for i in range(n)))
    cut = int(pairs.interval[0])  # so many ratios are below it
    assert pairs.interval[1] == n - 1 - cut

    def outside(cut: int) -> float:  # both tails of a fair coin: the median is beyond the interval
        return 2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n

    assert outside(cut) <= 0.05 < outside(cut + 1)


# ---- rows of bench replay


def measured(native: np.ndarray, replayed: np.ndarray) -> dict[str, Any]:
    owner = np.arange(len(native)) // 10
    routes = np.zeros((len(native), 1, 1), np.int16)
    return {
        "arms": {"native": arm(native, owner, bootstrap=50), "replay": arm(replayed, owner, bootstrap=50)},
        "routers": routers(routes, routes, np.ones((len(native), 1))),
        "coverage": 1.0,
    }


def test_tau_is_fixed_by_the_native_side_alone() -> None:
    """The rule is in the code: a tau chosen after looking at both sides can be made to say anything."""
    rng = np.random.default_rng(1)
    gap = rng.normal(0, 0.02, 5000)
    taus = {replay.figures(measured(gap, gap * scale))["tau"] for scale in (0.0, 0.3, 1.0, 3.0)}
    assert len(taus) == 1
    (tau,) = taus
    assert (np.abs(gap) > math.log(tau)).mean() >= replay.PAPERS_SHARE


def test_f_falls_with_tau_and_is_that_of_the_tokens() -> None:
    gap = np.random.default_rng(3).laplace(0, 0.05, 2000)
    row = replay.figures(measured(gap, gap / 2))
    taus, native, replayed = np.array(row["F_curve"]).T
    assert (np.diff(taus) > 0).all() and (np.diff(native) <= 0).all() and (np.diff(replayed) <= 0).all()
    for tau, share, _ in row["F_curve"]:
        assert share == pytest.approx((np.abs(gap) > math.log(tau)).mean(), abs=1e-9)


def test_no_token_beyond_tau_is_a_bound_and_not_an_infinite_ratio() -> None:
    gap = np.zeros(1000)
    gap[:3] = math.log(1.3)
    row = replay.figures(measured(gap, np.zeros(1000)))
    assert row["F_replay"] == 0 and row["F_ratio_is_bound"]
    assert row["F_ratio"] == pytest.approx(0.003 / (3 / 1000))
    assert row["k3_ratio"] is None and replay.judged(row)["k3_ratio"]


# ---- planted bugs


def routes(seed: int = 0, sequences: int = 6) -> list[np.ndarray]:
    """Random routes [L, 3, 2] of 8 experts, the last row of each unknown, as an engine returns them."""
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(20, 40, sequences):
        rows = rng.random((length, 3, 8)).argsort(axis=-1)[..., :2].astype(np.int8)
        rows[-1] = NO_EXPERT
        made.append(rows)
    return made


@pytest.mark.parametrize("name", planted.bugs(8, 2))
def test_a_bug_spoils_what_is_known_and_nothing_else(name: str) -> None:
    spoil, _ = planted.bugs(8, 2)[name]
    right = routes()
    kept = [rows.copy() for rows in right]
    wrong = spoil(right)
    for before, now, after in zip(kept, right, wrong, strict=True):
        assert np.array_equal(before, now), "the batch itself was changed"
        assert after.shape == before.shape and after.dtype == before.dtype
        assert np.array_equal(after[..., 0] == NO_EXPERT, before[..., 0] == NO_EXPERT)
    assert alignment(right, wrong).max() < 0.7


@pytest.fixture(scope="module")
def small() -> tuple[planted.Trainers, Adapters, list[Sample]]:
    """A tiny model and samples of random tokens, with the routes that it chooses for them itself."""
    raw = tiny_moe(num_hidden_layers=3, head_dim=8, num_experts=8, max_position_embeddings=128)
    decoder = Decoder(parse_config(raw)).init_weights(seed=0)
    policy = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8, targets=("attn",)), seed=0)
    trainers = planted.Trainers(decoder=decoder, kernels=None, rules=algorithm("grpo"))
    rng, made = np.random.default_rng(0), []
    for index in range(4):
        tokens = rng.integers(0, 61, 60).astype(np.int32)
        mask = np.arange(60) >= 10
        _, chosen = decoder(
            torch.from_numpy(tokens), torch.arange(60), CausalAttention(), adapters=policy, ops=TORCH_OPS
        )
        experts = chosen.numpy().astype(np.int8)
        experts[-1] = NO_EXPERT
        made.append(
            sample_of(
                tokens,
                10,
                logprobs=np.where(mask, -math.log(61), 0).astype("f4"),
                group=index,
                experts=experts,
            )
        )
    return trainers, policy, made


def packed(chosen: Sequence[Sample]) -> Batch:
    return pack(chosen, aggregation_weights(chosen, Aggregation.TOKEN), tokens_per_microbatch=512)


@pytest.mark.slow
def test_every_bug_is_put_before_the_gate(small: tuple[planted.Trainers, Adapters, list[Sample]]) -> None:
    trainers, policy, made = small
    fine = planted.outcome(trainers, policy, packed(made))
    assert not fine["caught"] and fine["overlap"] == 1.0
    rows = planted.planted(trainers, policy, made, packed, say=lambda line: None)
    everywhere = [row for row in rows if row["where"] == "all sequences"]
    assert {row["bug"] for row in everywhere} == set(planted.bugs(8, 1))
    for row in everywhere:
        assert row["caught"] and row["right"], row
        assert row["overlap"] < 0.7 and (row["k3"] is None) == (row["bug"] == "all zero")


def test_routes_of_a_policy_age(small: tuple[planted.Trainers, Adapters, list[Sample]]) -> None:
    trainers, policy, made = small
    batch = packed(made)
    again = planted.rerouted(batch, trainers, policy)
    for before, after in zip(batch.microbatches, again.microbatches, strict=True):
        assert before.experts is not None and after.experts is not None
        assert np.array_equal(np.sort(before.experts), np.sort(after.experts))
    rows = planted.stale(trainers, {3: policy}, 3, batch, say=lambda line: None)
    overlaps = [row["overlap"] for row in rows]
    assert overlaps[0] == 1.0 and overlaps == sorted(overlaps, reverse=True)
    assert rows[0]["policy"] == "the same policy" and rows[-1]["caught"]
