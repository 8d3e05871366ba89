"""``ostinato bench pipeline``: its work, what it reads in a run, and what it makes of many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab.pipeline import Arm, Pipeline, balanced, overrides, summary, turns
from lab.pipeline_work import Window, Work, figures, write_prompts
from lab.whole_runs import allowed_cores, confined
from ostinato.config import Recipe
from ostinato.env.tasks import check_disjoint, load_tasks
from ostinato.run import RunFolder

SMALL = Work(distinct=64)


# ---- the work


def test_prompts_are_always_the_same_and_one_of_eight_is_a_long_chain(tmp_path: Path) -> None:
    one, other = (write_prompts(SMALL, tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    assert one.read_bytes() == other.read_bytes()
    halves = [load_tasks(str(one), split, 0, None, {"holdout": 0.125}) for split in ("train", "eval")]
    check_disjoint(*halves)
    uids = [prompt.uid for half in halves for prompt in half]
    assert len(set(uids)) == len(uids) == 64
    terms = Counter((uid.count("+") + uid.count("-") + 1) > 5 for uid in uids)  # the others have 5 at most
    assert 4 <= terms[True] <= 8  # uniform in 3 to 24 terms


@pytest.mark.parametrize("arm", Arm)
def test_every_arm_is_a_recipe(arm: Arm, tmp_path: Path) -> None:
    keys = (*SMALL.overrides(tmp_path / "p.jsonl"), "trainer.steps=18", *overrides(arm, 2))
    recipe = Recipe.load("quickstart", *keys)
    apart = arm in (Arm.SYNCHRONOUS, Arm.PIPELINED)
    overlap = arm in (Arm.COLOCATED, Arm.PIPELINED)
    assert (recipe.cluster.samplers, recipe.cluster.remote_trainer, recipe.cluster.pin) == (apart,) * 3
    assert (recipe.pipeline.overlap, recipe.pipeline.staleness) == (overlap, 2 * overlap)
    assert not recipe.draft.enabled and recipe.engine.max_batch == SMALL.slots


def test_every_arm_runs_once_in_a_round_and_another_one_begins() -> None:
    order = list(turns(Pipeline(seeds=(4, 5, 6))))
    for seed in (4, 5, 6):
        assert Counter(arm for s, arm in order if s == seed) == Counter(Arm)
    assert len({next(arm for s, arm in order if s == seed) for seed in (4, 5, 6)}) == 3


def test_seats_are_found_with_which_both_sides_are_as_busy() -> None:
    """By short runs of a seed that no round has; what was nearest is kept where none is near."""
    requested: list[Pipeline] = []

    def trained(plan: Pipeline, say: Any) -> list[dict[str, Any]]:
        requested.append(plan)
        busy = min(1.0, 6 / plan.work.slots)  # as busy as the trainer with 6 slots
        return [{"utilisation": {"sampler-0": busy, "trainer": 1.0}}]

    plan = Pipeline(arms=(Arm.SYNCHRONOUS, Arm.PIPELINED)).settled()
    assert balanced(plan, lambda line: None, trained).work.slots == 6
    assert [one.work.slots for one in requested] == [9, 6]
    assert all(one.arms == (Arm.PIPELINED,) and not set(one.seeds) & set(plan.seeds) for one in requested)
    requested.clear()
    given = Pipeline(slots=5).settled()
    assert balanced(given, lambda line: None, trained) == given and not requested
    assert given.arms == tuple(Arm)


def test_a_thread_is_confined_for_as_long_as_it_asks() -> None:
    before = allowed_cores()
    if not before:
        pytest.skip("this system cannot confine a process")
    with confined(before[:1]):
        assert allowed_cores() == before[:1]
    with confined(()):
        assert allowed_cores() == before


# ---- what a run says


def a_run(path: Path, steps: int = 8, seconds: float = 2.0) -> RunFolder:
    """Steps of equal length: the sampler works for the first half, the trainer for the second, but for a
    quarter second at the end."""
    folder = RunFolder.create(path, "")
    for step in range(1, steps + 1):
        start, stop = 100 + seconds * (step - 1), 100 + seconds * step
        pools = {"samplers": {"devices": 1, "busy": {}}}
        row = {"event": "step", "session": 1, "step": step, "seconds": seconds, "ended_at": stop}
        if step == 1:
            begun: dict[str, Any] = {"event": "start", "session": 1, "at": 100, "process_started": 99}
            begun |= {"step": 0, "pools": pools, "price_per_device_hour": 0, "currency": "USD"}
            folder.ledger.append(begun)
        folder.ledger.append(row | {"pools": pools, "tokens": {"sampled": 1}})
        half = (start + stop) / 2
        folder.timeline.append(
            {"worker": "sampler-0", "kind": "decode", "from": start, "to": half, "step": step},
            {"worker": "trainer", "kind": "wait", "from": start, "to": half},
            {"worker": "trainer", "kind": "train", "from": half, "to": stop - 0.25},  # no step: an actor
            {"worker": "controller", "kind": "train", "from": half, "to": stop, "step": step},
            {"worker": "grader-0", "kind": "grade", "from": start, "to": start + 0.01},
        )
        lengths = {"completions/max_length": 300.0, "completions/mean_length": 30.0}
        folder.write(step, {"staleness/mean": 0.5, "staleness/max": 2.0, "reward": step / 10, **lengths})
    folder.eval.append({"step": steps, "set": "eval", "pass@1": 0.75})
    return folder


def test_figures_are_of_the_window_and_rewards_of_the_run(tmp_path: Path) -> None:
    found = figures(a_run(tmp_path / "run"), Window(steps=8, warm_up=2, drain=2))
    assert found["steps_per_s"] == 0.5 and found["step_s"] == [2.0] * 4
    assert found["utilisation"] == {"sampler-0": 0.5, "trainer": 0.375}  # to wait is not to work
    assert found["bubble_share"] == pytest.approx(1 - (0.5 + 0.375) / 2, abs=1e-4)  # graders have no core
    assert found["train_s"] == [0.75] * 4
    assert (found["staleness_mean"], found["staleness_max"], found["tail"]) == (0.5, 2.0, 10.0)
    assert found["reward"] == pytest.approx(0.45) and found["held_out"] == 0.75


# ---- what many runs come to

SPEEDS = {Arm.ALONE: 0.50, Arm.THREADS: 0.60, Arm.COLOCATED: 0.80, Arm.SYNCHRONOUS: 0.45, Arm.PIPELINED: 0.90}


def runs(speeds: dict[Arm, float], drift: tuple[float, ...] = (1.0, 0.5, 2.0)) -> list[dict[str, Any]]:
    """Three rounds on a machine that is slower in the second and faster in the third; rewards of the arms
    differ by 0.01, 0.02 and 0.03 from the synchronous one's."""
    return [
        {
            "arm": str(arm),
            "seed": seed,
            "steps_per_s": speed * factor,
            "bubble_share": 0.05,
            "utilisation": {"sampler-0": 0.96, "trainer": 0.94},
            "train_s": [1.0, 1.1],
            "staleness_mean": 0.6,
            "staleness_max": 2.0,
            "tokens_per_s": 9e3,
            "tail": 9.0,
            "reward": 0.5 + (seed + 1) / 100 * (arm is not Arm.SYNCHRONOUS),
            "held_out": 0.7,
        }
        for seed, factor in enumerate(drift)
        for arm, speed in speeds.items()
    ]


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that is twice as slow in one round is so for all arms: it does not touch a ratio."""
    found = summary(Pipeline(), runs(SPEEDS))
    assert found["ratio_vs_sync"] == 2.0 and found["ratio_vs_colocated"] == 1.125
    assert found["ratios"]["ratio_vs_sync"]["low"] == found["ratios"]["ratio_vs_sync"]["high"] == 2.0
    assert found["steps_per_s"] == 0.9 and found["bubble_share"] == 0.05
    assert found["utilisation"] == {"sampler-0": 0.96, "trainer": 0.94} and found["staleness_mean"] == 0.6


def test_rewards_are_compared_seed_by_seed_with_their_interval() -> None:
    found = summary(Pipeline(), runs(SPEEDS))["reward"]
    gap = found["pipelined"]["reward"]
    assert gap["difference"] == pytest.approx(0.02)
    assert gap["half_90"] == pytest.approx(
        2.92 * 0.01 / 3**0.5, rel=1e-3
    )  # Student's, two degrees of freedom
    assert found["synchronous"]["reward"] == {"difference": 0.0, "half_90": 0.0}


def test_what_is_recommended_is_what_was_measured() -> None:
    """Workers were measured pinned, and recommended without ``cluster.pin``."""
    found = summary(Pipeline(), runs(SPEEDS))["best"]
    assert found["overrides"] == overrides(Arm.PIPELINED, 2) and "cluster.pin=true" in found["overrides"]
