"""What a user gives wrongly to ``learn`` ends before any answer is sampled, in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato import learn
from ostinato.pipeline.failed import Failures, RewardFails
from ostinato.run import RunFolder
from ostinato.types import Reward

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(40)]
SMALL: dict[str, Any] = {
    "model": "asset:seed-moe",
    "trainer": {"steps": 1},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
    "eval": {"n": 2, "every": 0},
    "quiet": True,
}


class Talks:
    """An environment on rows of plain text."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, said: str) -> Any:
        return "go on", 1.0, True, False, {}


class TalksBadly(Talks):
    def step(self, said: str) -> Any:
        return "go on"


class PaysInWords(Talks):
    def step(self, said: str) -> Any:
        return "go on", "1", True, False, {}


def skip(completions: list[Any], **columns: Any) -> list[None]:
    return [None for _ in completions]


def infinite(new: Any, old: Any, advantages: Any, *, sample_idx: Any, num_samples: int) -> Any:
    return new / 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": None}, "data is not given"),
        ({"data": ROWS[:1] * 20}, "of its 20, 1 of them different"),
        ({"data": [{"prompt": 3}, *ROWS]}, "the prompt is of type int"),
        ({"env": TalksBadly, "reward": "env"}, "step() gives 'go on'"),
        ({"env": PaysInWords, "reward": "env"}, "the reward '1', a str"),
        ({"loss": infinite}, "make it finite"),
        ({"on_step": 3}, "on_step is 3"),
    ],
)
def test_it_is_refused_before_work(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        learn(**{**SMALL, "data": ROWS, "log": {"dir": str(tmp_path / "runs")}, **given})
    assert words in str(refused.value)
    assert not list((tmp_path / "runs").glob("learn-*")), "a run was begun"


@pytest.mark.parametrize("steps", [1, 9])
def test_a_run_in_which_every_reward_skips_every_answer_ends_by_name(tmp_path: Path, steps: int) -> None:
    """It was done, with exit code 0, and had learned nothing. A first step may be so by chance."""
    with pytest.raises(RewardFails, match=f"in {min(steps, 3)} steps: each returned None"):
        learn(**{**SMALL, "trainer": {"steps": steps}}, data=ROWS, reward=skip, log={"dir": str(tmp_path)})


def test_a_resumed_run_is_not_ended_by_skips(tmp_path: Path) -> None:
    """Answers of its earlier steps may have been graded, which this session has not seen."""

    def step(number: int, value: float | None) -> None:
        reward = Reward(value=value, reason="skipped" if value is None else "")
        group: Any = SimpleNamespace(trajectories=[SimpleNamespace(reward=reward)])
        failures.check_graded([group], number, 5, 1.0)

    failures = Failures(RunFolder(tmp_path))
    for number in (3, 4, 5):
        step(number, None)
    failures = Failures(RunFolder(tmp_path))
    for number, value in enumerate((None, 1.0, None, None, None), 1):
        step(number, value)


def test_an_environment_whose_replies_nobody_reads_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """task.max_turns is 1 unless it is set, and the run said nothing."""

    class GoesOn(Talks):
        def step(self, said: str) -> Any:
            return "go on", 1.0, False, False, {}

    learn(**SMALL, data=ROWS, env=GoesOn, reward="env", log={"dir": str(tmp_path)})
    assert "task.max_turns is 1" in caplog.text


def test_an_environment_may_have_rows_of_plain_text(tmp_path: Path) -> None:
    """They were refused: "give exactly one of text and messages"."""
    outcome = learn(
        **{**SMALL, "rollout": {**SMALL["rollout"], "max_tokens": 64}},
        **{"data": ROWS, "env": Talks, "reward": "env", "log": {"dir": str(tmp_path)}},
    )
    assert outcome.step == 1
