"""What newcomers type in their first hour, from an empty folder: code and commands of the pages."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, command, ended, environment, only_run, rows

from ostinato import learn

SMALL: dict[str, Any] = {
    "trainer": {"steps": 1},
    "rollout": {"prompts_per_step": 2, "group_size": 8, "max_tokens": 16},
    "eval": {"n": 2, "every": 0},
}
OVERRIDES = [f"{section}.{key}={value}" for section, keys in SMALL.items() for key, value in keys.items()]
MODEL = ["model.path=asset:seed-moe", "model.dtype=float32", "engine.threads=1"]


def block(page: str, first: str) -> str:
    """The code on a page of docs/ whose first line is ``first``."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"```\w+\n({re.escape(first)}.*?)```", text, re.DOTALL)
    return found


def load(source: str, name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    return names[name]


def sums(n: int) -> list[dict[str, Any]]:
    row = json.loads(block("guide/data-and-reward.md", "{"))
    asked = row["prompt"][0]["content"].partition("?")[0] + "?"  # seed-moe was not taught to obey
    return [
        {"prompt": [{"role": "user", "content": asked.replace("3", str(k))}], "answer": str(k + 4)}
        for k in range(n)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, by command, of the recipe and the reward on the page about them, the latter asynchronous."""
    folder = tmp_path_factory.mktemp("empty")
    page = "guide/data-and-reward.md"
    (folder / "mine.toml").write_text(block(page, "# mine.toml"))
    (folder / "rewards.py").write_text(block(page, "# rewards.py").replace("def close", "async def close"))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(20)))
    assert ended(folder, "train", "mine.toml", *MODEL, *OVERRIDES) == 0
    return folder


def test_a_user_of_trl_trains_the_same_from_python_as_by_command(place: Path, tmp_path: Path) -> None:
    """Chat rows and an asynchronous reward."""
    source = block("guide/data-and-reward.md", "# rewards.py").replace("def close", "async def close")
    outcome = learn(
        **{**SMALL, "model": {"path": "asset:seed-moe", "dtype": "float32"}, "engine": {"threads": 1}},
        **{
            "data": sums(20),
            "reward": {"functions": load(source, "close")},
            "task": {"params": {"holdout": 0.2}},
        },
        **{"log": {"dir": str(tmp_path)}, "quiet": True},
    )
    (by_command,) = rows(only_run(place) / "metrics.jsonl")
    (by_python,) = outcome.rows()
    assert by_python["reward"] > 0
    same = ("reward", "loss", "grad_norm", "completions/mean_length")
    assert {name: by_python[name] for name in same} == {name: by_command[name] for name in same}


class Asks:
    """Three words in an episode, the same one never twice."""

    tools = ("count",)

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.said: list[str] = []
        return f"Say number {seed % 9}.", {}

    def count(self) -> int:
        """How much was said."""
        return len(self.said)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_new = action not in self.said
        self.said.append(action)
        return "another", len(action) / 16 if is_new else 0.0, len(self.said) == 3, False, {}


def test_a_researcher_has_a_loss_and_an_environment_with_a_state(tmp_path: Path) -> None:
    seen: list[float] = []
    outcome = learn(
        **{**SMALL, "model": {"path": "asset:seed-moe", "dtype": "float32"}, "quiet": True},
        **{"data": "seeds", "env": Asks, "reward": "env", "task": {"max_turns": 3, "n_train": 8}},
        loss=load(block("guide/loss.md", "# losses.py"), "ppo"),
        on_step=lambda row: seen.append(row["reward"]),
        log={"dir": str(tmp_path)},
    )
    (row,) = outcome.rows()
    assert seen == [row["reward"]] and row["turns/mean"] == 3 and row["reward"] > 0
    assert "own/clipped_mean" in row


def test_a_builder_of_agents_trains_the_agent_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(block("agents.md", "# agent.py"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(8)))
    (tmp_path / "mine.toml").write_text(block("agents.md", "[task]\nsource"))
    more = [*MODEL, *OVERRIDES, "task.params.holdout=0.3", "task.n_train=0"]
    typed = command("train", "mine.toml", *more)  # a process, for the client on the page stays open
    done = subprocess.run(typed, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = rows(only_run(tmp_path) / "metrics.jsonl")
    assert row["turns/mean"] == 4 and row["agent/calls"] > 0 and row["reward"] == 1


def test_a_planner_gets_the_answer_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/guide/plan.md").read_text()
    (line,) = re.findall(r"    ostinato (plan smollm2-135m .*)", page)
    assert ended(tmp_path, *line.split()) == 0
    first = capsys.readouterr().out.partition("binding")[0]
    assert all(word in first for word in ("train d4", "hours", "$", "GB")), first


def test_a_reader_of_a_run_types_the_commands_of_the_page(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = only_run(place)
    for typed, words in {
        f"report {folder}": ["Held-out pass@1", "ostinato"],
        f"report {folder} {folder}": ["Held-out pass@1"],
        f"show {folder} --step 1": ["What is", "reward"],
        f"scale ledger {folder}": ["device-hours"],
    }.items():
        capsys.readouterr()
        assert ended(place, *typed.split()) == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in words), (typed, printed)
