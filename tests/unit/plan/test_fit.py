"""``ostinato plan fit``: runs that took so many times longer teach later plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.plan.fit import Factors, Part, fit, keep, kept, kept_file, parts_of
from ostinato.plan.record import FILE
from ostinato.run import RunFolder

ASKED = ["plan", "qwen3-8b", "--gpus", "4xH100-80", "--prompts", "32", "--max-answer", "4096"]
ASKED += ["--answer-tokens", "512", "--train-layout", "d4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    return done.output


def slow_run(folder: Path, times: float) -> RunFolder:
    """A run that was planned, and takes so many times longer than its plan says."""
    run = RunFolder.create(folder, 'name = "planned"\n\n[parallel]\nlayout = "d4"\n')
    told(*ASKED, "--record", str(folder))
    seconds = json.loads((folder / FILE).read_bytes())["seconds"]
    took = {phase: times * sum(terms.values()) for phase, terms in seconds.items()}
    train = took["train"] + took["logprobs"] + took["refit"]
    for step, slow in ((1, 9.0), (2, 1.0), (3, 1.0)):  # the first one warms up
        run.write(step, {"time/rollout_s": slow * took["rollout"], "time/train_s": slow * train})
    return run


def changed(run: RunFolder, **more: Any) -> RunFolder:
    plan = json.loads((run.path / FILE).read_bytes()) | more
    (run.path / FILE).write_text(json.dumps({name: one for name, one in plan.items() if one is not None}))
    return run


def seconds_of_a_step() -> tuple[str, float]:
    found = json.loads(told(*ASKED, "--json", "-"))
    return found["efficiency"], found["plans"][0]["seconds_total"]


def test_runs_teach_later_plans(tmp_path: Path) -> None:
    run, before = slow_run(tmp_path / "run", 2.0), seconds_of_a_step()
    assert "nothing measured" in before[0]
    said = told("plan", "fit", str(run.path))
    assert said.count("2.00 times") == 2 and "kept for later plans of H100-80: rollout 2.00" in said
    after = seconds_of_a_step()
    assert after == ("data sheets, phases by factors of 1 runs", pytest.approx(2 * before[1], rel=0.01))


def test_factors_that_a_plan_was_made_with_are_divided_out(tmp_path: Path) -> None:
    """A run whose plan had been right gave factors of 1, and the next plan forgot what was known."""
    told("plan", "fit", str(slow_run(tmp_path / "run", 2.0).path))
    right = slow_run(tmp_path / "other", 1.0)
    told("plan", "fit", str(right.path))
    found = kept(kept_file("H100-80"))
    assert found is not None and set(found.phases) >= {"rollout", "train", "refit"}
    assert all(factor == pytest.approx(2.0) for factor in found.phases.values())


def test_of_several_runs_the_median_counts() -> None:
    parts = [
        Part(run=f"{n}", name="train", phases=("train", "refit"), planned=1.0, measured=measured)
        for n, measured in enumerate((1.0, 2.0, 9.0))
    ]
    assert fit(parts) == Factors(phases={"train": 2.0, "refit": 2.0}, runs=3)


def test_of_overlap_only_the_trainer_and_what_it_publishes_teach(tmp_path: Path) -> None:
    """time/rollout_s is what the trainer waited then; on the same devices it is slowed down itself."""
    run = slow_run(tmp_path / "run", 1.0)
    for step in (4, 5):
        run.write(step, {"time/rollout_s": 1.0, "time/train_s": 2.0, "time/publish_s": 0.5})
    found = parts_of(changed(run, placement="apart"))
    assert [(part.name, part.phases) for part in found] == [
        ("train", ("train", "logprobs")),
        ("refit", ("refit",)),
    ]
    with pytest.raises(ValueError, match=r"samples while it trains.* without pipeline\.overlap"):
        parts_of(changed(run, placement="colocated"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layouts": {"train": "t4"}}, "trains under layout d4 and its plan is of t4"),
        ({"step": 2}, "no seconds of a step behind its first"),
        ({"tokens": None}, "cannot be read"),
        ({"tokens": 1.0}, "samples 99 tokens a step and its plan is of 1"),
        ({"sampler": "local"}, "samples by vllm and its plan is of local"),
    ],
)
def test_a_run_that_teaches_nothing_is_refused_in_a_sentence(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    run = slow_run(tmp_path / "run", 1.0)
    run.recipe.write_text('name = "x"\n[parallel]\nlayout = "d4"\n[engine]\nbackend = "vllm"\n')
    if "tokens" in more:
        run.write(4, {"tokens/sampled": 99})
    with pytest.raises(ValueError, match=words):
        parts_of(changed(run, **more))


def test_devices_of_several_kinds_and_folders_without_a_plan_are_refused(tmp_path: Path) -> None:
    one, other = slow_run(tmp_path / "one", 1.0), changed(slow_run(tmp_path / "other", 1.0), device="cpu")
    with pytest.raises(ValueError, match="planned for H100-80 and cpu; fit the runs of one kind"):
        told("plan", "fit", str(one.path), str(other.path))
    (one.path / FILE).write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is no JSON .*; plan the run anew"):
        told("plan", "fit", str(one.path))
    (one.path / FILE).unlink()
    with pytest.raises(ValueError, match=r"plan\.json does not exist; plan the run first, with --record"):
        told("plan", "fit", str(one.path))


def test_what_is_no_file_of_factors_is_not_used() -> None:
    file = kept_file("H100-80")
    keep(Factors(phases={"train": 2.0}, runs=1), file)
    assert kept(file) == Factors(phases={"train": 2.0}, runs=1)
    for text in ("{", '{"factors": {}}', '{"phases": {"train": -1}, "runs": 1}'):
        file.write_text(text)
        assert kept(file) is None
