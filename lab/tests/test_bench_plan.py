"""The arithmetic of ``bench plan``: cores that are shared, rows of the table, and what a plan is asked."""

from __future__ import annotations

import pytest
import torch

from lab.live import LiveBytes, storages
from lab.plan import (
    BESIDE,
    EXPERTS,
    Plan,
    for_plans,
    on_cores,
    problem_of,
    row,
    seconds_of,
    setup_of,
    verdict,
)
from lab.plan_runs import Run, batch_of, configurations, of_ranks
from lab.settings import Clock
from ostinato.plan.training import load_of


def test_a_rank_that_is_alone_has_the_memory_to_itself() -> None:
    """Mixtures on one rank had been planned a third slower than they are."""
    alone, two = (
        next(one for one in configurations() if str(one) == f"moe shared_outer {layout}")
        for layout in ("1", "d2e2")
    )
    assert BESIDE not in seconds_of(alone)
    assert seconds_of(two)[BESIDE] == seconds_of(two)[EXPERTS]
    assert for_plans({EXPERTS: 0.5, BESIDE: 0.4, "train/head": 1.2}) == {EXPERTS: 0.9, "train/head": 1.2}
    assert for_plans({"train/head": 1.2}) == {"train/head": 1.2}


def test_there_are_twenty_configurations_of_one_to_eight_ranks() -> None:
    runs = configurations()
    assert len(set(runs)) == len(runs) >= 20
    assert set(of_ranks(runs)) == {1, 2, 4, 8}
    assert Plan().keep and not Plan().shortened().keep and not Plan().shortened().sweep


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_batch_has_the_rows_that_its_plan_says(model: str) -> None:
    run = Run(model=model, way="full", layout="1")
    batch, load = batch_of(run), load_of(problem_of(run), setup_of(run))
    assert len(batch.microbatches) == load.number == 8
    assert {len(one.tokens) for one in batch.microbatches} == {load.rows} == {run.shape.microbatch}
    assert {len(one.rows) for one in batch.microbatches} == {load.logits}


def test_ranks_take_turns_on_cores() -> None:
    terms = {"train/products": 4.0, "train/bubble": 3.0}
    assert on_cores(terms, ranks=2, cores=2) == terms
    assert on_cores(terms, ranks=4, cores=2) == {"train/products": 8.0}  # others fill the bubble, and more
    assert on_cores(terms, ranks=3, cores=2) == {"train/products": 6.0, "train/bubble": 1.0}


def test_processor_time_knows_no_waiting() -> None:
    run = Run(model="dense", way="lora", layout="p2")
    assert "train/bubble" in seconds_of(run)
    assert "train/bubble" not in seconds_of(run, Clock.CPU)
    assert seconds_of(run)["train/calls"] > 0


def test_a_row_compares_the_fullest_rank() -> None:
    run = Run(model="dense", way="lora", layout="p2")
    first, last = (
        {"weights": size, "adapters": 655360, "gradients": 655360, "optimizer": 2 * 655360, "peak": peak}
        for size, peak in ((17835520, 4e7), (17835520, 6e7))
    )
    found = row(run, {"ranks": [first | {"seconds": 1.0}, last | {"seconds": 1.5}]})
    assert found["peak"] == 6e7 and found["measured_s"] == 1.5
    assert found["exact"] < 0.001
    result = {"rows": [found | {"fitted_s": 1.2}], "held_out": {"median": 0.1, "worst": 0.2}, "clock": "wall"}
    assert any("bar 0.1 %" in line for line in verdict(result))
    assert problem_of(run).cluster.num_gpus == 2 and setup_of(run).layout.world == 2


def test_live_bytes_are_those_of_storages() -> None:
    held = torch.zeros(1000)
    with LiveBytes([held]) as live:
        before = live.live
        assert before == 4000
        one = held + 1  # 4000 bytes more
        view = one.view(10, 100)  # none
        assert live.live == 8000
        two = torch.cat((one, one))
        assert live.peak == 16000
        del two
        assert live.live == 8000 and view.shape
        del one
        assert live.live == 8000  # the view holds it
        del view
        assert live.live == before and live.peak == 16000


def test_the_backward_is_watched_too() -> None:
    weight = torch.zeros(100, 100, requires_grad=True)
    with LiveBytes([weight]) as live:
        weight.exp().sum().backward()
    assert live.live >= storages([weight]) + weight.grad.nbytes  # type: ignore[union-attr]
    assert live.peak >= 3 * 40000
