"""What a plan counts: machines, parameters, schedules, engines, messages, seconds; by hand and by laws."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import LORA, arrangement, problem, setup
from worlds import KINDS, SIZES

from ostinato.apps.plan.cluster import Efficiency, Ring, parse_cluster
from ostinato.apps.plan.commands import question
from ostinato.apps.plan.layouts import engine_layout, layouts, refuse
from ostinato.apps.plan.memory import maps_once, tokens_in_flight
from ostinato.apps.plan.problem import (
    Base,
    Phase,
    Placement,
    Problem,
    Sampler,
    Setup,
    Work,
    find_model,
    known_models,
)
from ostinato.apps.plan.request import Options, ask
from ostinato.apps.plan.sampling import _Pass, dealt, decode_seconds, occupancy, rollout_seconds
from ostinato.apps.plan.time import Roofline
from ostinato.apps.plan.traffic import Talk, Traffic, added
from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.parallel.elements import Elements, layer_tensors, stage_elements
from ostinato.parallel.gpus import find_peak
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import DType, Precision


def test_a_cluster_is_nodes_of_eight_or_as_written() -> None:
    for text, nodes, per_node in (
        ("64xH800-80", 8, 8),
        ("4xH100-80", 1, 4),
        ("3x4xA100-80", 3, 4),
        ("8x8xh800", 8, 8),
        ("12xcpu", 1, 12),
        ("8x4090", 1, 8),
        ("8xH100", 1, 8),
        ("H100:8", 1, 8),
        ("4xA100-40", 1, 4),
    ):
        cluster = parse_cluster(text)
        assert (cluster.nodes, cluster.per_node) == (nodes, per_node), text
    assert parse_cluster("64xH800-80").gpu.memory == 85.5e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64", "write a number and a device"),
        ("64xB100", "no data sheet here, only of H800-80, H100-80"),
        ("4xA100", "A100-80 or A100-40; write one of them"),
        ("1x24GB", "write the one with the nearest speed, and the memory of yours with --gpu-memory GB"),
        ("12xH100-80", "2x6xH100-80"),
        ("0xH100-80", "at least 1"),
    ],
)
def test_what_is_no_cluster_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_cluster(text)


def test_groups_know_who_shares_their_node() -> None:
    cluster = parse_cluster("4x8xH800-80")
    assert Ring(ranks=8, stride=1).bandwidth(cluster) == cluster.gpu.link
    assert Ring(ranks=4, stride=2).per_node(cluster) == 4
    # one member per node: its own port; eight of them: their ports together, but no faster than the links
    assert Ring(ranks=4, stride=8).bandwidth(cluster) == cluster.gpu.nic
    assert Ring(ranks=32, stride=1).bandwidth(cluster) == cluster.gpu.link


def test_an_exchange_is_as_slow_as_what_leaves_the_node() -> None:
    cluster = parse_cluster("2x8xH800-80")
    within = Ring(ranks=8, stride=1).exchange_seconds(cluster, 1e9)
    across = Ring(ranks=16, stride=1).exchange_seconds(cluster, 1e9)
    assert within == pytest.approx(1e9 / cluster.gpu.link)
    assert across == pytest.approx(1e9 * 8 / 15 / cluster.gpu.nic)
    assert Ring(ranks=1, stride=1).exchange_seconds(cluster, 1e9) == 0


# ---- parameters of models and adapters against published numbers, and against the decoder itself


FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {**SIZES, "model_type": "llama"},
    "biased": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "latent": {**SIZES, **KINDS["sigmoid-bias-groups"], "q_lora_rank": 8},
    **{kind: {**SIZES, **more} for kind, more in KINDS.items()},
}


def elements_of(config: ModelConfig, adapter: AdapterSpec | None = None) -> Elements:
    """Of the whole model."""
    return stage_elements(config, adapter, Layout(), 0)


def config_of(name: str) -> ModelConfig:
    return find_model(name).config


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_decoder(family: str) -> None:
    """In number and by role: nothing that a decoder stores is left out, nothing is counted twice."""
    config = parse_config(FAMILIES[family])
    decoder = Decoder(config, device="meta")
    whole = elements_of(config)
    assert whole.trainable + whole.untrained == sum(p.numel() for p in decoder.parameters())
    for name, one in decoder.named_linears().items():
        _, layer, short = name.split(".", 2)
        assert layer_tensors(config, int(layer))[short] == tuple(one.weight.shape)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # model.safetensors.index.json of the published checkpoints, in parameters
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("olmoe", 6_919_161_856),
    ],
)
def test_totals_of_published_checkpoints(name: str, total: int) -> None:
    whole = elements_of(config_of(name))
    assert whole.trainable + whole.untrained == total


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("deepseek-v3", 671.0, 37.6),  # "671B, 37B activated" (arXiv 2412.19437), both embeddings counted
        ("qwen3-30b-a3b", 30.5, 3.3),  # model card
        ("qwen3-235b-a22b", 235.1, 22.2),  # model card: 235B, 22B
        ("olmoe", 6.9, 1.3),  # arXiv 2409.02060: 6.9B, 1.3B
    ],
)
def test_active_parameters(name: str, billions: float, active: float) -> None:
    stated = question(ask(name, "64xH100-80", Options()))["model"]
    total, going = (float(part.split("B")[0].split()[-1]) for part in stated.split(","))
    assert total == pytest.approx(billions, abs=0.06)
    assert going == pytest.approx(active, abs=0.06)


def mlp_unit(config: ModelConfig) -> int:
    """Per unit of rank: experts in the shared-outer form, shared experts, dense layers."""
    return elements_of(config, AdapterSpec(rank=1, targets=("mlp", "shared", "experts"))).adapters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("kimi-k2", 144_583_680),
        ("deepseek-v3", 94_307_328),
        ("qwen3-30b-a3b", 14_450_688),
        ("qwen3-235b-a22b", 56_598_528),
    ],
)
def test_tinker_counts_of_mlp_adapters(name: str, published: int) -> None:
    assert mlp_unit(config_of(name)) == published


@given(
    rank=st.integers(1, 4),
    expert_rank=st.sampled_from([None, 2]),
    scheme=st.sampled_from(ExpertScheme),
    family=st.sampled_from(sorted(FAMILIES)),
)
def test_adapter_counts_are_those_of_tensors(
    rank: int, expert_rank: int | None, scheme: ExpertScheme, family: str
) -> None:
    config = parse_config(FAMILIES[family])
    spec = AdapterSpec(rank=rank, expert_rank=expert_rank, expert_scheme=scheme)
    made = init_adapters(config, spec)
    assert elements_of(config, spec).adapters == made.num_parameters


def test_models_by_name(tmp_path: Any) -> None:
    assert "kimi-k2" in known_models()
    asset = find_model("asset:seed-moe")
    assert asset.config == config_of("seed-moe") and asset.path == "asset:seed-moe"
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asset.config.raw))
    assert find_model(str(folder)).path == str(folder)  # a launch file had asset: in front of it
    with pytest.raises(ValueError, match="did you mean kimi-k2"):
        find_model("kimi-k")
    broken = tmp_path / "config.json"
    broken.write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        find_model(str(broken))
    broken.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        find_model(str(broken))


# ---- the schedule of continuous batching, against a plain one that goes a step at a time


def plain(lengths: list[int], slots: int) -> list[tuple[int, float]]:
    """(sequences, mean tokens that they have generated, in the middle of the step) of every decode step."""
    waiting, running, steps = list(lengths), list[list[int]](), []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        steps.append((len(running), float(np.mean([generated for _, generated in running])) + 0.5))
        for slot in running:
            slot[1] += 1
        running = [slot for slot in running if slot[1] < slot[0]]
    return steps


answers = st.lists(st.integers(1, 30), min_size=1, max_size=24)


@given(answers, st.integers(1, 26))
def test_equals_the_plain_schedule(lengths: list[int], slots: int) -> None:
    rooms, steps = occupancy(lengths, slots), plain(lengths, slots)
    assert rooms.longest == len(steps)
    assert (rooms.steps * rooms.sequences).sum() == sum(lengths) == sum(n for n, _ in steps)
    generated = decode_seconds(rooms, lambda sequences, generated: sequences * generated)
    assert generated == pytest.approx(sum(n * mean for n, mean in steps))


@given(answers, st.integers(1, 26))
def test_more_seats_never_take_more_steps_than_one_after_the_other(lengths: list[int], slots: int) -> None:
    longest = occupancy(lengths, slots).longest
    assert max(lengths) <= longest <= sum(lengths)
    assert occupancy(lengths, len(lengths)).longest == max(lengths)


def test_who_has_the_longest_answer_is_dealt_like_all_others_but_for_it() -> None:
    sample = tuple(range(1, 1001))
    lengths = dealt(sample, number=512, replicas=8)
    assert len(lengths) == 64 and max(lengths) >= 999
    assert np.mean(lengths) == pytest.approx(500.5, rel=0.01)
    assert lengths == dealt(sample, number=512, replicas=8)
    assert list(lengths) != sorted(lengths)
    assert dealt(sample, number=1, replicas=1) == (500,)
    assert dealt((7,), number=9, replicas=2) == (7,) * 5


@pytest.mark.parametrize(("lengths", "slots"), [([], 1), ([3], 0), ([0], 1)])
def test_nothing_to_decode_is_refused(lengths: list[int], slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1 of each"):
        occupancy(lengths, slots)


# ---- what an engine makes of a layout: which it has, where experts are cut, who gets which answers


VLLM, LOCAL = Sampler(), Sampler(name="local", latent_kv=False)


def of(text: str) -> Layout:
    return Layout.parse(text)


def local(one: Problem) -> Problem:
    return replace(one, sampler=LOCAL)


# ---- which layouts


def test_vllm_spreads_experts_over_whole_engines_or_cuts_their_width() -> None:
    found = {str(one) for one in layouts(problem(gpus="8xH100-80"), 8, Phase.ROLLOUT)}
    assert {"d8", "d8e8", "d2t4", "d2t4e4", "d2t4e8", "d4t2e8", "d4t2e4"} <= found
    assert not {"d2t4e2", "d2t4e2x4", "d2t4x4", "d2t4e4x4"} & found


@pytest.mark.parametrize(
    ("sampler", "text", "words"),
    [
        (VLLM, "d4p2", "has p2, but vllm samples without it"),
        (VLLM, "d4c2", "has c2"),
        (VLLM, "d4f2", "has f2"),
        (VLLM, "t4e2", "over all ranks of an engine or none"),
        (VLLM, "d2t4e2x4", "x4, which vLLM does not take"),
        (LOCAL, "t2", "cuts a model that the local engine has whole; use d alone"),
        (LOCAL, "p2", "has p2, but local samples without it"),
    ],
)
def test_what_an_engine_has_not_is_refused(sampler: Sampler, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        refuse(sampler, problem().config, of(text))
    assert "\n" not in str(caught.value)


def test_a_server_is_those_ranks_that_share_experts() -> None:
    moe, dense = problem().config, problem("qwen3-8b").config
    assert engine_layout(moe, of("d8t2e8")) == (of("d4t2e8"), 2)
    assert engine_layout(moe, of("d8t2e16")) == (of("d8t2e16"), 1)
    assert engine_layout(moe, of("d8t2")) == (of("t2"), 8)
    assert engine_layout(dense, of("d8t2")) == (of("d8t2"), 1)


# ---- bytes


def test_a_group_over_several_replicas_has_its_prompt_in_each() -> None:
    work = Work(prompts=4, group=8, prompt_tokens=1000, answers=(100,))
    generated = tokens_in_flight(replace(work, prompt_tokens=0))
    assert tokens_in_flight(work) == tokens_in_flight(work, 4) == generated + 1000 / 8
    assert tokens_in_flight(work, 8) == generated + 1000 / 4  # four answers of a group on each
    assert tokens_in_flight(work, 64) == generated + 1000  # one answer at most
    few, many = (
        rollout_seconds(problem(gpus=f"{n}xH100-80", work=work), setup(f"d{n}"), Efficiency())["prefill"]
        for n in (4, 8)
    )
    assert few == many


def test_a_step_of_decoding_reads_what_is_kept() -> None:
    """Head, routers and norms stay in BF16, whatever the linear maps are in; adapters are those of a rank."""
    one = problem("kimi-k2", "64xH800-80", precision=Precision(sampler=DType.INT4))
    layout = of("d8t8e64")
    elements = stage_elements(one.config, one.adapter, layout, 0)
    step = _Pass(problem=one, layout=layout, efficiency=Efficiency())
    dense, experts = step.weights()
    assert experts == elements.experts * DType.INT4.num_bytes
    plain = 2 * (elements.routers + elements.vectors + elements.ends / 2) + 4 * elements.untrained
    assert dense == pytest.approx(elements.matrices * DType.INT4.num_bytes + plain)
    assert step._count_adapter_bytes() == 2 * elements.adapters


# ---- one base


def test_one_copy_is_mapped_by_the_local_engine_in_the_process_that_trains() -> None:
    cpu, one, four = problem(gpus="1xcpu"), arrangement("1", "1"), arrangement("d4e4", "d4")
    assert maps_once(local(cpu), one.train, one.rollout)
    assert not maps_once(cpu, one.train, one.rollout)
    assert not maps_once(local(problem(gpus="4xcpu")), four.train, four.rollout)


# ---- bytes that a plan says a rank sends: nothing alone, and the laws by which they grow


MOE = find_model("qwen3-30b-a3b").config
DENSE = find_model("qwen3-8b").config


def sent(
    layout: str, config: ModelConfig = MOE, adapter: AdapterSpec | None = LORA, number: int = 1
) -> Traffic:
    talk = Talk(config=config, adapter=adapter, layout=Layout.parse(layout), width=4, weight=4)
    one = added([talk.microbatch(4096, 2048, stage=0, backward=True)], number)
    return added([one, talk.update(0)])


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1024.0, 4096.0]))
def test_rows_between_tensor_ranks_grow_with_rows_and_ranks(ranks: int, rows: float) -> None:
    talk = Talk(config=DENSE, adapter=LORA, layout=Layout(tensor=ranks), width=2.0)
    size = sum(one.bytes for one in talk.layer(rows, moe=False).values())
    assert size == pytest.approx(4 * rows * DENSE.hidden_size * 2.0 * (ranks - 1) / ranks)


def test_adapters_move_less_than_all_weights() -> None:
    """Acceptance 5: gradients of LoRA against those of full-parameter training."""
    lora, full = (sent("d8", adapter=adapter)["all_reduce", "s"].bytes for adapter in (LORA, None))
    assert 20 < full / lora < 200


def test_no_layout_of_the_small_ones_is_forgotten() -> None:
    """Every product of axes has messages without an error, and some wherever there is more than one rank."""
    for d, t, p, c, e in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2)):
        if d * c * t % e:
            continue
        layout = Layout(data=d, tensor=t, pipeline=p, context=c, expert=e)
        sizes = sent(str(layout)).values()
        assert any(one.bytes for one in sizes) == (layout.world > 1), str(layout)
        assert all(one.bytes >= 0 and one.calls >= 0 for one in sizes)


# ---- seconds of a plan: laws that no hardware breaks, and figures that can be worked out by hand


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
    assert terms["products"] == pytest.approx(flops / find_peak(one.cluster.gpu, DType.BF16), rel=0.02)


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


def test_a_gpu_by_itself_has_its_memory_but_for_a_context() -> None:
    """A mixture of 30B was refused on one H100 for 0.6 GB: 5.5 GB of the card were not counted, NCCL was."""
    problem = ask("qwen3-30b-a3b", "1xH100-80", Options()).problem
    assert problem.cluster.gpu.memory - problem.context > 84e9
    assert ask("qwen3-30b-a3b", "8xH100-80", Options()).problem.context > problem.context
