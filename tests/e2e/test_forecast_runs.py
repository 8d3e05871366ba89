"""Runs of the seed model that are scored by compute, on two sets, and look ahead after every score.

Killed and resumed they say what they would have said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.report.forecast import forecast_sections
from ostinato.report.reading import read_run
from ostinato.run import RunFolder

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
STEPS = 14
OVERRIDES = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=4",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "log.mismatch_every=0",
    "draft.enabled=false",  # refused drafts are FLOPs, and how many are drafted depends on the clock
    "eval.every=250 tokens",
    "eval.n=12",
    "eval.k=2",
    "eval.start_factor=3",
    "eval.downstream.hard.source=arithmetic",
    "eval.downstream.hard.n=6",
    "eval.downstream.hard.every=1e10 flops",
    "forecast.axis=tokens",
    "forecast.budget=1e6",
)


def environment() -> dict[str, str]:
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **settings}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostinato", *arguments]


def ostinato(place: Path, *arguments: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=place, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def killed_after(place: Path, step: int, *arguments: str) -> None:
    """Train, and be gone (SIGKILL) as soon as the row of ``step`` is there, wherever that is."""
    process = subprocess.Popen(
        command(*arguments),
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        if any(row["step"] >= step for folder in place.glob("runs/*") for row in rows(folder, "metrics")):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    assert process.wait(timeout=60) == -signal.SIGKILL


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if (file.exists())
        else []
    )


def only_run(place: Path) -> Path:
    (folder,) = (place / "runs").iterdir()
    return folder


def crossings(sums: list[float], amount: float) -> list[int]:
    """The steps before the last in which another multiple of the amount was passed."""
    return [at for at in range(1, STEPS) if sums[at] // amount > sums[at - 1] // amount]


def scores(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """eval.jsonl by set and step, without what the clock and the prefix cache decide."""
    wanted = (
        "step",
        "set",
        "split",
        "held_out",
        "n",
        "samples",
        "pass@1",
        "stderr",
        "answer_stderr",
        "reward",
    )
    return {
        (row["set"], row["step"]): {name: row[name] for name in wanted} | {"tokens": row["spent"]["tokens"]}
        for row in rows(folder, "eval")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder of a run that nobody interrupted, what it printed)."""
    place = tmp_path_factory.mktemp("whole")
    out = ostinato(place, "train", "quickstart", *OVERRIDES)
    return only_run(place), out


def test_a_run_is_scored_by_compute_and_looks_ahead(whole: tuple[Path, str]) -> None:
    folder, out = whole
    evals = rows(folder, "eval")
    main = [row for row in evals if row["set"] == "eval"]
    steps = [row["step"] for row in main]
    assert 6 <= len(steps) <= STEPS
    tokens, flops = [0.0], [0.0]
    for row in rows(folder, "metrics"):
        tokens.append(row["total/sampled_tokens"])
        flops.append(row["total/useful_flops"] + row["total/wasted_flops"])
    assert steps == [0, *crossings(tokens, 250), STEPS]
    assert [row["step"] for row in evals if row["set"] == "hard"] == [0, *crossings(flops, 1e10), STEPS]
    assert [row["samples"] for row in main] == [6] + [2] * (len(main) - 1)
    assert len({row["held_out"] for row in main}) == 1
    ahead = rows(folder, "forecast")
    assert [row["step"] for row in ahead] == steps[1:]
    assert [row["compute"] for row in ahead] == [row["spent"]["tokens"] for row in main[1:]]
    assert ahead[-1]["n"] == len(main) - 1 >= 5
    assert f"step {STEPS}: forecast: " in out and f"step {STEPS}: hard pass@1" in out
    assert forecast_sections(read_run(RunFolder(folder)))
    assert 'id="forecast"' in (folder / "report.html").read_text()


def test_the_command_says_the_same(whole: tuple[Path, str]) -> None:
    """``ostinato scale`` on the folder, and ``ostinato eval`` on both sets."""
    folder, _ = whole
    out = ostinato(folder, "eval", str(folder))
    last = {row["set"]: row["pass@1"] for row in rows(folder, "eval")}
    assert f"pass@1  {last['eval']:.3f}" in out and f"pass@1  {last['hard']:.3f}" in out


@pytest.mark.parametrize("step", [2, 9])
def test_killed_and_resumed_it_scores_and_foretells_the_same(
    step: int, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Killed before the first checkpoint, and between two. The set that is scored by FLOPs may be so at a
    neighbouring step: after a kill the prefix cache is cold, and what it had is computed again."""
    killed_after(tmp_path, step, "train", "quickstart", *OVERRIDES)
    folder = only_run(tmp_path)
    assert len(rows(folder, "metrics")) < STEPS
    ostinato(tmp_path, "resume", str(folder))
    found, wanted = scores(folder), scores(whole[0])
    assert {key for key in found if key[0] == "eval"} == {key for key in wanted if key[0] == "eval"}
    assert all(found[key] == wanted[key] for key in found.keys() & wanted.keys())
    assert ("hard", 0) in found and ("hard", STEPS) in found
    assert rows(folder, "forecast") == rows(whole[0], "forecast")


def test_a_forecast_that_stops_the_run_ends_it_in_order(tmp_path: Path) -> None:
    """No gain is enough for these terms: the run ends as soon as its curve carries a decision at all, and
    goes on to the end where it never does. Either way every set is scored at the end."""
    terms = ("forecast.stop=true", "forecast.min_gain=1.0", "trainer.lr=0.01", "eval.n=64")
    out = ostinato(tmp_path, "train", "quickstart", *OVERRIDES, *terms)
    folder = only_run(tmp_path)
    last = rows(folder, "forecast")[-1]
    step = rows(folder, "metrics")[-1]["step"]
    assert (step < STEPS) == (last["verdict"] == "stop" and last["step"] < STEPS)
    assert {row["set"] for row in rows(folder, "eval") if row["step"] == step} == {"eval", "hard"}
    assert ("by its own forecast" in out) == (step < STEPS)
    assert (folder / "checkpoints").is_dir() and (folder / "report.html").exists()
