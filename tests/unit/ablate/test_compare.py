"""Arms under one budget: who is run, what is chosen by, what is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ablate.commands import write_page
from ostinato.ablate.compare import (
    ArmsFile,
    ArmSpec,
    compare,
    ends_at,
    job,
    outcomes,
    parse_budget,
    read_arms,
    sweep,
)
from ostinato.ablate.compared import answer, charts
from ostinato.ablate.jobs import Job, State
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


def fake(jobs: Sequence[Job]) -> list[State]:
    """Runs of 20 problems, 4 answers each: a better learning rate gains on the validation half, a worse one
    on the test half, which must not matter."""
    for one in jobs:
        if (one.folder / "recipe.toml").exists():
            continue
        run = RunFolder.create(one.folder, dump_toml(one.recipe))
        good, rng = one.recipe.trainer.lr > 5e-4, np.random.default_rng(one.seed)
        for step, (flops, gain) in enumerate(((0.0, 0), (2e11, 1), (1e12, 2))):
            odd, even = (gain, gain - 1) if good else (0, gain)
            if one.arm == "coin":
                odd = even = 0
            right = [
                min(4, 1 + max(0, (odd if n % 2 else even)) + int(rng.integers(0, 2))) for n in range(20)
            ]
            row = {
                "step": step,
                "set": "eval",
                "split": "eval",
                "k": 2,
                "pass@k": 0.5,
                "prompts": "p",
                "each": [[4, c] for c in right],
            }
            run.eval.append({**row, "spent": {"flops": flops, "steps": float(step)}})
            for name in one.recipe.eval.downstream:  # the better rate loses there
                each = [[4, 2 - gain * good + int(rng.integers(0, 2))] for _ in range(6)]
                run.eval.append({**row, "set": name, "each": each, "spent": {"flops": flops, "steps": 0.0}})
        run.metrics.append({"step": 1, "forgetting/kept": 0.9, "rollout/trajectories": 64.0})
        flops = {"sample": 5, "train": 6, "measure": 1}
        run.ledger.append({"event": "step", "seconds": 2.0, "flops": flops}, {"event": "end", "why": "spent"})
    return [State(job=one, what="done") for one in jobs]


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
        unit: job(file, "coin", 1e-3, 0, (amount, unit), tmp_path).recipe.trainer.budget
        for amount, unit in ((1e12, "flops"), (1000.0, "interactions"), (360.0, "seconds"))
    }
    assert found == {"flops": "1e+12 flops", "interactions": 4, "seconds": "0.1 hours"}


def test_learning_rates_of_one_arm_change_nothing_of_another(tmp_path: Path) -> None:
    """Common random numbers: a job is its arm, its learning rate and its seed."""
    file = arms(tmp_path)
    more = file.model_copy(
        update={"arms": {**file.arms, "small, full": ArmSpec(method="full", lrs=(1e-5, 3e-4))}}
    )
    one, other = (sweep(each, BUDGET, tmp_path)["large, LoRA"] for each in (file, more))
    assert one == other and [each.recipe.trainer.lr for each in one.values()] == [1e-4, 1e-3]


def test_a_comparison_sweeps_chooses_and_answers(tmp_path: Path) -> None:
    file = arms(tmp_path)
    found = compare(file, BUDGET, range(3), tmp_path / "out", fake)
    assert found.chosen == {"small, full": 1e-3, "large, LoRA": 1e-3, "coin": 1e-3}
    assert len(found.lines) == 9 and "coin" not in found.swept
    shown = answer(found, "1e12 flops", file.threshold)
    coin = shown.result["arms"]["coin"]
    assert coin["raw"]["low"] <= 0 <= coin["raw"]["high"]
    assert shown.result["arms"]["large, LoRA"]["raw"]["low"] > 0
    titles = ["Arm", "Less small, full", "The other accounting: all arms at 512 interactions", "Spent, FLOP"]
    assert [table.title for table in shown.tables] == titles
    page = tmp_path / "page.html"
    write_page(page, "arms", shown, charts(found.lines))
    text = page.read_text()
    assert "large, LoRA" in text and "Score over compute" in text and "Score over interactions" in text
    again = compare(file, BUDGET, range(3), tmp_path / "out", fake)
    assert json.dumps(again.lines) == json.dumps(found.lines)


def test_a_sweep_is_scored_at_its_end_alone_and_a_race_on_other_sets_too(tmp_path: Path) -> None:
    """Its scores at shares were never read, and cost more than its training."""
    file = arms(tmp_path, f"overrides = ['{OTHERS}']\nlrs = [1e-4]\n[arms.a]\ntied = 13\nrank = 2\n")
    swept, raced = (job(file, "a", 1e-3, 0, BUDGET, out).recipe for out in (tmp_path / "sweep", tmp_path))
    assert not swept.eval.shares and not swept.eval.at_start and not swept.eval.downstream
    assert raced.eval.shares and raced.eval.at_start and list(raced.eval.downstream) == ["others"]
    assert (raced.adapter.tied, raced.adapter.rank) == (13, 2)
    with pytest.raises(ValueError, match=r"arm 'a'.*adapter\.tied is 13 with adapter\.kind 'full'"):
        job(arms(tmp_path, "[arms.a]\ntied = 13\nmethod = 'full'\n"), "a", 1e-3, 0, BUDGET, tmp_path)


def test_before_is_the_mean_over_seeds() -> None:
    """The first seed's score alone stood for all of them: 0.152 where three seeds had 0.17."""
    lines = [{"arm": "a", "prompts": "p", "each": [[k, 0.0, k], [1.0, 0.0, 1.0]]} for k in (0.0, 0.5, 1.0)]
    found = outcomes(lines)["a"]
    assert found.pre.tolist() == [0.5, 0.5] and found.post.shape == (3, 2)


def test_what_was_not_trained_has_its_table(tmp_path: Path) -> None:
    file = arms(tmp_path, f"overrides = ['{OTHERS}']\nlrs = [1e-4, 1e-3]\n[arms.a]\n[arms.b]\nlrs = [1e-4]")
    shown = answer(compare(file, BUDGET, range(2), tmp_path / "out", fake), "1e12 flops", 0.75)
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
        assert np.allclose(ends_at(one, "played", where), [test[0], test[k]])
    where = (1 - share) * along[0] + share * along[1]
    assert np.allclose(ends_at(one, "played", where)[1], (1 - share) * test[0] + share * test[1])
    assert np.allclose(ends_at(one, "played", along[-1] + 1)[1], test[-1])


def test_a_random_reward_that_gains_is_told(tmp_path: Path) -> None:
    file = arms(tmp_path, "lrs = [1e-4]\n[arms.a]\n[arms.chance]\ncontrol = 'random reward'\n")
    shown = answer(compare(file, BUDGET, range(2), tmp_path / "out", fake), "1e12 flops", 0.75)
    assert any("rewarded at random and gained" in sentence for sentence in shown.lead)


def test_nothing_finished_is_nothing_told(tmp_path: Path) -> None:
    file = arms(tmp_path, "lrs = [1e-4]\n[arms.a]\n")
    found = compare(file, BUDGET, [0], tmp_path / "out", lambda jobs: [])
    with pytest.raises(ValueError, match="no run has come"):
        answer(found, "1e12 flops", 0.75)
