"""``ostinato plan`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.plan.calibrate import Calibration, keep, kept_file
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
        (["--against", "/nowhere", "--launch"], "--against and --launch are two questions"),
        (["--against", "/nowhere", "--json", "x.json"], "--against and --json are two questions"),
        (["--gpus", "many"], "gpus is 'many'"),
        (["--answers", "/nowhere.json"], "cannot be read"),
        (["--loads", "/nowhere.json"], "--loads is"),
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


@pytest.mark.slow
def test_factors_of_another_version_are_left_alone_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = kept_file("H100-80")
    keep(Calibration(factors={"train/experts": 2.0}, median=0.1, worst=0.2, observations=9), file)
    assert "from 9 measured steps" in run(*ARGUMENTS, *SHORT)
    kept = json.loads(file.read_text())
    for odd in ({"efficiency": {"warp": 0.5}}, {"efficiency": None}, {"factors": {"train/experts": -1}}):
        file.write_text(json.dumps(kept | odd))
        assert "is of another version" in " ".join(run(*ARGUMENTS, *SHORT).split())
    del kept["efficiency"]
    file.write_text(json.dumps(kept))
    assert "is of another version" in " ".join(run(*ARGUMENTS, *SHORT).split())
