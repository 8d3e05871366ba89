"""Seconds of a plan: laws that no hardware breaks, and figures that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import arrangement, problem, setup

from ostinato.plan.cluster import peak
from ostinato.plan.problem import Base, DType, Phase, Placement, Problem, Setup, Work
from ostinato.plan.roofline import Efficiency
from ostinato.plan.time import Roofline

CLOCK = Roofline()
LAYOUTS = ["d16", "d8t2", "d4t4e8", "p2d4t2e4", "p4d4", "d2t8e16", "d8c2e4", "d16f4", "p2v2d4t2e8", "t8x8d2"]
PERFECT = Efficiency(
    products=1, grouped=1, attention=1, memory=1, links=1, network=1, exchange=1, latency=0, far_latency=0,
    layer=0, captured=0, sweeps=0,
)  # fmt: skip


def faster(one: Problem, name: str, times: float) -> Problem:
    gpu = one.cluster.gpu
    if name == "flops":
        better = replace(gpu, flops={dtype: rate * times for dtype, rate in gpu.flops.items()})
    else:
        better = replace(gpu, **{name: getattr(gpu, name) * times})
    return replace(one, cluster=replace(one.cluster, gpu=better))


def seconds(one: Problem, phase: Phase, how: Setup) -> float:
    return sum(CLOCK.phase(one, phase, how).values())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(["flops", "hbm", "link", "nic", "pcie"]),
    st.floats(1.0, 10.0),
    st.sampled_from([Phase.TRAIN, Phase.ROLLOUT]),
)
def test_faster_hardware_never_takes_longer(layout: str, name: str, times: float, phase: Phase) -> None:
    base = problem()
    assert seconds(faster(base, name, times), phase, setup(layout)) <= seconds(base, phase, setup(layout)) * (
        1 + 1e-9
    )


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b", "kimi-k2"])
def test_one_rank_spends_nothing_on_others(model: str) -> None:
    one = problem(model, "1xH200-141")
    terms = CLOCK.phase(one, Phase.TRAIN, setup("1"))
    assert (
        not {"tensor", "context", "expert exchange", "pipeline", "gradients", "bubble", "imbalance"}
        & terms.keys()
    )
    assert not {"tensor", "expert exchange"} & CLOCK.phase(one, Phase.ROLLOUT, setup("1")).keys()


def test_products_are_flops_over_the_peak_by_hand() -> None:
    """4 N per row of LoRA training (forward and input gradients) where nothing else counts."""
    one = problem("qwen3-8b", "1xH100-80", work=Work(prompts=8, group=8, prompt_tokens=256, answers=(512,)))
    terms = Roofline(efficiency=PERFECT).phase(one, Phase.TRAIN, setup("1"))
    config = one.config
    per_layer = (
        config.hidden_size
        * (2 * config.num_heads * config.head_dim + 2 * config.num_kv_heads * config.head_dim)
        + 3 * config.hidden_size * config.intermediate_size
    )
    flops = 4 * per_layer * config.num_layers * one.work.rows
    assert terms["products"] == pytest.approx(flops / peak(one.cluster.gpu, DType.BF16), rel=0.02)


def test_the_longest_answer_is_waited_for() -> None:
    """The same number of tokens, one of them in a long tail: decoding takes as many steps as the tail is
    long."""
    even = problem("qwen3-8b", "8xH100-80", work=Work(prompts=8, group=8, answers=(1000,)))
    tail = problem("qwen3-8b", "8xH100-80", work=Work(prompts=8, group=8, answers=(*(872,) * 63, 9064)))
    ratio = (
        CLOCK.phase(tail, Phase.ROLLOUT, setup("d8"))["decode"]
        / CLOCK.phase(even, Phase.ROLLOUT, setup("d8"))["decode"]
    )
    assert 8 < ratio < 9.1


def test_apart_and_late_runs_side_by_side() -> None:
    one = problem()
    together = CLOCK.step(one, arrangement("d8", "d8", placement=Placement.APART, base=Base.TWO))
    late = CLOCK.step(one, arrangement("d8", "d8", placement=Placement.APART, base=Base.TWO, lag=1))
    assert together.overlapped == 0
    assert late.total == pytest.approx(
        max(late.of("train") + late.of("logprobs"), late.of("rollout")) + late.of("refit")
    )
    assert 0 < late.low < 1 < late.high


def test_factors_multiply_their_phase() -> None:
    one, how = problem(), setup("d16")
    before = CLOCK.phase(one, Phase.TRAIN, how)
    after = Roofline(factors={"train": 2.0, "rollout": 9.0}).phase(one, Phase.TRAIN, how)
    assert after == {term: 2 * seconds for term, seconds in before.items()}
