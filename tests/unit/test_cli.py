"""The command line without a model: help, errors as one sentence, and what is printed about a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ostinato.cli.app import main
from ostinato.every import Every
from ostinato.launch import progress
from ostinato.launch.progress import open_writers


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "train", "nowhere.toml"], ["train", "nowhere.toml", "--debug"]):
        with pytest.raises(ValueError, match="does not exist"):
            main(arguments)


ROW = {
    "step": 3,
    "reward": 0.5,
    "tokens_per_s": 1234.4,
    "time/rollout_share": 0.61,
    "time/reward_share": 0.001,
    "time/train_share": 0.35,
    "time/other_share": 0.039,
}
BEFORE = {"step": 0, "set": "eval", "n": 100, "pass@1": 0.3, "stderr": 0.02} | {
    "pass@k": 0.8,
    "pass@k_stderr": 0.01,
    "k": 1,
    "reward": 0.5,
    "reward_stderr": 0.01,
}


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=100), out


@pytest.mark.parametrize("option", ["--learning_rate", "--learning-rate=2e-4", "--trainer.lr"])
def test_an_option_of_another_trainer_is_told_how_keys_are_written(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was "No such option"."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", "quickstart", option, "2e-4"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{option} is no option; write keys as trainer.lr=2e-4, without dashes" in said


def test_without_a_terminal_every_step_is_a_plain_line() -> None:
    console, out = plain_console()
    with progress.Monitor(80, console=console) as monitor:
        monitor.on_eval(BEFORE)
        monitor.on_eval({**BEFORE, "set": "hard", "pass@1": 0.0, "stderr": 0.0})
        monitor.on_eval({**BEFORE, "set": "greedy"})
        monitor.on_step(ROW)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 0: held-out pass@1 0.300 [0.262, 0.341], mean reward 0.500 on 100 prompts"
    assert lines[1] == "step 0: hard pass@1 0.000 [0.000, 0.037], mean reward 0.500 on 100 prompts"
    assert lines[2].startswith("step 0: held-out greedy pass@1 0.300 [")
    # the scores of step 0 stood in every line, as if they were new, and half of the time was of nothing
    assert lines[3] == "step 3/80  reward 0.500  1,234 tok/s  rollout 61% train 35% other 4%  ETA 0:00"
    assert "\x1b" not in out.getvalue()


def test_a_budget_ends_the_run_and_its_share_is_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ostinato compare` gives every arm a budget and no limit of steps: its logs read "step 3/1000000"
    and had an ETA of two months."""
    console, out = plain_console()
    seconds = iter([0.0, 30.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(seconds))
    begun = {"step": 1, "total/compute_flops": 2e11}
    budget = Every.parse("1e12 flops", "trainer.budget")
    with progress.Monitor(1_000_000, row=begun, budget=budget, console=console) as monitor:
        monitor.on_step({**ROW, "total/compute_flops": 4e11})
    assert out.getvalue().startswith("step 3 (40% of what it may spend)")
    assert "ETA 1:30" in out.getvalue()


def test_a_score_that_cannot_be_reached_is_said_once_and_early() -> None:
    """With a second reward that never gives full marks pass@1 stayed 0.000 to the end, without a reason:
    the first evaluation knows that no answer came near."""
    row = {**BEFORE, "pass@1": 0.0, "stderr": 0.0, "reward_max": 1.25, "solved_at": 1.999999}
    console, out = plain_console()
    with progress.Monitor(80, console=console) as monitor:
        monitor.on_eval(row)
        monitor.on_eval({**row, "step": 20})
    (line,) = [line for line in out.getvalue().splitlines() if "warning" in line]
    assert "the highest reward was 1.25, and an answer is solved from 2 on (reward.solved_at)" in line
    with progress.Monitor(80, console=console) as monitor:
        monitor.on_eval({**row, "reward_max": 0.0, "reward": 0.0})
    assert out.getvalue().count("warning") == 1, "a hard task may begin at 0"


def test_a_writer_whose_package_is_missing_names_the_extra(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    try:
        import wandb  # noqa: F401  # pyright: ignore
    except ImportError:
        with pytest.raises(ValueError, match=r"'wandb'.*ostinato\[log\]"):
            open_writers(["wandb"], tmp_path, {})
    assert open_writers([], tmp_path, {}) == []


def test_a_run_that_stopped_for_a_collapse_fails_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ostinato.cli.train import finish
    from ostinato.config import Recipe, dump_toml
    from ostinato.launch.session import Outcome
    from ostinato.pipeline.loop import Finish
    from ostinato.run import RunFolder

    folder = RunFolder.create(tmp_path / "run", dump_toml(Recipe())).path
    outcome = Outcome(folder=folder, step=35, why=Finish.COLLAPSED, before=None, after=None)
    assert finish(lambda: outcome) == 1
    assert f"collapsed after step 35; to go on: ostinato resume {folder}" in capsys.readouterr().out
