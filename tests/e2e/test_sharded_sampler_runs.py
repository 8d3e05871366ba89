"""``engine.layout`` from a recipe: runs and answers of a sampler over two ranks are those of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ostinato.cli.session import learn
from ostinato.model.peft_io import LOGICAL
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow

QUICK = (
    "model.dtype=float32",
    "trainer.steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "task.n_train=16",
    "eval.every=0",
    "eval.n=4",
    "log.mismatch_every=1",
)

NAMES = {"reward", "reward_std", "loss", "grad_norm", "completions/mean_length", "total/sampled_tokens"}


def test_a_run_is_the_same_run(tmp_path: Path) -> None:
    """Answers and rewards of both steps, and what training made of them, but for the order of sums."""
    told, trained = {}, {}
    for layout in ("", "d2e2"):
        place = (f"log.dir={tmp_path / (layout or 'one')}", f'engine.layout="{layout}"')
        outcome = learn("quickstart", *QUICK, *place, quiet=True)
        assert outcome.why == "done"
        run = RunFolder.open(outcome.folder)
        told[layout], trained[layout] = list(run.metrics.rows()), load_file(run.adapter / LOGICAL)
    assert len(told[""]) == len(told["d2e2"]) == 2
    for one, other in zip(told[""], told["d2e2"], strict=True):
        for name in NAMES & one.keys():  # a step without a signal has no loss
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
    assert told[""][1].keys() >= NAMES
    assert max(rows[1]["sampling/kl_k3"] for rows in told.values()) < 1e-9
    for name, tensor in trained[""].items():
        torch.testing.assert_close(trained["d2e2"][name], tensor, rtol=1e-4, atol=1e-6)


def test_generate_over_two_ranks(tmp_path: Path) -> None:
    """A process of its own, as for a user; nobody is left behind."""
    recipe = tmp_path / "quick.toml"
    lines = ["[model]", 'path = "asset:seed-moe"', 'dtype = "float32"', "[engine]", 'layout = "{}"']
    answers = []
    for layout in ("", "d2e2"):
        recipe.write_text("\n".join(lines).format(layout))
        command = [sys.executable, "-m", "ostinato", "generate", str(recipe), "--prompt", "12 + 30 ="]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=400, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1] != ""
