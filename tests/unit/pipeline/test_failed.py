"""Reward functions that fail: what ends a run, what is kept and told of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_loop import Bench, IsRight, LoopState

from ostinato.pipeline.failed import RewardFails
from ostinato.types import Group, Reward

TRACE = "Traceback (most recent call last):\n  File \"/rewards.py\", line 3, in graded\nKeyError: 'gold'"
TOLD = "raised: KeyError: 'gold' (rewards.py:3)"


class Failing(IsRight):
    """Raises for the groups whose number ``at`` names, in the order in which they are graded."""

    def __init__(self, at: Any) -> None:
        super().__init__()
        self.at, self.graded = at, 0

    async def grade(self, group: Group) -> list[Reward]:
        number, self.graded = self.graded, self.graded + 1
        rewards = await super().grade(group)
        if not self.at(number):
            return rewards
        reason = TOLD.replace("raised: ", "raised: graded: ", 1)
        failed = {"graded": f"{TOLD}\n{TRACE}"}
        return [Reward(value=None, reason=reason, parts={"graded": None}, failed=failed) for _ in rewards]


def test_a_reward_that_fails_for_all_of_the_first_evaluation_ends_the_run(tmp_path: Path) -> None:
    """It ran to its end, wrote an adapter and returned 0; the cause was told once, without file or line."""
    bench = Bench(tmp_path, grader=Failing(lambda number: True))
    with pytest.raises(RewardFails) as caught:
        bench.run()
    assert str(caught.value) == (
        "reward graded gave no verdict to any of the 32 answers of the evaluation of the set eval at step 0 "
        f"({TOLD}); mend it"
    )
    assert caught.value.__notes__ == [f"{TRACE}\nprompt e7, completion '1 6'"]
    assert not bench.rows and not bench.saved and not list(bench.folder.eval.rows())
    (row,) = bench.folder.failed.rows()
    assert (row["step"], row["part"], row["count"], row["of"], row["stopped"]) == (0, "eval", 32, 32, True)
    again = Bench(tmp_path, steps=1)
    again.run()
    assert [row["step"] for row in again.folder.eval.rows()] == [0, 1], "mended, it is scored after all"
    assert not list(again.folder.failed.rows())


def test_a_reward_that_fails_later_is_counted_and_its_last_traceback_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, grader=Failing(lambda number: number in (3, 8, 9)), steps=2)
    bench.run()
    rows = list(bench.folder.failed.rows())
    assert [(row["step"], row["part"], row["count"], row["of"]) for row in rows] == [
        (0, "eval", 4, 32),
        (1, "train", 16, 32),
    ]
    assert rows[1]["function"] == "graded" and rows[1]["trace"] == TRACE
    assert rows[1]["detail"] == TOLD and not rows[1]["stopped"]
    told = [note for note in caplog.messages if "told once" in note]
    assert told == [
        "step 0: raised: graded: KeyError: 'gold' (rewards.py:3) (told once; faults/raised counts them)"
    ]
    assert TRACE in caplog.messages
    later = Bench(tmp_path, state=LoopState(step=0), steps=1)
    later.folder.truncate_after(0)
    assert [row["step"] for row in later.folder.failed.rows()] == [0]
