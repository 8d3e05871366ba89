"""The race: curves and what they cost, the search, the meter, TRL's adapters as ours."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, sample_of
from nouns import group_of as group
from safetensors.torch import save_file

from lab.contender import ContenderFailed
from lab.race.curves import COSTS, SHARES, attainable, compared, compute, cost_of, geometric, rising
from lab.race.meter import Meter
from lab.race.scores import from_peft
from lab.race.search import Axis, Search
from ostinato.algo.pack import pack
from ostinato.model.config import read_config
from ostinato.model.flops import FlopModel, Part, Rates, Work
from ostinato.model.named import find_model_folder
from ostinato.model.shapes import compute_linear_shapes
from ostinato.pipeline.account import compute_batch_work, compute_rollout_work

scores = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(scores)
def test_the_curve_is_the_nearest_that_never_falls(values: list[float]) -> None:
    """Against the formula max over a <= i of min over b >= i of the mean from a to b."""
    n = range(len(values))
    mean = {(a, b): statistics.fmean(values[a : b + 1]) for a in n for b in n if a <= b}
    plain = [max(min(mean[a, b] for b in n if b >= i) for a in n if a <= i) for i in n]
    assert rising(values) == pytest.approx(plain, abs=1e-9)


def run(curve: list[float], pace: float = 1.0) -> dict[str, Any]:
    return {"scores": curve} | {cost: [pace * at for at in range(len(curve))] for cost in COSTS}


@given(scores, st.floats(0, 1), st.floats(0, 1))
def test_a_higher_target_never_costs_less(values: list[float], one: float, other: float) -> None:
    low, high = (cost_of(run(values), "wall_s", target) for target in sorted((one, other)))
    assert high is None or (low is not None and low <= high)
    assert cost_of(run(values), "wall_s", rising(values)[-1]) is not None


def test_between_two_checkpoints_is_a_straight_line() -> None:
    assert cost_of(run([0.0, 0.4, 0.8]), "flops", 0.5) == pytest.approx(1.25)
    assert cost_of(run([0.3, 0.4]), "flops", 0.2) == 0
    assert cost_of(run([0.0, 0.4]), "flops", 0.5) is None


@given(st.floats(0.2, 20))
def test_the_same_curves_at_another_pace_differ_by_the_pace(pace: float) -> None:
    curves = [[0.1, 0.5, 0.9], [0.1, 0.4, 0.8]]
    found = compared([run(c) for c in curves], [run(c, pace) for c in curves])
    for share in map(str, SHARES):
        for cost in COSTS:
            ratio = found["shares"][share][cost]["ratio"]
            assert [ratio["mean"], *ratio["interval"]] == pytest.approx([pace] * 3)
    assert (found["before"], found["best"]) == pytest.approx((0.1, 0.85))


def test_a_run_that_never_gets_there_is_a_lower_bound_and_is_named_one() -> None:
    found = compared([run([0.0, 1.0])] * 2, [run([0.0, 0.5, 0.5]), run([0.0, 1.0])])
    half, most = (found["shares"][share]["wall_s"] for share in ("0.5", "0.9"))
    assert half["at_least"] == 0 and half["trl"]["n"] == 2
    assert most["at_least"] == 1 and most["trl"]["n"] == 1 and most["of"] == 2
    assert most["ratio"]["n"] == 2 and most["ratio"]["mean"] == pytest.approx((2 / 0.9) ** 0.5)
    unreached = compared([run([0.0, 0.1])], [run([0.0, 1.0])])["shares"]["0.9"]["wall_s"]
    assert unreached["ours"] is None and unreached["ratio"] is None


def test_what_can_be_attained_is_the_better_end() -> None:
    assert attainable({"a": [run([0.2, 0.6])], "b": [run([0.2, 0.9]), run([0.2, 0.7])]}) == pytest.approx(
        (0.2, 0.8)
    )


def test_an_interval_is_of_logarithms() -> None:
    found = geometric([1.0, 100.0])
    assert found is not None and found["mean"] == pytest.approx(10)
    low, high = found["interval"]
    assert low * high == pytest.approx(100) and low < 1 and high > 100


PRICES = FlopModel(
    parts={Part.MLP: Rates(tokens=3.0, pairs=7.0, logits=11.0)},
    backward_rates=Rates(tokens=13.0, pairs=17.0, logits=19.0),
)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_trls_flops_are_those_that_the_ledger_has_of_the_same_answers(shapes: list[Any]) -> None:
    groups = [group(*(episode(completion(n), prompt) for n in answers)) for prompt, answers in shapes]
    samples = [
        sample_of(np.full(prompt + n, at), prompt, group=at)
        for at, (prompt, answers) in enumerate(shapes)
        for n in answers
    ]
    weights = [one.loss_mask.astype(float) for one in samples]
    batch = compute_batch_work(pack(samples, weights, tokens_per_microbatch=10_000))
    needed = PRICES.forward(compute_rollout_work(groups)) + PRICES.forward(batch) + PRICES.backward(batch)
    assert compute(PRICES, shapes) == pytest.approx(needed)


def test_an_answer_without_a_token_costs_nothing_of_its_own() -> None:
    assert compute(PRICES, [(4, [0])]) == PRICES.forward(Work(3, 6, 0))


def test_the_search_goes_axis_by_axis_and_leaves_out_what_fails() -> None:
    tried: list[tuple[Any, ...]] = []

    def trial(setting: Mapping[str, Any], learns: bool, limit_s: float) -> dict[str, Any]:
        tried.append((*setting.values(), learns))
        if setting["dtype"] == "broken":
            raise ContenderFailed("it is broken")
        pace = {"slow": 2.0, "fast": 1.0}[setting["dtype"]]
        curve = (
            [0.1, 0.9, 0.9] if setting["lr"] == 3 else [0.1, 0.5, 0.9] if setting["lr"] == 1 else [0.1] * 3
        )
        return run(curve, pace) | {"step_s": [9.0, pace]}

    lines: list[str] = []
    search = Search(trial=trial, say=lines.append)
    axes = [
        Axis(name="dtype", values=["slow", "broken", "fast"]),
        Axis(name="lr", values=[1, 2, 3], learns=True),
    ]
    assert search.best(axes) == {"dtype": "fast", "lr": 3}
    assert tried == [
        ("slow", 1, False), ("broken", 1, False), ("fast", 1, False),
        ("fast", 1, True), ("fast", 2, True), ("fast", 3, True),
    ]  # fmt: skip
    assert len(search.trials) == len(lines) == 6 and "it is broken" in lines[1]
    search.best(axes)
    assert len(tried) == 6, "what is known is not run again"
    with pytest.raises(ContenderFailed, match="no value of dtype"):
        search.best([Axis(name="dtype", values=["broken", "broken"]), axes[1]])


def test_a_setting_that_is_fast_and_falls_back_is_not_chosen() -> None:
    """Two minibatches were ahead at the third step and fell back later; by their own axis alone they won."""
    curves = {(1, 1): [0.1, 0.5, 0.9, 0.9], (3, 1): [0.1, 0.65, 0.85], (3, 2): [0.1, 0.75, 0.7, 0.62]}

    def trial(setting: Mapping[str, Any], learns: bool, limit_s: float) -> dict[str, Any]:
        return run(curves[setting["lr"], setting["minibatches"]]) | {"step_s": [1.0]}

    axes = [Axis(name="lr", values=[1, 3], learns=True), Axis(name="minibatches", values=[1, 2], learns=True)]
    assert Search(trial=trial, say=print).best(axes) == {"lr": 3, "minibatches": 1}


def test_what_lies_in_pauses_is_not_counted() -> None:
    meter = Meter()
    meter.started = 10.0
    meter._seen = [(10.0, 0.0, 5.0), (20.0, 20.0, 50.0), (30.0, 30.0, 70.0)]  # pyright: ignore[reportPrivateUsage]
    found = meter.course(12.0, [15.0, 25.0], [(15.0, 20.0)])
    assert found["wall_s"] == [0.0, 3.0, 8.0] and found["from_start_s"] == [2.0, 5.0, 10.0]
    assert found["device_s"] == pytest.approx([0.0, 6.0, 25.0 - 4.0 - 10.0])
    assert found["peak_mb"] == [50.0, 50.0, 70.0]


@pytest.mark.skipif(sys.platform != "linux", reason="the meter reads /proc")
def test_the_meter_sees_what_a_grandchild_has_used() -> None:
    burn = "x = bytearray(50_000_000)\nfor i in range(3_000_000): pass\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    process = Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    meter = Meter()
    meter.follow(process.pid)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    while meter.at(time.time())[1] < 50:  # it looks again and again
        time.sleep(0.02)
    process.communicate("\n")
    meter.close()
    assert meter.at(time.time())[0] > 0.02


def test_trls_adapter_is_read_as_peft_applies_it(tmp_path: Path) -> None:
    """peft's ParamWrapper: A [E r, in] by experts, B [out, r E] by ranks; gate_up_proj is gate over up."""
    shape, rank = read_config(find_model_folder("asset:seed-moe")), 2
    linears = compute_linear_shapes(shape)
    (experts, width, hidden), rng = linears["layers.1.experts.gate"], torch.manual_seed(0)
    prefix, tensors = "base_model.model.model.layers.1", {}
    for module, into, out in (
        ("mlp.experts.base_layer", hidden, 2 * width),
        ("mlp.experts", width, hidden),
    ):
        tensors[f"{prefix}.{module}.lora_A.weight"] = torch.randn(experts * rank, into, generator=rng)
        tensors[f"{prefix}.{module}.lora_B.weight"] = torch.randn(out, rank * experts, generator=rng)
    out, into = linears["layers.1.attn.q"]
    tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"] = torch.randn(rank, into)
    tensors[f"{prefix}.self_attn.q_proj.lora_B.weight"] = torch.randn(out, rank)
    for layer in (2, 3):
        for name in [name for name in tensors if ".layers.1." in name]:
            tensors[name.replace(".layers.1.", f".layers.{layer}.")] = tensors[name].clone()
    out, into = linears["layers.0.attn.q"]
    for part, size in (("A", (rank, into)), ("B", (out, rank))):
        tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] = torch.zeros(size)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 4}))
    adapters = from_peft(tmp_path, shape)
    assert set(adapters.spec.targets) == {"attn.q", "experts.gate", "experts.up", "experts.down"}
    assert adapters.spec.get_scale("layers.1.experts.gate") == 2.0

    def update(module: str, expert: int) -> torch.Tensor:
        a, b = (tensors[f"{prefix}.{module}.lora_{part}.weight"] for part in "AB")
        return sum(
            (torch.outer(b[:, k * experts + expert], a[expert * rank + k]) for k in range(rank)),
            torch.zeros(len(b), a.shape[1]),
        )

    for expert in range(experts):
        whole = torch.cat([product(adapters, f"experts.{role}", expert) for role in ("gate", "up")])
        torch.testing.assert_close(whole, update("mlp.experts.base_layer", expert))
        down = product(adapters, "experts.down", expert)
        torch.testing.assert_close(down, update("mlp.experts", expert))


def product(adapters: Any, name: str, expert: int) -> torch.Tensor:
    a, b = (factor.detach()[expert] for factor in adapters.tensors[f"layers.1.{name}"])
    return b @ a
