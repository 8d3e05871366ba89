"""``ostinato show``: what a run has recorded, for a person and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ostinato.cli.show import show
from ostinato.run import RunFolder, group_rows
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn

ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x9b2J"  # the clipboard, and a cleared screen


def trajectory(*texts: str, reward: Reward) -> Trajectory:
    tokens = np.array([3, 4], np.int32)
    turns = tuple(
        Turn(
            context=np.array([1, 2], np.int32),
            completion=Completion(
                tokens=tokens,
                logprobs=np.zeros(2, np.float32),
                versions=np.zeros(2, np.int32),
                text=text,
                stop=Stop.EOS,
            ),
        )
        for text in texts
    )
    ended, last_reply = ("terminated", "you win") if reward.value else ("", "")
    return Trajectory(
        turns=turns, seed=(0,), stop=Stop.LENGTH, reward=reward, ended=ended, last_reply=last_reply
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", 'model.path = "/nowhere"\n')
    right = trajectory("4", reward=Reward(value=1.5, parts={"exact": 1.0, "short": 0.5}))
    none = Reward(value=None, reason="timeout", parts={"exact": None})
    wrong = trajectory("let me see", f"5{ESCAPE}", reward=none)
    for step in (1, 10):
        for uid in ("p", "q", "r"):
            prompt = Prompt(uid=uid, messages=({"role": "user", "content": f"2+2?{ESCAPE}"},))
            group = Group(prompt=prompt, trajectories=(right, wrong), step=step)
            folder.trajectories.append(*group_rows(group, np.array([0.75, np.nan])))
    return folder.path


def test_episodes_are_shown_whole_and_bounded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No command printed what a policy had said: tool calls without tags were found with zstdcat and Python.
    What it and the rows say reaches the terminal without control sequences."""
    show(run, -1, prompts=2, answers=2, as_json=False)
    out = capsys.readouterr().out
    assert out.startswith("step 10: 3 prompts, 6 episodes")
    assert [out.count(f"\n{uid}, answer") for uid in "pqr"] == [2, 2, 0]
    for words in (
        "reward 1.5  exact 1  short 0.5  advantage 0.75\n",
        "reward none (timeout)  exact none\n",
        "you win\n  ends with length, terminated by the environment\n",
        "let me see",
    ):
        assert out.count(words) == 2
    assert "\\u001b]52" in out and not {"\x1b", "\x07", "\x9b"} & set(out)


def test_json_has_the_texts_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run, 1, prompts=1, answers=2, as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["step"], first["uid"], first["reward"], first["parts"]) == (
        1,
        "p",
        1.5,
        {"exact": 1, "short": 0.5},
    )
    assert (first["advantage"], first["ended"], first["last_reply"]) == (0.75, "terminated", "you win")
    assert second["advantage"] is None and second["ended"] == ""
    assert [turn["tokens"] for turn in first["turns"]] == [[3, 4]]
    assert [turn["text"] for turn in second["turns"]] == ["let me see", f"5{ESCAPE}"]
    assert second["prompt"] == [{"role": "user", "content": f"2+2?{ESCAPE}"}]


def test_a_step_that_is_not_recorded_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match=r"--step is 5.* 1, 10"):
        show(run, 5, prompts=1, answers=1, as_json=False)
