"""``ostinato plan`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.plan.named import find_model

ARGUMENTS = ["plan", "qwen3-30b-a3b", "--gpus", "2xH100-80", "--lora-rank", "16", "--max-answer", "4096"]
SHORT = ["--answer-tokens", "1024"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_tables_say_what_was_asked_what_won_and_why() -> None:
    told = run(*ARGUMENTS, *SHORT)
    for words in (
        "qwen3-30b-a3b",
        "LoRA r=16",
        "binding",
        "base weights",
        "KV cache",
        "fragmentation",
        "2 is ",
    ):
        assert words in told


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    raw = dict(find_model("qwen3-8b").config.raw)
    (folder / "config.json").write_text(json.dumps(raw))
    assert "mine: 8.19B" in run("plan", str(folder), "--gpus", "2xH100-80")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--share", "half"], "--share has 'half'"),
        (["--placement", "near"], "--placement is 'near'"),
        (["--engine", "x"], "--engine is 'x'"),
        (["--answer-tokens", "9999"], "answer-tokens is 9999"),
        (["--train-layout", "q2"], "layout is 'q2'"),
        (["--train-layout", "t3"], "train-layout: layout t3 cuts"),
        (["--rollout-layout", "d1c2"], "rollout-layout: layout c2 has c2"),
        (["--rollout-layout", "d4"], "rollout-layout is d4 of 4 ranks, but of 2 GPUs 2 train and 2 sample"),
        (["--launch", "--json", "-"], "--launch and --json - both write"),
        (["--gpus", "many"], "gpus is 'many'"),
        (["--answers", "/nowhere.json"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(more: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        run(*ARGUMENTS, *SHORT, *more)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"train misses by .* GB at best .*base weights"):
        run("plan", "kimi-k2", "--gpus", "8xH100-80")


@pytest.mark.slow
def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\nfrom ostinato.cli.app import app\n"
        "try:\n    app(['plan', 'qwen3-8b', '--gpus', '2xH100-80', '--json', '-'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules), 'heavy'\n"
        "print('light', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stderr.strip().endswith("light"), done.stderr


def test_money_is_devices_times_hours() -> None:
    first = json.loads(run(*ARGUMENTS, *SHORT, "--json", "-", "--price", "3"))["plans"][0]
    assert first["cost_per_step"] == pytest.approx(2 * 3 * first["seconds_total"] / 3600)
    assert first["cost_of_run"] == pytest.approx(1000 * first["cost_per_step"])
