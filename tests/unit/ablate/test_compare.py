"""Arms under one budget: who is run, what is chosen by, what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.scaling.arms.commands import write_page
from ostinato.apps.scaling.arms.compare import (
    SHARES,
    ArmsFile,
    ArmSpec,
    collect_outcomes,
    make_job,
    parse_budget,
    race_arms,
    read_arms,
    select_ends_at,
    sweep_rates,
)
from ostinato.apps.scaling.arms.compared import build_curves, build_race_answer, compute_ratios
from ostinato.apps.scaling.arms.jobs import Job, State, has_ended
from ostinato.config import dump_toml
from ostinato.run import RunFolder

BUDGET = (1e12, "flops")
OTHERS = 'eval.downstream.others.source="arithmetic"'
TOML = """
recipe = "quickstart"
lrs = [1e-4, 1e-3]

[arms."small, full"]
method = "full"

[arms."large, LoRA"]
rank = 8

[arms.coin]
control = "random reward"
lrs = [1e-3]
"""


def arms(tmp_path: Path, text: str = TOML) -> ArmsFile:
    path = tmp_path / "arms.toml"
    path.write_text(text)
    return read_arms(path)


def play(jobs: Sequence[Job], right: Callable[[Job, float, int], int]) -> list[State]:
    """Runs of 20 problems, 4 answers each, go on to their share of the budget; of the answers to a problem
    ``right(job, share, problem)`` are right."""
    for one in jobs:
        if has_ended(one):
            continue
        run = RunFolder(one.folder)
        if not run.recipe.exists():
            run = RunFolder.create(one.folder, dump_toml(one.recipe))
        before = max((row["spent"]["flops"] for row in run.eval.rows()), default=-1.0)
        for step, share in enumerate((0.0, *SHARES, 1.0)):
            if not before < share * BUDGET[0] <= one.recipe.trainer.until * BUDGET[0]:
                continue
            row = {"step": step, "set": "eval", "split": "eval", "k": 2, "pass@k": 0.5, "prompts": "p"}
            row |= {"spent": {"flops": share * BUDGET[0], "steps": float(step)}}
            run.eval.append({**row, "each": [[4, right(one, share, n)] for n in range(20)]})
            if step:
                run.metrics.append({"step": step, "forgetting/kept": 0.9, "rollout/trajectories": 256.0})
            for name in one.recipe.eval.downstream:  # the better rate loses there
                run.eval.append({**row, "set": name, "each": [[4, 2 * (not share)]] * 6})
        flops = {"sample": 5, "train": 6, "measure": 1}
        run.ledger.append({"event": "step", "seconds": 2.0, "flops": flops}, {"event": "end", "why": "spent"})
    return [State(job=one, what="done") for one in jobs]


def fake(jobs: Sequence[Job]) -> list[State]:
    """A better learning rate gains on the validation half, a worse one on the test half, which must not
    matter."""

    def right(one: Job, share: float, n: int) -> int:
        good, gain = one.recipe.trainer.lr > 5e-4, (share > 0) + (share == 1)
        odd, even = (gain, gain - 1) if good else (0, gain)
        mine = 0 if one.arm == "coin" else max(0, odd if n % 2 else even)
        noise = np.random.default_rng([one.seed, round(64 * share), n]).integers(0, 2)
        return min(4, 1 + mine + int(noise))

    return play(jobs, right)


@pytest.mark.parametrize("text", ["", "2e14", "0 flops", "3 parsecs", "1 flops 2 seconds", "nan flops"])
def test_a_budget_is_one_amount_of_one_thing(text: str) -> None:
    with pytest.raises(ValueError, match="--budget"):
        parse_budget(text)


def test_arms_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no arms"):
        arms(tmp_path, "recipe = 'quickstart'")
    with pytest.raises(ValueError, match="method 'dora'"):
        arms(tmp_path, "[arms.a]\nmethod = 'dora'")


def test_budgets_become_those_of_runs(tmp_path: Path) -> None:
    file = arms(tmp_path)
    found = {
        unit: make_job(file, "coin", 1e-3, 0, (amount, unit), tmp_path).recipe.trainer.budget
        for amount, unit in ((1e12, "flops"), (1000.0, "interactions"), (360.0, "seconds"))
    }
    assert found == {"flops": "1e+12 flops", "interactions": 4, "seconds": "0.1 hours"}


def test_learning_rates_of_one_arm_change_nothing_of_another(tmp_path: Path) -> None:
    """Common random numbers: a job is its arm, its learning rate and its seed."""
    file = arms(tmp_path)
    more = file.model_copy(
        update={"arms": {**file.arms, "small, full": ArmSpec(method="full", lrs=(1e-5, 3e-4))}}
    )
    met = list[list[Job]]()
    for each, out in ((file, "one"), (more, "other")):
        sweep_rates(each, BUDGET, tmp_path / out, lambda jobs: met.append([*jobs]) or fake(jobs))
    large = [sorted(j.recipe.trainer.lr for j in some if j.arm == "large, LoRA") for some in met]
    assert large == [[1e-4, 1e-3]] * 4


def test_a_rate_that_leads_early_and_falls_is_not_chosen(tmp_path: Path) -> None:
    """6M LoRA at 3e-3 led at 1/8 of the budget (0.500, 1e-3: 0.336) and at half of it (0.688, 1e-3: 0.586),
    and then fell; a sweep at a tenth had chosen it."""
    course = {1e-3: (1, 2, 4), 1e-2: (0, 4, 4), 3e-3: (2, 4, 3)}  # from the start, at 1/2, at the end

    def right(one: Job, share: float, n: int) -> int:
        return course[one.recipe.trainer.lr][(share >= 1 / 2) + (share == 1)]

    file = arms(tmp_path, "lrs = [1e-3, 1e-2, 3e-3]\n[arms.a]\n")
    found = race_arms(file, BUDGET, range(2), tmp_path / "out", lambda jobs: play(jobs, right))
    assert found.chosen == {"a": 1e-3}
    assert found.swept["a"] == {1e-3: [0.25, 1.0], 1e-2: [0.0], 3e-3: [0.5, 0.75]}
    spent = {
        path.name: [row["spent"]["flops"] / BUDGET[0] for row in RunFolder(path).eval.rows()]
        for path in (tmp_path / "out").iterdir()
    }
    whole = {f"a-lr{one}": [0.0, *SHARES, 1.0] for one in ("0.001-s0", "0.001-s1", "0.003-s0")}
    assert spent == whole | {"a-lr0.01-s0": [0.0, *SHARES[:4]]}  # none twice


def test_a_comparison_sweeps_chooses_and_answers(tmp_path: Path) -> None:
    file = arms(tmp_path)
    found = race_arms(file, BUDGET, range(3), tmp_path / "out", fake)
    assert found.chosen == {"small, full": 1e-3, "large, LoRA": 1e-3, "coin": 1e-3}
    assert len(found.lines) == 9 and "coin" not in found.swept
    shown = build_race_answer(found, "1e12 flops", file.threshold)
    coin = shown.result["arms"]["coin"]
    assert coin["raw"]["low"] <= 0 <= coin["raw"]["high"]
    assert shown.result["arms"]["large, LoRA"]["raw"]["low"] > 0
    equal = "All arms at an equal 1,792 interactions"
    titles = ["Arm", "Difference to small, full", equal, "Spent, FLOP"]
    assert [table.title for table in shown.tables] == titles
    other = build_race_answer(found, "1e12 flops", file.threshold, against="large, LoRA")
    less = [
        one.result["arms"][arm]["less"]["raw"]["median"]
        for one, arm in ((shown, "large, LoRA"), (other, "small, full"))
    ]
    assert other.tables[1].title == "Difference to large, LoRA" and less[0] == pytest.approx(-less[1])
    page = tmp_path / "page.html"
    write_page(page, "arms", shown, build_curves(found.lines))
    text = page.read_text()
    assert "large, LoRA" in text and "Score over compute" in text and "Score over interactions" in text
    again = race_arms(file, BUDGET, range(3), tmp_path / "out", fake)
    assert json.dumps(again.lines) == json.dumps(found.lines)


def test_an_arm_whose_runs_all_fail_leaves_the_others_their_answer(tmp_path: Path) -> None:
    """Both rates of an arm had destroyed its policy, and the whole comparison ended without a table."""

    def run(jobs: Sequence[Job]) -> list[State]:
        lost = [one for one in jobs if one.arm == "large, LoRA"]
        states = fake([one for one in jobs if one not in lost])
        return [*states, *(State(job=one, what="failed", error="nothing to learn from") for one in lost)]

    file = arms(tmp_path)
    found = race_arms(file, BUDGET, range(2), tmp_path / "out", run)
    assert [*found.chosen] == ["small, full", "coin"] and len(found.failed) == 2
    shown = build_race_answer(found, "1e12 flops", file.threshold)
    assert "large-lora-lr0.0001-s0 failed: nothing to learn from." in shown.lead


def test_a_sweep_is_the_beginning_of_a_race(tmp_path: Path) -> None:
    file = arms(tmp_path, f"overrides = ['{OTHERS}']\nlrs = [1e-4]\n[arms.a]\nrank = 2\n")
    swept, raced = (make_job(file, "a", 1e-3, 0, BUDGET, tmp_path, until) for until in (1 / 8, 1.0))
    trainer = raced.recipe.trainer.model_copy(update={"until": 1 / 8})
    assert swept.recipe == raced.recipe.model_copy(update={"trainer": trainer})
    assert swept.folder == raced.folder
    assert raced.recipe.eval.shares and list(raced.recipe.eval.downstream) == ["others"]
    assert raced.recipe.adapter.rank == 2
    with pytest.raises(ValueError, match=r"arm 'a'.*adapter\.path.*adapter\.kind \"full\""):
        bad = arms(tmp_path, "[arms.a]\nmethod = 'full'\noverrides = ['adapter.path=\"x\"']\n")
        make_job(bad, "a", 1e-3, 0, BUDGET, tmp_path)


def test_before_is_the_mean_over_seeds() -> None:
    """The first seed's score alone stood for all of them: 0.152 where three seeds had 0.17."""
    lines = [{"arm": "a", "prompts": "p", "each": [[k, 0.0, k], [1.0, 0.0, 1.0]]} for k in (0.0, 0.5, 1.0)]
    found = collect_outcomes(lines)["a"]
    assert found.pre.tolist() == [0.5, 0.5] and found.post.shape == (3, 2)


def test_gain_per_flop_is_compared_seed_by_seed() -> None:
    """Two problems, of which the first is the test half: 0.2 to 0.6 with 8 FLOP; the arm is there with 4, or
    never; one seed that never gets there leaves no ratio of compute."""

    def run(arm: str, seed: int, compute: list[float], scores: list[float]) -> dict[str, object]:
        return {"arm": arm, "seed": seed, "compute": compute, "each": [[score, 0.0] for score in scores]}

    first = [run("plain", seed, [0, 4, 8], [0.2, 0.4, 0.6]) for seed in (0, 1)]
    fast = [run("fast", seed, [0, 4, 8], [0.2, 0.5, 0.6]) for seed in (0, 1)]
    slow = [run("slow", 0, [0, 8], [0.2, 0.4]), run("slow", 1, [0, 8], [0.2, 0.6])]
    found = compute_ratios([*first, *fast, *slow], threshold=0.75)
    assert found["plain"]["gain"] == found["plain"]["to"] == found["fast"]["gain"]
    to, gain = found["fast"]["to"], found["slow"]["gain"]
    assert to is not None and to.median == pytest.approx(4 / 32**0.5)
    assert gain is not None and gain.median == pytest.approx(0.5**0.5) and found["slow"]["to"] is None


def test_what_was_not_trained_has_its_table(tmp_path: Path) -> None:
    file = arms(tmp_path, f"overrides = ['{OTHERS}']\nlrs = [1e-4, 1e-3]\n[arms.a]\n[arms.b]\nlrs = [1e-4]")
    shown = build_race_answer(race_arms(file, BUDGET, range(2), tmp_path / "out", fake), "1e12 flops", 0.75)
    (table,) = (one for one in shown.tables if one.title == "Not trained: others")
    assert [row[0] for row in table.rows] == ["a", "b"] and shown.result["elsewhere"].keys() == {"others"}
    lost = shown.result["elsewhere"]["others"]["a"]["raw"]
    assert lost["median"] == pytest.approx(-0.5, abs=0.1) and lost["high"] < 0


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.floats(0, 1))
def test_scores_at_the_same_amount_lie_on_the_line_between_two(gaps: list[int], share: float) -> None:
    """At a score of the run they are that score, between two on their line, behind the last the last one."""
    along = np.cumsum([0, *gaps]).tolist()
    each = np.random.default_rng(sum(gaps)).random((len(along), 6))
    one, test = {"played": along, "each": each.tolist()}, each[:, ::2]
    for k, where in enumerate(along):
        assert np.allclose(select_ends_at(one, "played", where), [test[0], test[k]])
    where = (1 - share) * along[0] + share * along[1]
    assert np.allclose(select_ends_at(one, "played", where)[1], (1 - share) * test[0] + share * test[1])
    assert np.allclose(select_ends_at(one, "played", along[-1] + 1)[1], test[-1])


def test_a_random_reward_that_gains_is_told(tmp_path: Path) -> None:
    file = arms(tmp_path, "lrs = [1e-4]\n[arms.a]\n[arms.chance]\ncontrol = 'random reward'\n")
    shown = build_race_answer(race_arms(file, BUDGET, range(2), tmp_path / "out", fake), "1e12 flops", 0.75)
    assert any("rewarded at random and gained" in sentence for sentence in shown.lead)


def test_nothing_finished_is_nothing_told(tmp_path: Path) -> None:
    file = arms(tmp_path, "lrs = [1e-4]\n[arms.a]\n")
    found = race_arms(file, BUDGET, [0], tmp_path / "out", lambda jobs: [])
    with pytest.raises(ValueError, match="no run has come"):
        build_race_answer(found, "1e12 flops", 0.75)
