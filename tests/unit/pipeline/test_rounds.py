"""On the bandit of ``small_loop``: who leaves the stream for good, and batches that are kept to grow old."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference.fake_engine import FakeEngine
from small_loop import (
    BanditTrainer,
    Bench,
    Dies,
    IsRight,
    Killed,
    Stream,
    as_saved,
    bandit,
    deterministic,
    send,
)

from ostinato.algo.pack import pack
from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.pipeline.credit import assign
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.rollout.rollout import RolloutRequest, play
from ostinato.types import Batch, Group, Reward, StepReport


class GetsEasy(IsRight):
    """Prompt p<n> is solved by everybody from step 2n on."""

    async def grade(self, group: Group) -> list[Reward]:
        if group.step >= 2 * int(group.prompt.uid[1:]):
            return [Reward(value=1.0)] * len(group.trajectories)
        return await super().grade(group)


EASY: dict[str, Any] = {"epoch": 6, "prompts_per_step": 2, "solved_for_good": 0.9, "max_empty_steps": 99}


def test_a_solved_prompt_never_comes_again_and_the_last_one_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, steps=50, grader=GetsEasy(), trajectories_every=1, eval_every=50, **EASY)
    finished = bench.run()
    assert finished.why is Finish.SOLVED and "every prompt is solved for good" in caplog.messages[-1]
    assert sorted(finished.state.retired) == [f"p{n}" for n in range(6)]
    steps: dict[str, list[int]] = {}
    for row in bench.folder.trajectories.rows():
        steps.setdefault(row["uid"], []).append(row["step"])
    left_after = {uid: max(seen) for uid, seen in steps.items()}
    for row in bench.rows:
        gone = sum(last <= row["step"] for last in left_after.values())
        assert (row["groups/retired_total"], row["groups/left_share"]) == (gone, pytest.approx(1 - gone / 6))
    assert sum(row["groups/retired"] for row in bench.rows) == 6
    assert [row["step"] for row in bench.folder.eval.rows()] == [0, finished.state.step]  # its last word
    again = Bench(tmp_path, steps=50, state=LoopState(**json.loads(json.dumps(bench.saved[-1][0]))), **EASY)
    assert again.run().why is Finish.SOLVED and not again.rows


def stale(path: Path, staleness: int, **changes: Any) -> Bench:
    """A loop whose policy plays ahead."""
    often: dict[str, Any] = {"trajectories_every": 1, "max_empty_steps": 99}
    bench = Bench(path, staleness=staleness, **{**often, **changes})
    bench.trainer.lr = 0.5
    return bench


@pytest.mark.parametrize("staleness", [0, 1, 3, 9])
def test_a_batch_is_as_old_as_was_asked(tmp_path: Path, staleness: int) -> None:
    """Step s trains on what the policy of step s - k sampled, or the first one did; every place of the stream
    is played once, and nothing is left over at the end."""
    bench = stale(tmp_path, staleness, steps=7)
    finished = bench.run()
    ages = [min(staleness, step) for step in range(7)]
    assert bench.trainer.ages == [{age} for age in ages]
    state = finished.state
    assert (state.version, state.cursor, state.ahead) == (7, 28, ())
    seen = [row["uid"] for row in bench.folder.trajectories.rows()]
    assert sorted(set(seen)) == sorted(f"p{n}" for n in range(28))


def test_without_staleness_the_loop_is_what_it_was(tmp_path: Path) -> None:
    """The twin: play, train, play, train, by hand, with the same seeds."""
    bench = stale(tmp_path, 0, steps=4)
    bench.run()
    engine, trainer = FakeEngine(bandit), BanditTrainer(lr=0.5)
    stage = replace(bench.loop.stage, engine=engine)
    for step in range(1, 5):
        engine.publish(trainer.adapters(), step - 1)
        asks = [
            RolloutRequest(prompt=Stream().prompt(i), seed=(0, step, i), group_size=8, step=step)
            for i in range(4 * step - 4, 4 * step)
        ]
        groups = [item.group for item in asyncio.run(play(stage, asks))]
        credit = assign(groups, bench.loop.algorithm, min_verdicts=2, answer_tokens=2)
        if credit.samples:
            trainer.step(pack(credit.samples, credit.weights, tokens_per_microbatch=64, version=step - 1))
    assert trainer.logits.tobytes() == bench.trainer.logits.tobytes()


@pytest.mark.parametrize(("staleness", "dies_at"), [(0, 4), (0, 6), (2, 1), (2, 4), (2, 6), (2, 8)])
def test_a_stale_run_that_was_killed_is_the_run_that_was_not(
    tmp_path: Path, staleness: int, dies_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The policies that sampled the queue are gone; their groups are in the spool, their rounds in the
    checkpoint, and who had left the stream when each was asked for is known again."""
    options: dict[str, Any] = {**EASY, "steps": 12, "checkpoint_every": 3}
    whole = stale(tmp_path / "whole", staleness, grader=GetsEasy(), **options)
    whole.run()
    dies = Dies(lambda group: group.step == dies_at + staleness, GetsEasy())
    killed = stale(tmp_path / "torn", staleness, grader=dies, **options)
    with pytest.raises(Killed):
        killed.run()
    saved = as_saved(killed) if killed.saved else {"state": LoopState()}
    assert len(saved["state"].ahead) == (2 * staleness if killed.saved else 0)  # rounds of two
    resumed = stale(tmp_path / "torn", staleness, grader=GetsEasy(), **saved, **options)
    resumed.run()
    assert resumed.trainer.logits.tobytes() == whole.trainer.logits.tobytes()
    rows = [list(map(deterministic, bench.folder.metrics.rows())) for bench in (whole, resumed)]
    assert rows[0] == rows[1]
    assert resumed.loop.state.retired == whole.loop.state.retired and whole.loop.state.retired
    assert "anew" not in caplog.text


def test_from_the_older_of_two_checkpoints_it_is_the_same_run_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest checkpoint may turn out to be damaged. The one before it names rounds that were played
    ahead, and the spool had dropped their groups when the newest was written: they were played anew by a
    later policy, with a note that this was not quite the run. Nothing is sampled again."""
    options: dict[str, Any] = {**EASY, "steps": 9, "checkpoint_every": 3, "keep": 2}
    whole = stale(tmp_path, 2, grader=GetsEasy(), **options)
    whole.run()
    rows = list(map(deterministic, whole.folder.metrics.rows()))
    saved, logits = whole.saved[-2]
    state = LoopState(**json.loads(json.dumps(saved)))
    assert [one.round for one in state.ahead] == [7, 7, 8, 8]
    resumed = stale(tmp_path, 2, state=state, logits=logits, grader=GetsEasy(), **options)
    resumed.run()
    assert resumed.trainer.logits.tobytes() == whole.trainer.logits.tobytes()
    assert list(map(deterministic, resumed.folder.metrics.rows())) == rows
    assert [row["rollout/from_spool"] for row in resumed.rows] == [2, 2, 2]
    assert "anew" not in caplog.text


def test_a_queue_that_is_lost_is_played_anew_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = stale(tmp_path, 2, steps=4)
    first.run()
    saved, logits = first.saved[-1]
    state = LoopState(**saved)
    assert state.ahead == ()  # at the end nothing is
    interrupted = stale(tmp_path / "cut", 2, steps=9)
    send(interrupted, signal.SIGINT, 4)
    assert [one.version for one in interrupted.run().state.ahead] == 4 * [2] + 4 * [3]
    (tmp_path / "cut" / "inflight.jsonl.zst").unlink()
    saved, logits = interrupted.saved[-1]
    resumed = stale(tmp_path / "cut", 2, steps=9, state=LoopState(**saved), logits=logits)
    resumed.run()
    told = "does not have 8, which policies 2 to 3 sampled; policy 4 plays them anew"
    assert caplog.text.count(told) == 1
    assert [row.get("groups/played_anew") for row in resumed.rows] == [8, None, None, None, None]
    assert resumed.trainer.ages == [{0}, {1}, {2}, {2}, {2}]
    assert resumed.loop.state.cursor == 36  # no prompt is lost


def test_one_refused_round_is_played_anew_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step whose routes the trainer refused took the whole queue with it: the spool drops that round, and a
    resumed run threw away those behind it too, whose groups were all there, wound the stream back and gave
    their places to other steps, while prompts that had left by them stayed away."""
    options: dict[str, Any] = {**EASY, "epoch": 12, "prompts_per_step": 3, "steps": 10}

    class Notes(GetsEasy):
        def __init__(self) -> None:
            super().__init__()
            self.played = Counter[int]()  # groups by step

        async def grade(self, group: Group) -> list[Reward]:
            self.played[group.step] += group.prompt.uid.startswith("p")
            return await super().grade(group)

    first, notes = stale(tmp_path, 3, grader=GetsEasy(), **options), Notes()
    learn = first.trainer.step

    def refuses(batch: Batch) -> StepReport:
        if len(first.rows) == 4:
            raise Misaligned("foreign", Diagnosis(cause=Cause.STALE, overlap=0.5, best=0.5))
        return learn(batch)

    first.trainer.step = refuses  # type: ignore[method-assign]
    with pytest.raises(Misaligned):
        first.run()
    saved, logits = first.saved[-1]
    state = LoopState(**json.loads(json.dumps(saved)))
    assert [one.round for one in state.ahead] == 3 * [5] + 3 * [6] + 3 * [7]
    assert state.ahead[0].version < state.version
    resumed = stale(tmp_path, 3, state=state, logits=logits, grader=notes, **options)
    assert resumed.run().why is Finish.DONE
    assert +notes.played == {5: 3, 9: 3, 10: 3}  # that of 8 was played in the step that was refused
    assert resumed.trainer.ages[0] == {0}
    found = resumed.loop.state.retired
    assert found[: len(state.retired)] == state.retired and len(set(found)) == len(found) > 0
    assert caplog.text.count(f"policy {state.version} plays them anew") == 1
    rows = [row for row in resumed.folder.trajectories.rows() if row["step"] == 5]
    assert {row["uid"] for row in rows} == {Stream(12).prompt(one.place).uid for one in state.ahead[:3]}


def test_a_checkpoint_of_an_older_version_is_refused_in_words() -> None:
    """It named rounds, from which the groups followed."""
    ahead = [{"step": 5, "cursor": 16, "retired": 0, "version": 2}]
    with pytest.raises(ValueError, match="of a version of ostinato that this one does not read"):
        LoopState(step=4, ahead=ahead)  # type: ignore[arg-type]
