"""A run over ranks finds at a checkpoint that another layout is better, and goes on under it by itself: with
ranks of its own, and with those of torchrun, which meet again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from short_run import SHORT, STEPS
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.config import Recipe
from ostinato.model.named import model_folder
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

RUN = SHORT | {
    "trainer.steps": 100_000,  # so that any gain pays
    "forecast.enabled": "false",
    "log.trajectories_every": 1,
    "parallel.layout": "d2f2",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def plan(file: Path) -> None:
    """For answers of 200 tokens, by which d2f2 was the best layout: the run's own have 16."""
    asked = ["plan", str(model_folder("asset:seed-moe")), "--gpus", "2xcpu", "--base", "fp32"]
    asked += ["--engine", "local", "--prompts", "4", "--group", "4", "--prompt-tokens", "32"]
    asked += ["--answer-tokens", "200", "--max-answer", "256", "--share", "two", "--record", str(file)]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    found["layouts"] |= {"train": "d2f2", "logprobs": "d2f2"}
    file.write_text(json.dumps(found))


def run_until(folder: Path, steps: int, command: list[str], *further: str) -> RunFolder:
    """The run, ended by Ctrl-C after ``steps`` steps; none of its processes is left."""
    folder.mkdir()
    words = [f"{key}={value}" for key, value in RUN.items()]
    words += [f"log.dir={folder}", *further]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with (folder / "log").open("ab") as log:
        arguments = [*command, "-m", "ostinato", "train", "quickstart", *words]
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 240
        while sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl")) < steps:
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        # torchrun does not let its children end in peace: Ctrl-C is for the run itself
        ours = [one for one in family if one.cmdline()[-1:] != ["rank"]] if command == TORCHRUN else []
        target = next((one.pid for one in ours if one.environ().get("RANK") == "0"), process.pid)
        os.kill(target, signal.SIGINT)
        process.wait(240)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, alive
    (recipe,) = folder.glob("*/recipe.toml")
    return RunFolder.open(recipe.parent)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable], id="own"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.lab),
    ],
)
def test_a_run_goes_on_under_a_better_layout(tmp_path: Path, command: list[str]) -> None:
    plan(tmp_path / "plan.json")
    stays = run_until(tmp_path / "stays", STEPS, [sys.executable])
    asked = ("parallel.replan=true", f"parallel.plan={tmp_path / 'plan.json'}")
    goes = run_until(tmp_path / "goes", STEPS, command, *asked)

    first, *later = goes.replan.rows()
    assert first["step"] == 2 and first["switch"], first["reason"]
    assert not any(row["switch"] for row in later)
    after = Recipe.load(goes.recipe).parallel.layout
    assert after not in ("", "1", "d2f2")
    planned = json.loads((goes.path / "plan.json").read_text())
    assert planned["layouts"]["train"] == after and planned["step"] == 2
    said = (tmp_path / "goes" / "log").read_text()
    assert f'on with parallel.layout="{after}"' in said and f"of layout {after}" in said

    rows, others = ([*run.metrics.rows()][:STEPS] for run in (goes, stays))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, other in zip(rows, others, strict=True):
        assert row["reward"] == other["reward"]
        if "loss" in other:
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-6)
    ended = [row["why"] for row in goes.ledger.rows() if row["event"] == "end"]
    assert ended[0] == "replanned"
