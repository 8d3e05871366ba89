"""Layout independence: one training over many layouts is one training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from layout_runs import (
    MODELS,
    WAYS,
    Case,
    Run,
    batch_of,
    difference,
    new_trainer,
    plain_trainer,
    trained,
    trained_all,
    whole_model,
)
from nouns import scattered
from ranks import on_ranks
from worlds import lab

from ostinato.algo.algorithms import algorithm
from ostinato.algo.routing import Misaligned
from ostinato.model.config import parse_config
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expert_loads, rank_loads
from ostinato.parallel.placement import placed_experts
from ostinato.train.gate import drop_routes
from ostinato.train.totals import measure_balance
from ostinato.types import Support

MOE_LAYERS, EXPERTS = 3, 8  # of the model "moe"
CASES = [Case(model=model, way=way) for model in MODELS for way in WAYS]
SHORT = [replace(case, steps=1, dtype=torch.float64) for case in CASES]


MORE = ("d2c2e4", "d2t2e2x2", "d2t2f2", "d2t2p2e2v2")  # every axis beside others
REST = ("d2f2", "t2p2", "t2c2", "t2x2", "d2p2v2", "d4e2f2", "c2t2e4", "d2t2c2e4")


@pytest.fixture(scope="module")
def alone() -> list[Run]:
    return trained_all(0, 1, "1", CASES)


@pytest.fixture(scope="module")
def exact() -> list[Run]:
    return trained_all(0, 1, "1", SHORT)


@pytest.mark.parametrize("layout", ["p2", pytest.param("d2t2", marks=pytest.mark.slow)])
def test_twenty_steps_are_those_of_one_process(layout: str, alone: list[Run]) -> None:
    found = on_ranks(Layout.parse(layout).world, trained_all, layout, CASES, timeout_s=280)[0]
    for case, one, other in zip(CASES, found, alone, strict=True):
        apart = difference(one, other)
        assert apart.loss < 1e-5, (str(case), apart)
        assert apart.together < 1e-5, (str(case), apart)
        assert one.identity == other.identity and one.counters == other.counters
        for name, exported in one.adapters.items():
            assert torch.equal(exported, one.tensors[f"parameters.{name}"]), name


@pytest.mark.parametrize(
    "layout",
    [*("t2", "c2", "d2e2"), *(pytest.param(one, marks=pytest.mark.slow) for one in MORE), *lab(*REST)],
)
def test_in_double_precision_nothing_is_left(layout: str, exact: list[Run]) -> None:
    """So what is left in single precision is rounding."""
    found = on_ranks(Layout.parse(layout).world, trained_all, layout, SHORT, timeout_s=280)[0]
    for case, one, other in zip(SHORT, found, exact, strict=True):
        apart = difference(one, other)
        assert apart.loss < 1e-10 and apart.tensors < 1e-10, (str(case), apart)
        for a, b in zip(one.metrics, other.metrics, strict=True):
            shared = {name for name in b if not name.startswith(("comm/", "parallel/", "routing/straggler"))}
            assert shared <= a.keys()
            for name in shared:
                assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-9), name


HARD: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm": algorithm("gspo", clip_low=0.2, clip_high=0.2)},
    "cispo": {"algorithm": algorithm("cispo")},
    "reference": {"algorithm": algorithm("grpo", kl_coef=0.1)},
    "entropy": {"algorithm": algorithm("grpo", entropy_coef=0.05), "options": {"temperature": 0.7}},
    "sequences": {"algorithm": algorithm("grpo", correction="sequence_mask")},
    "recompute": {"options": {"recompute": True}},
    "one-microbatch": {"minibatches": 1, "microbatch": 1000},
    "free-routes": {"options": {"replay": False}},
    "decay": {"way": "full", "options": {"lr": 3e-3, "weight_decay": 0.1}},
}


def hard_cases() -> list[Case]:
    """What an axis could break: ratios of sequences, a reference, entropies, one microbatch for all ranks."""
    short = Case(model="mla", dtype=torch.float64, steps=2)
    return [replace(short, **changed) for changed in HARD.values()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t2c2", "d2p2", *lab("d2t2e4")])
def test_objectives_and_options(layout: str) -> None:
    found = on_ranks(4, trained_all, layout, hard_cases(), timeout_s=200)[0]
    for name, one, other in zip(HARD, found, trained_all(0, 1, "1", hard_cases()), strict=True):
        apart = difference(one, other)
        assert apart.loss < 1e-10 and apart.tensors < 1e-10, (name, apart)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS[:1], *WAYS[2:], *lab(WAYS[1])])
def test_a_checkpoint_of_one_layout_goes_on_under_another(way: str) -> None:
    """Written by one process, by d2t2, by p2c2, and gone on with by one process again; on the way experts
    lie now on these ranks, now on those."""
    case = Case(way=way, dtype=torch.float64, steps=2)
    state = trained_all(0, 1, "1", [case])[0]
    here, there = (placed_experts(scattered(MOE_LAYERS, EXPERTS, ranks), ranks) for ranks in (4, 2))
    for steps, layout, placement in (
        (4, "d2t2e4", here),
        (5, "d2e2", there),
        (6, "p2c2", None),
        (7, "d2f2", None),
    ):
        saved = state.tensors, state.counters
        going = replace(case, steps=steps, placement=placement, restored=saved)
        state = on_ranks(Layout.parse(layout).world, trained, layout, going, timeout_s=120)[0]
    state = trained_all(0, 1, "1", [replace(case, steps=8, restored=(state.tensors, state.counters))])[0]
    whole = trained_all(0, 1, "1", [replace(case, steps=8)])[0]
    apart = difference(state, replace(whole, losses=whole.losses[7:]))
    assert apart.tensors < 1e-10 and apart.loss < 1e-10
    moments = [name for name in whole.tensors if name.startswith("optimizer.")]
    for name in moments:
        torch.testing.assert_close(state.tensors[name], whole.tensors[name], rtol=1e-7, atol=1e-12, msg=name)
    assert state.counters == whole.counters


def supported(case: Case, seed: int = 3) -> Any:
    """A batch whose tokens were drawn from some ids only."""
    batch = batch_of(case, 0)
    rng = np.random.default_rng(seed)

    def cut(targets: np.ndarray) -> Support:
        kept = [
            np.union1d(rng.integers(0, 64, 9), [target]) if rng.random() < 0.7 else np.empty(0)
            for target in targets
        ]
        return Support.of([ids.astype(np.int32) for ids in kept])

    parts = tuple(replace(one, support=cut(one.targets)) for one in batch.microbatches)
    return replace(batch, microbatches=parts)


def supported_losses(rank: int, world: int, layout: str, cases: list[Case]) -> list[float]:
    trainers = [new_trainer(layout, case) if world > 1 else plain_trainer(case) for case in cases]
    return [
        trainer.step(supported(case)).metrics["loss"]
        for trainer, case in zip(trainers, cases, strict=True)
        for _ in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t2c2", *lab("t4p2")])
def test_supports_of_the_sampler(layout: str) -> None:
    cases = [Case(model="mla", dtype=torch.float64), Case(model="mla", way="full", dtype=torch.float64)]
    found = on_ranks(Layout.parse(layout).world, supported_losses, layout, cases)[0]
    assert found == pytest.approx(supported_losses(0, 1, "1", cases), rel=1e-10)


def measured(rank: int, world: int, layout: str, case: Case) -> dict[str, Any]:
    trainer = new_trainer(layout, case) if world > 1 else plain_trainer(case)
    row = trainer.measure(batch_of(case, 0))
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.mark.slow
def test_the_mismatch_is_measured_alike_on_every_rank() -> None:
    case = Case(dtype=torch.float64)
    alone = measured(0, 1, "1", case)
    for found in on_ranks(4, measured, "d2t2", case) + on_ranks(4, measured, "p2c2", case):
        _assert_alike(found, alone)


def _assert_alike(found: Any, expected: Any, where: str = "row") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            if key != "floor":  # of differences of rounding
                _assert_alike(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for n, one in enumerate(expected):
            _assert_alike(found[n], one, f"{where}[{n}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), where
    else:
        assert found == expected, where


def poisoned(rank: int, world: int, layout: str, case: Case) -> tuple[tuple[str, ...], str, bool, dict]:
    trainer = new_trainer(layout, case) if world > 1 else plain_trainer(case)
    before = {name: leaf.detach().clone() for name, leaf in trainer._named.items()}
    batch = batch_of(case, 0)
    advantages = batch.microbatches[1].advantages.copy()
    advantages[0] = np.inf
    parts = list(batch.microbatches)
    parts[1] = replace(parts[1], advantages=advantages)
    report = trainer.step(replace(batch, microbatches=tuple(parts)))
    same = all(torch.equal(before[name], leaf) for name, leaf in trainer._named.items())
    return report.uids, report.skipped, same, dict(report.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2t2", "p2t2", *lab("d4e2")])
def test_a_step_that_is_not_finite_is_refused_by_all(layout: str) -> None:
    """All ranks name the same samples, and no rank has moved."""
    case = Case(minibatches=1)
    uids, skipped, same, metrics = poisoned(0, 1, "1", case)
    assert uids and same and metrics["refused_steps"] == 1
    for found in on_ranks(4, poisoned, layout, case):
        assert found[0] == uids and found[2], found
        assert found[1].split("gradient")[0] == skipped.split("gradient")[0]
        assert found[3]["refused_steps"] == 1


def refused_routes(rank: int, world: int, layout: str, case: Case) -> str:
    trainer = new_trainer(layout, case) if world > 1 else plain_trainer(case)
    try:
        trainer.step(batch_of(case, 0))
    except Misaligned as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["c2p2", *lab("d2t2")])
def test_wrong_routes_are_refused_by_all_in_the_same_words(layout: str) -> None:
    case = Case(dtype=torch.float64, options={"replay_threshold": 0.9})
    output = refused_routes(0, 1, "1", case)
    assert "probable cause" in output
    assert on_ranks(4, refused_routes, layout, case) == [output] * 4


def mirrored(rank: int, world: int, layout: str, case: Case) -> dict[str, Any]:
    whole, _ = whole_model(case)
    trainer = new_trainer(layout, case, mirror=whole.set_trainable(False) if rank == 0 else None)
    trainer.step(batch_of(case, 0))
    assert trainer.adapters() is None
    return dict(whole.named_parameters())


@pytest.mark.slow
def test_a_mirror_has_all_parameters_as_they_were_trained() -> None:
    case = Case(way="full", dtype=torch.float64, steps=1)
    alone = trained_all(0, 1, "1", [case])[0].tensors
    for name, parameter in on_ranks(4, mirrored, "d2p2", case)[0].items():
        torch.testing.assert_close(parameter, alone[f"parameters.{name}"], rtol=1e-10, atol=1e-12, msg=name)


def odd() -> int:
    """Rows of a microbatch with which two data ranks do not come out even."""
    sizes = range(40, 200, 10)
    return next(
        size for size in sizes if len(batch_of(Case(minibatches=1, microbatch=size), 0).microbatches) % 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2t2e4", *lab("d2c2e4", "d2f2")])
def test_data_ranks_that_do_not_come_out_even_train_the_same(layout: str) -> None:
    """One of them runs padding alone, or the other would wait for its rows or weights."""
    case = Case(steps=2, minibatches=1, microbatch=odd(), dtype=torch.float64)
    microbatches = batch_of(case, 0).microbatches
    alone = trained_all(0, 1, "1", [case])[0]
    found = on_ranks(Layout.parse(layout).world, trained_all, layout, [case])[0][0]
    for name, value in alone.tensors.items():
        torch.testing.assert_close(found.tensors[name], value, rtol=1e-9, atol=1e-11, msg=name)
    if layout == "d2t2e4":
        counted = found.metrics[0]
        assert len(microbatches) % 2 == counted["parallel/idle_passes"] == 1
        padding = sum(len(one.tokens) % 2 for one in microbatches) + 2  # and two rows of an idle pass
        assert counted["parallel/padding_rows"] == padding
        assert counted["comm/bytes/all_gather/t"] > 0 and counted["comm/bytes/all_reduce/s"] > 0


@pytest.mark.slow
def test_a_run_reports_how_uneven_its_own_ranks_are() -> None:
    """Under a layout by the placement in use, on one rank as if neighbours lay on as many as divide them.
    Loads of microbatches are not added up: in each of them ranks wait for each other."""
    owner = scattered(MOE_LAYERS, EXPERTS, 2)
    case = Case(steps=1, placement=placed_experts(owner, 2))
    (apart, *_), *_ = on_ranks(2, trained_all, "d2e2", [case])
    (alone,) = trained_all(0, 1, "1", [case])
    assert apart.metrics[0]["routing/straggler_ranks"] == 2
    assert alone.metrics[0]["routing/straggler_ranks"] == EXPERTS
    assert alone.metrics[0]["routing/straggler"] >= apart.metrics[0]["routing/straggler"] >= 1
    assert alone.metrics[0]["routing/capacity_factor"] == apart.metrics[0]["routing/capacity_factor"]
    moe, batch = parse_config(MODELS["moe"]).moe, batch_of(case, 0)
    assert moe is not None and len(batch.microbatches) > 1
    carried = [one.experts for one in batch.microbatches if one.experts is not None]
    loads = np.stack([rank_loads(expert_loads(one, EXPERTS), owner, 2) for one in carried])
    wanted = loads.max(axis=2).sum() / loads.mean(axis=2).sum()
    assert apart.metrics[0]["routing/straggler"] == pytest.approx(wanted)
    assert measure_balance(drop_routes(batch), moe, owner) == {}
