"""A run of a budget ends with the step that spends it, whether it was killed meanwhile or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nouns import completion, episode, group_of
from small_loop import TEN_A_ROW, Bench, as_saved, raises_at

from ostinato.algo.algorithms import algorithm
from ostinato.every import Every
from ostinato.pipeline.credit import assign_credit
from ostinato.pipeline.state import Finish
from ostinato.types import Trajectory


def spent(bench: Bench) -> dict[int, float]:
    """FLOPs up to each step."""
    rows = [*bench.folder.metrics.rows()]
    flops = np.cumsum([row["flops/rollout"] + row["flops/train"] for row in rows])
    return dict(zip((row["step"] for row in rows), flops, strict=True))


def test_the_step_that_spends_the_budget_is_the_last(tmp_path: Path) -> None:
    free = Bench(tmp_path / "free", flops=TEN_A_ROW, steps=12)
    free.run()
    course = spent(free)
    for budget, last in ((course[5], 5), (course[5] + 1, 6), (course[4] + 1, 5)):
        bench = Bench(
            tmp_path / str(budget), flops=TEN_A_ROW, steps=12, budget=Every.parse(f"{budget:.0f} flops", "")
        )
        finished = bench.run()
        assert (finished.why, finished.state.step) == (Finish.SPENT, last)
        assert spent(bench)[last] >= budget > spent(bench)[last - 1]


def test_a_resumed_run_has_spent_what_it_has(tmp_path: Path) -> None:
    options = {"flops": TEN_A_ROW, "steps": 12, "checkpoint_every": 2}
    whole = Bench(tmp_path / "whole", **options)
    whole.run()
    budget = Every.parse(f"{spent(whole)[7]:.0f} flops", "")
    begun = Bench(tmp_path / "begun", **options, budget=budget)
    raises_at(begun, 5, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        begun.run()
    again = Bench(tmp_path / "begun", **options, budget=budget, **as_saved(begun, -1))
    finished = again.run()
    assert (finished.why, finished.state.step) == (Finish.SPENT, 7)
    over = Bench(tmp_path / "begun", **options, budget=budget, **as_saved(again, -1))
    assert over.run().state.step == 7  # nothing is left to do
    part = Bench(tmp_path / "part", **options, budget=budget.part(1 / 2))
    assert part.run().why is Finish.SPENT and part.loop.state.step < 7
    on = Bench(tmp_path / "part", **options, budget=budget, **as_saved(part, -1))
    assert on.run().state.step == 7 and spent(on) == spent(again)


def test_scores_come_at_shares_of_the_budget(tmp_path: Path) -> None:
    budget = Every.parse("8 steps", "")
    bench = Bench(tmp_path, steps=100, budget=budget)
    (one,) = bench.loop.evaluations
    bench.loop.evaluations = [replace(one, budget=budget, shares=(1 / 8, 1 / 4, 1 / 2))]
    kept = list[int]()
    bench.loop.keep = kept.append
    bench.run()
    rows = [*bench.folder.eval.rows()]
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 8] == [0, *kept]
    assert all(len(row["each"]) == 8 and all(n == 4 for n, _ in row["each"]) for row in rows)
    assert rows[-1]["pass@1"] == pytest.approx(np.mean([c / n for n, c in rows[-1]["each"]]))


def test_shuffled_rewards_are_the_same_rewards_of_other_answers() -> None:
    def answer(n: int) -> Trajectory:
        return episode(completion([n]), reward=float(n < 4), seed=(n,))

    groups = [group_of(*map(answer, range(8)), uid=f"p{k}", step=3) for k in range(40)]

    def advantages(**keys: bool) -> np.ndarray:
        credit = assign_credit(
            groups, algorithm("grpo", scale="none", **keys), min_verdicts=2, answer_tokens=4
        )
        return np.array([sample.advantages[-1] for sample in credit.samples]).reshape(40, 8)

    plain, dealt = advantages(), advantages(shuffled=True)
    assert (np.sort(plain) == np.sort(dealt)).all() and (plain != dealt).any()
    assert abs(dealt.mean(0)).max() < 0.25 and (dealt == advantages(shuffled=True)).all()
