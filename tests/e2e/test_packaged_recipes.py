"""Packaged recipes, from an empty folder and by their names alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands import ROOT, command, ended, environment, only_run, rows

SMALL = {
    "sft": ("sft.epochs=0", "sft.rows_per_step=4", "task.n_train=8"),
    "train": (
        "rollout.prompts_per_step=2",
        "rollout.group_size=4",
        "rollout.max_tokens=16",
        "pipeline.staleness=0",
    ),
}
STEP = ("trainer.steps=1", "trainer.minibatches=1", "trainer.warmup_steps=0", "trainer.schedule=constant")
QUICK = ("eval.n=2", "eval.k=1", "eval.every=0", "eval.start_factor=1", "engine.threads=1")
KIND = {"sft": "sft", "dpo": "sft", "judge_sft": "sft"}
FIRST = {  # what has to be given or made first, and its sentence says so
    "opd": "teacher.adapter",
    "dpo": "task.source",
    "mcp_prices": "task.source",
    "judge_sft": "task.source",
    "judge_rl": "task.source",
    "smollm2_vllm": "engine.python",
    "chat-judge": "JUDGE",
}
ROWS = '{"prompt": "What is 1 + 1?", "answer": "2"}\n{"prompt": "What is 1 + 2?", "answer": "3"}\n'
TESTED = "".join(
    f'{{"text": "{k}.", "code": "def f(): return {k}", "test_list": ["assert f() == {k}"]}}\n' for k in (1, 2)
)
OWN = {  # to begin with: a model and rows of the user's are named by keys
    "math": ROWS,
    "code": TESTED,
    "agent": ROWS,
    "laptop-1.5b": ROWS,
    "one-gpu": ROWS,
    "chat-judge": ROWS,
}
NAMES = sorted(file.stem for file in (ROOT / "recipes").glob("*.toml"))
AGENTS = ("guess_agent", "price_agent", "pydantic_agent")
EVERYDAY = ("opd", "dpo", "judge_rl", "math")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in NAMES]
)
def test_a_packaged_recipe_comes_to_its_first_step_or_says_what_it_needs(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an empty folder three recipes broke behind the making of a run folder, for they named
    "recipes/x_agent.py"; `opd` said that a folder which is not there has no adapter, and `judge_rl` that
    "pairs" is neither a source nor a file: neither said what to make first."""
    kind = KIND.get(name, "train")
    arguments = (kind, name, *STEP, *QUICK, *SMALL[kind])
    if name in OWN:
        (tmp_path / "rows.jsonl").write_text(OWN[name])
        own = (
            "model.path=asset:seed-moe",
            "task.source=rows.jsonl",
            "task.params={holdout = 0.5, chat = true}",
        )
        arguments += (*own, "model.device=cpu", "model.dtype=float32")
    if name in AGENTS:  # clients of theirs stay open until their process ends
        done = subprocess.run(
            command(*arguments), cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        code, errors = done.returncode, done.stderr
    else:
        code, errors = ended(tmp_path, *arguments), capsys.readouterr().err
    if code == 0:
        (step,) = (row["step"] for row in rows(only_run(tmp_path) / "metrics.jsonl") if row["step"] == 1)
        assert name not in FIRST and step == 1
        return
    assert code == 2 and (FIRST.get(name) or "install") in errors, errors
    assert not [*tmp_path.glob("runs/*")], "a run folder was left behind"
