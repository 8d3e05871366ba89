"""What a user gives wrongly to ``learn`` ends before any answer is sampled, in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato import learn
from ostinato.config import Recipe
from ostinato.launch.checks import check_recipe, list_caveats
from ostinato.pipeline.failed import Failures, RewardFails
from ostinato.run import RunFolder
from ostinato.types import Reward, Stop

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


class Raises(Talks):
    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        raise KeyError("board")


class NeedsMore(Talks):
    def __init__(self, size: int) -> None: ...


class Hidden(Talks):
    """An environment with prompts of its own."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return f"guess {seed}", {}


class NoStep:
    reset = Talks.reset


class NoTool(Talks):
    tools = ("prize",)


class PaysInWords(Talks):
    def step(self, said: str) -> Any:
        return "go on", "1", True, False, {}


def skip(completions: list[Any], **columns: Any) -> list[None]:
    return [None for _ in completions]


def by_value() -> Any:
    """As in a notebook: without a file of its own. Its NameError was a warning, and the run began."""

    def undefined(completions: list[Any], **columns: Any) -> list[float]:
        return [flaot(text) for text in completions]  # type: ignore[name-defined]  # noqa: F821

    return undefined


def of_a_column(completions: list[Any], **columns: Any) -> list[float]:
    return [float(gold in text) for text, gold in zip(completions, columns["gold"], strict=True)]


def otherwise(answers: list[Any]) -> list[float]:
    return [1.0 for _ in answers]


def infinite(new: Any, old: Any, advantages: Any, *, sample_idx: Any, num_samples: int) -> Any:
    return new / 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # rewards
        ({"reward": 3}, "reward is 3"),
        ({"reward": "nummeric"}, "the nearest built-in is 'numeric'"),
        ({"reward": "nowhere.py:f"}, "no such file or folder"),
        ({"reward": []}, "reward.functions is empty"),
        ({"reward": ["exact", "exact"]}, "names one twice"),
        ({"reward": {"functions": ["exact"], "weights": [1.0, 2.0]}}, "2 numbers for 1"),
        ({"reward": by_value()}, "uses what does not exist (NameError: name 'flaot' is not defined)"),
        ({"reward": of_a_column}, "looks up a column that the row does not have (KeyError: 'gold'"),
        ({"reward": otherwise}, "completions and the row's columns by their names"),
        ({"reward": lambda completions, **columns: 1.0}, "returned float, not a list"),
        ({"reward": lambda completions, **columns: ["good"] * 2}, "returned str for a completion"),
        ({"reward": "numeric", "data": [{"prompt": "1?", "answer": "ten"}, *ROWS]}, "is not one number"),
        ({"reward": "exact", "data": [{"prompt": row["prompt"]} for row in ROWS]}, "answer_column"),
        # rows
        ({"data": None}, "data is not given"),
        ({"data": 3}, "data is 3"),
        ({"data": []}, "data has no rows"),
        ({"data": "nowhere.jsonl"}, "no such file or folder"),
        ({"data": {"rows": ROWS}}, "data has the splits ['rows']"),
        ({"data": ROWS[:1] * 20}, "of its 20, 1 of them different"),
        ({"data": ["1 + 1 =", *ROWS]}, "row 1 of data is a str"),
        ({"data": [{"prompt": 3}, *ROWS]}, "the prompt is of type int"),
        ({"data": [{"prompt": "", "answer": "1"}, *ROWS]}, "has no 'prompt'"),
        ({"data": [{"prompt": [{"content": "1?"}], "answer": "1"}, *ROWS]}, "has no 'role'"),
        ({"data": [{"prompt": "1?"}, *ROWS], "reward": "exact"}, "row 1 of"),
        ({"data": [{"prompt": "1?", "answer": float("nan")}, *ROWS]}, "in column 'answer'"),
        ({"data": [{"prompt": "1+" * 1024, "answer": "1"}, *ROWS]}, "exceeds the context of 1024"),
        ({"eval_data": ROWS[:3]}, "evaluation prompts are also in the training data"),
        ({"task": {"params": {"hold_out": 0.5}}}, "nearest is 'holdout'"),
        ({"task": {"params": {"holdout": 1.5}}}, "use a share of the rows"),
        # environments
        ({"env": Raises, "reward": "env"}, "raised KeyError: 'board'"),
        ({"env": NeedsMore, "reward": "env"}, "missing 1 required positional argument: 'size'"),
        ({"env": NoStep, "reward": "env"}, "has no method step()"),
        ({"env": NoTool, "reward": "env"}, "no attribute 'prize'"),
        ({"env": TalksBadly, "reward": "env"}, "step() gives 'go on'"),
        (
            {"env": Talks, "reward": "exact", "data": [{"prompt": f"{n}?"} for n in range(20)]},
            '("env": that of task.env)',
        ),
        ({"env": PaysInWords, "reward": "env"}, "the reward '1', a str"),
        # losses, and the rest of them in tests/unit/algo/test_own_loss.py
        ({"loss": 3}, "loss is 3"),
        ({"loss": infinite}, "make it finite"),
        ({"on_step": 3}, "on_step is 3"),
    ],
)
def test_it_is_refused_before_work(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        learn(**{**SMALL, "data": ROWS, "log": {"dir": str(tmp_path / "runs")}, **given})
    assert words in str(refused.value)
    assert "no running event loop" not in str(refused.value.__context__), "During handling of the above"
    assert not list((tmp_path / "runs").glob("learn-*")), "a run was begun"


@pytest.mark.parametrize("steps", [1, 9])
def test_a_run_in_which_every_reward_skips_every_answer_ends_by_name(tmp_path: Path, steps: int) -> None:
    """It was done, with exit code 0, and had learned nothing. A first step may be so by chance."""
    with pytest.raises(RewardFails, match=f"in {min(steps, 3)} steps: each returned None") as failed:
        learn(**{**SMALL, "trainer": {"steps": steps}}, data=ROWS, reward=skip, log={"dir": str(tmp_path)})
    assert str(failed.value).count("to go on") == 1, "it was said twice"


def test_a_run_in_which_every_episode_fails_ends_by_name(tmp_path: Path) -> None:
    """It was done too: an environment that always raises, warned of before the run. The evaluation before
    the first step had no verdict, and the steps began."""

    class Breaks(Talks):
        def step(self, said: str) -> Any:
            raise RuntimeError("the board is gone")

    rollout = {**SMALL["rollout"], "max_tokens": 64}  # an answer that is cut off never reaches step()
    with pytest.raises(RewardFails, match=r"at step 0 failed: env: RuntimeError: the board is gone"):
        learn(
            **{**SMALL, "rollout": rollout}, data=ROWS, env=Breaks, reward="env", log={"dir": str(tmp_path)}
        )


def test_an_agent_may_be_a_function_and_ends_the_run_where_it_always_fails(tmp_path: Path) -> None:
    """A path alone was taken; and three steps were played with an agent that had failed in the evaluation."""
    pytest.importorskip("starlette")

    async def loses(base_url: str, row: Any) -> float:
        raise KeyError("board")

    with pytest.raises(RewardFails, match="step 0 failed: env: RuntimeError: the agent raised KeyError"):
        learn(**SMALL, data=ROWS, task={"agent": loses}, reward="env", log={"dir": str(tmp_path)})


def test_a_resumed_run_is_not_ended_by_skips(tmp_path: Path) -> None:
    """Answers of its earlier steps may have been graded, which this session has not seen."""

    def step(number: int, value: float | None) -> None:
        reward = Reward(value=value, reason="skipped" if value is None else "")
        group: Any = SimpleNamespace(trajectories=[SimpleNamespace(reward=reward, stop=Stop.EOS)])
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


def test_an_environment_is_trained_on_its_own_seeds_and_rewards(tmp_path: Path) -> None:
    """``learn(env=Hidden)`` kept the reward exact, which asked for an answer column; with reward="env" it was
    trained on arithmetic, in silence."""
    made = learn(**{**SMALL, "task": {"n_train": 4}}, env=Hidden, log={"dir": str(tmp_path)})
    recipe = Recipe.load(made.folder / "recipe.toml")
    assert recipe.reward.functions == ("env",) and recipe.task.source == "seeds"
    rows = list(RunFolder.open(made.folder).trajectories.rows())
    assert [type(row["advantage"]) for row in rows] == [float] * 4
    task = {"env": "shop.py:Shop", "source": "arithmetic"}
    asked = Recipe.parse({"task": task, "reward": {"functions": ["exact"]}})
    assert asked.reward.functions == ("exact",) and asked.task.source == "arithmetic"
    assert 'leave out "env"' in "".join(list_caveats(asked, check_recipe(asked)))
    assert Recipe.parse({"task": task, "reward": {"workers": 2}}).reward.functions == ("env",)


def test_an_environment_may_have_rows_of_plain_text(tmp_path: Path) -> None:
    """They were refused: "give exactly one of text and messages"."""
    outcome = learn(
        **{**SMALL, "rollout": {**SMALL["rollout"], "max_tokens": 64}},
        **{"data": ROWS, "env": Talks, "reward": "env", "log": {"dir": str(tmp_path)}},
    )
    assert outcome.step == 1


def test_a_text_is_what_a_user_says_where_the_rows_were_chats(tmp_path: Path) -> None:
    """``generate("What is 12 + 30?")`` left out the chat template by which the policy had been trained."""
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    outcome = learn(**SMALL, data=rows, reward="numeric", log={"dir": str(tmp_path)})
    text = "What is 12 + 30?"
    as_text, as_chat = outcome.generate([text, [{"role": "user", "content": text}]], temperature=0.0)
    assert as_text == as_chat != ""
