"""``ostinato ablate``, and runs that look ahead: stopped, killed and resumed they say the same."""

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
from commands import LIMIT_S, command, ended, environment, only_run, rows, run, tiny_recipe

from lab.same_run import same
from ostinato.observe.rows import RunRows
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

STEPS = 14
OVERRIDES = (
    "model.dtype=float32",  # runs are compared, and "auto" is another one where the measurement is
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=4",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "log.mismatch_every=0",
    "eval.every=250 tokens",
    "eval.n=12",
    "eval.k=2",
    "eval.start_factor=3",
    "eval.downstream.hard.source=arithmetic",
    "eval.downstream.hard.n=6",
    "eval.downstream.hard.every=1e10 flops",
    "forecast.axis=flops",
    "forecast.budget=1e14",
)


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
        if any(
            row["step"] >= step for folder in place.glob("runs/*") for row in rows(folder / "metrics.jsonl")
        ):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    assert process.wait(timeout=60) == -signal.SIGKILL


def crossings(sums: list[float], amount: float) -> list[int]:
    """The steps before the last in which another multiple of the amount was passed."""
    return [at for at in range(1, STEPS) if sums[at] // amount > sums[at - 1] // amount]


def scores(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """eval.jsonl by set and step, without what the clock and the prefix cache decide."""
    return {(row["set"], row["step"]): row for row in same(rows(folder / "eval.jsonl"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder of an undisturbed run, what it printed)."""
    place = tmp_path_factory.mktemp("whole")
    out = run(place, "train", "quickstart", *OVERRIDES)
    return only_run(place), out


def test_a_run_is_scored_by_compute_and_looks_ahead(whole: tuple[Path, str]) -> None:
    folder, out = whole
    evals = rows(folder / "eval.jsonl")
    main = [row for row in evals if row["set"] == "eval"]
    steps = [row["step"] for row in main]
    assert 6 <= len(steps) <= STEPS
    tokens, flops = [0.0], [0.0]
    for row in rows(folder / "metrics.jsonl"):
        tokens.append(row["total/sampled_tokens"])
        flops.append(row["total/compute_flops"])
    assert steps == [0, *crossings(tokens, 250), STEPS]
    assert [row["step"] for row in evals if row["set"] == "hard"] == [0, *crossings(flops, 1e10), STEPS]
    assert [row["samples"] for row in main] == [6] + [2] * (len(main) - 1)
    assert len({row["held_out"] for row in main}) == 1
    ahead = rows(folder / "forecast.jsonl")
    assert [row["step"] for row in ahead] == steps[1:]
    assert [row["compute"] for row in ahead] == [row["spent"]["flops"] for row in main[1:]]
    assert ahead[-1]["n"] == len(main) - 1 >= 5
    assert f"step {STEPS}: forecast: " in out and f"step {STEPS}: hard pass@1" in out
    assert [row["sentence"] for row in RunRows(RunFolder(folder)).read().logs["forecast"]][-1] == ahead[-1][
        "sentence"
    ]
    assert '"forecasts":[{' in (folder / "report.html").read_text()


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.lab), 9])
def test_killed_and_resumed_it_says_the_same(step: int, whole: tuple[Path, str], tmp_path: Path) -> None:
    """Killed before the first checkpoint, and between two. The set that is scored by FLOPs was so at another
    step, or with other FLOPs: how much is drafted, and refused, is a matter of measured time, and after a
    kill the prefix cache is cold."""
    killed_after(tmp_path, step, "train", "quickstart", *OVERRIDES)
    folder = only_run(tmp_path)
    assert len(rows(folder / "metrics.jsonl")) < STEPS
    run(tmp_path, "resume", str(folder))
    assert scores(folder) == scores(whole[0])
    assert rows(folder / "forecast.jsonl") == rows(whole[0] / "forecast.jsonl")


PLANTED = """
import hashlib

requested = {}

def planted(completions, prompts, **columns):
    greedy = len(completions) == 1
    t = requested[str(prompts[0])] = requested.get(str(prompts[0]), -1) + (not greedy)
    share = 0.2 + (0.5 / (1 + (2 / t) ** 2) if t else 0.0)
    return [float(drawn(f"{prompts[0]} {'' if t else text}") < share) for text in completions]

def drawn(text):
    return int(hashlib.md5(text.encode()).hexdigest()[:8], 16) / 2**32
"""


def test_a_forecast_that_stops_the_run_ends_it_in_order(tmp_path: Path) -> None:
    """A run whose score saturates, by rewards that look at how often a prompt has been requested. No gain is
    enough for these terms, so it ends as soon as two looks in a row know its curve: in the middle, with every
    set scored at the end. Rewards that the policy has to earn left it to chance whether anything stopped."""
    (tmp_path / "planted.py").write_text(PLANTED)
    reward = ('reward.functions=["planted.py:planted"]', "eval.every=1", "eval.n=128")
    reward += (
        "rollout.max_tokens=4",
        "rollout.prompts_per_step=1",
    )  # no verdict looks at what an answer says
    terms = ("forecast.stop=true", "forecast.min_gain=1.0", "forecast.axis=steps", f"forecast.budget={STEPS}")
    out = run(tmp_path, "train", "quickstart", *OVERRIDES, *reward, *terms)
    folder = only_run(tmp_path)
    *_, before, last = rows(folder / "forecast.jsonl")
    step = rows(folder / "metrics.jsonl")[-1]["step"]
    assert 0.3 * STEPS <= step < STEPS
    for row, at in ((before, step - 1), (last, step)):
        assert (row["verdict"], row["step"], row["gate"]) == ("stop", at, "identified")
    assert {row["set"] for row in rows(folder / "eval.jsonl") if row["step"] == step} == {
        *("eval", "greedy", "hard")
    }
    assert "by its own forecast" in out and "goes on, for the next look has to say so too" in out
    assert rows(folder / "ledger.jsonl")[-1]["why"] == "enough"
    assert (folder / "checkpoints").is_dir() and (folder / "report.html").exists()


# ---- ``ostinato ablate`` with real runs: Ctrl-C saves, the same command goes on, nothing is done twice


# Long enough for Ctrl-C to arrive before the end: with 6 steps, on a busy machine, both runs were done.
RECIPE = {
    **{"rollout.prompts_per_step": 2, "rollout.max_tokens": 12, "trainer.steps": 12, "eval.every": 1},
    **{"eval.n": 4, "engine.threads": 1, "log.mismatch_every": 0, "ablate.arms.DAPO": ["algo.name=dapo"]},
}


def ablation(recipe: Path, out: Path, *more: str) -> list[str]:
    own = ["--leave-one-out", "--seeds", "1", "--workers", "1", "--out", str(out), *more]
    return [sys.executable, "-m", "ostinato", "ablate", str(recipe), *own]


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    recipe, out = tmp_path / "mine.toml", tmp_path / "out"
    recipe.write_text(tiny_recipe(RECIPE))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # a shell lets its background jobs, and all that these start, ignore SIGINT
    first = subprocess.Popen(
        ablation(recipe, out),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = out / "recipe-s0" / "metrics.jsonl"
    limit = time.monotonic() + 400
    while not metrics.exists() and time.monotonic() < limit and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    reported, _ = first.communicate(timeout=400)
    assert first.returncode == 130, reported
    assert "the same command goes on with it" in reported
    sessions = {row["session"] for row in RunFolder(out / "recipe-s0").ledger.rows()}
    assert sessions == {1}

    result = tmp_path / "result.json"
    kept = tmp_path / "kept.jsonl"
    again = ablation(recipe, out, "--json", str(result), "--collect", str(kept))
    done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("recipe-s0", "dapo-s0"):
        run = RunFolder(out / name)
        assert [row["step"] for row in run.eval.rows() if row["set"] == "eval"] == list(range(13))
        assert list(run.ledger.rows())[-1]["why"] == "done"
    assert [arm["arm"] for arm in json.loads(result.read_text())["arms"]] == ["the recipe", "DAPO"]

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}
    assert ended(tmp_path, *again[3:]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} == before
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["arm"], line["seed"], line["ended"]) for line in lines] == [
        ("the recipe", 0, True),
        ("DAPO", 0, True),
    ]
