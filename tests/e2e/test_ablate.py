"""``ostinato ablate`` with real runs: Ctrl-C saves, the same command goes on, nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

# Long enough for Ctrl-C to arrive before the end: with 6 steps, on a busy machine, both runs were done.
RECIPE = """
[rollout]
prompts_per_step = 2
group_size = 4
max_tokens = 12
[trainer]
steps = 20
[eval]
every = 1
n = 8
[engine]
threads = 1
[log]
mismatch_every = 0
[ablate.arms]
"DAPO" = ["algo.name=dapo"]
"""


def command(recipe: Path, out: Path, *more: str) -> list[str]:
    own = ["--leave-one-out", "--seeds", "1", "--workers", "2", "--out", str(out), *more]
    return [sys.executable, "-m", "ostinato", "ablate", str(recipe), *own]


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    recipe, out = tmp_path / "mine.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # a shell lets its background jobs, and all that these start, ignore SIGINT
    first = subprocess.Popen(
        command(recipe, out),
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
    told, _ = first.communicate(timeout=400)
    assert first.returncode == 130, told
    assert "the same command goes on with it" in told
    sessions = {row["session"] for row in RunFolder(out / "recipe-s0").ledger.rows()}
    assert sessions == {1}

    result = tmp_path / "result.json"
    kept = tmp_path / "kept.jsonl"
    again = command(recipe, out, "--json", str(result), "--collect", str(kept))
    done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("recipe-s0", "dapo-s0"):
        run = RunFolder(out / name)
        assert [row["step"] for row in run.eval.rows() if row["set"] == "eval"] == list(range(21))
        assert list(run.ledger.rows())[-1]["why"] == "done"
    assert [arm["arm"] for arm in json.loads(result.read_text())["arms"]] == ["the recipe", "DAPO"]

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}
    assert subprocess.run(again, env=environment, capture_output=True, timeout=400).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} == before
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["arm"], line["seed"], line["ended"]) for line in lines] == [
        ("the recipe", 0, True),
        ("DAPO", 0, True),
    ]
