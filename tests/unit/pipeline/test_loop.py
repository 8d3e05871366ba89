"""The loop on a bandit (``small_loop``): its accounts, its ends, and what it does when something fails."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_loop import (
    TEN_A_ROW,
    Bench,
    Dies,
    FakeMemory,
    IsRight,
    Killed,
    as_saved,
    deterministic,
    raises_at,
    send,
)

from ostinato.algo.algorithms import algorithm
from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.every import Every
from ostinato.pipeline.account import compute_tool_rates
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.pipeline.state import NoTrainableSamples, make_untrainable_error
from ostinato.types import Batch, Group, Request, Reward, StepReport

SHIFTED = Diagnosis(cause=Cause.SHIFTED, fixed_overlap=1.0)


def test_it_learns_and_keeps_its_books(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=8, eval_every=3, checkpoint_every=5, trajectories_every=4)
    finished = bench.run()
    assert finished.why is Finish.DONE
    assert (finished.state.step, finished.state.cursor, finished.state.version) == (8, 32, 8)
    assert bench.trainer.ages == [{0}] * 8
    evals = list(bench.folder.eval.rows())
    assert [row["step"] for row in evals] == [0, 3, 6, 8]
    assert evals[-1]["pass@1"] > 0.7 > 0.3 > evals[0]["pass@1"]
    assert [state["step"] for state, _ in bench.saved] == [5, 8]
    assert [row["step"] for row in bench.folder.metrics.rows()] == list(range(1, 9))
    assert {row["step"] for row in bench.folder.trajectories.rows()} == {1, 4, 8}
    events = [row["event"] for row in bench.folder.ledger.rows()]
    assert events == [
        *("start", "eval", "step", "step", "step", "eval", "step", "step", "step", "eval"),
        *("step", "step", "eval", "end"),
    ]
    assert bench.engine.version == 8


def test_every_sampled_token_is_trained_or_wasted_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=3, flops=TEN_A_ROW)
    bench.run()
    for row in bench.rows:
        assert row["tokens/sampled"] == 4 * 8 * 2 == row["tokens/trained"] + row["tokens/wasted"]
        assert row["tokens/wasted"] == sum(v for name, v in row.items() if name.startswith("tokens/wasted/"))
        shares = [row[f"time/{part}_share"] for part in ("rollout", "reward", "train", "measure", "other")]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0
    assert bench.rows[-1]["total/sampled_tokens"] == 3 * 64
    read = sum(row["tokens/context"] for row in bench.rows)
    assert bench.rows[-1]["num_tokens"] == read + 3 * 64  # TRL's count: read and sampled, trained on or not


def test_tool_rates_by_hand() -> None:
    """12 calls of 8 trajectories, of which one was no JSON and two raised; refused ones were not made."""
    counts = {"tools/calls": 12.0, "tools/unreadable": 1.0, "tools/raised": 2.0, "tools/refused": 3.0}
    assert compute_tool_rates(counts, 8.0) == {"tools/call_frequency": 1.5, "tools/failure_frequency": 0.25}
    assert compute_tool_rates({}, 8.0) == {}


def test_a_run_that_drafts_is_the_same_run_with_books_of_drafts(tmp_path: Path) -> None:
    plain = Bench(tmp_path / "plain", steps=3, eval_every=2)
    plain.run()
    memory = FakeMemory()
    drafting = Bench(tmp_path / "drafting", steps=3, eval_every=2, drafting=memory)
    drafting.run()

    assert drafting.trainer.logits.tobytes() == plain.trainer.logits.tobytes()
    assert memory.added == [(step, f"p{4 * step - 4 + i}") for step in (1, 2, 3) for i in range(4)]
    assert memory.observed == 3 * 64
    assert {f"p{i}" for i in range(12)} | {f"e{i}" for i in range(8)} == set(memory.forgotten)
    for step, row in enumerate(drafting.rows):
        accepted = 9 * 100**step  # what the second look of a step adds to the first
        assert row["draft/share_sibling"] == pytest.approx(accepted / 64)  # of all tokens sampled
        assert (row["draft/tokens_per_pass"], row["draft/acceptance"]) == (2.0, pytest.approx(1 / 3))
        assert (row["tokens/drafted"], row["tokens/accepted"]) == (96, 32)
        assert (row["draft/history_tokens"], row["draft/history_bytes"]) == (7, 70)
        assert "draft/not_remembered" not in row
    assert drafting.rows[0]["draft/seconds_saved"] == pytest.approx(3 * (10 - 1))
    rows = [row for row in drafting.folder.ledger.rows() if row["event"] == "step"]
    assert rows[0]["tokens"]["drafted"] == 96
    assert not any("draft" in key for key in plain.rows[0])


def test_groups_that_come_back_from_the_spool_are_remembered_too(tmp_path: Path) -> None:
    """The history of a resumed run has no hole where the kill was."""

    dies = Dies(lambda group: group.step == 2 and group.prompt.uid == "p7")
    with pytest.raises(Killed):
        Bench(tmp_path, steps=2, grader=dies, drafting=FakeMemory()).run()
    memory = FakeMemory()
    resumed = Bench(tmp_path, steps=2, drafting=memory)
    resumed.run()
    assert resumed.rows[0]["rollout/from_spool"] == 4
    assert memory.added == [(step, f"p{4 * step - 4 + i}") for step in (1, 2) for i in range(4)]
    assert resumed.rows[0]["draft/tokens_per_pass"] == 2.0  # as it was when they were played


def test_zero_variance_everywhere_is_reported_then_a_named_stop(tmp_path: Path) -> None:
    """A reward that never differs: the field's commonest question, 'why does it not learn?'."""
    bench = Bench(tmp_path, grader=IsRight(value=0.0), algorithm=algorithm("dapo"), max_empty_steps=3)
    with pytest.raises(NoTrainableSamples, match="3 steps in a row had nothing to learn from"):
        bench.run()
    unread = Counter({"tools/calls": 9, "tools/unreadable": 7})
    named = str(make_untrainable_error(LoopState(empty_in_a_row=3), tmp_path, unread))
    assert "7" in named and "tools/unreadable" in named and "9" not in named
    assert [row["frac_reward_zero_std"] for row in bench.rows] == [1.0] * 3
    assert bench.rows[0]["groups/dropped/zero_variance"] == 4
    assert bench.rows[0]["tokens/wasted/zero_variance"] == 64
    assert bench.rows[0]["tokens/trained"] == 0
    assert bench.saved[-1][0]["step"] == 3 and bench.saved[-1][0]["version"] == 0


@pytest.mark.parametrize("ahead", [{}, {"overlap": True, "staleness": 2}], ids=["lockstep", "overlap"])
def test_a_failing_engine_passes_through_after_a_checkpoint(tmp_path: Path, ahead: dict[str, Any]) -> None:
    bench = Bench(tmp_path, **ahead)
    honest = bench.engine.generate

    def generate(requests: Sequence[Request]) -> Any:
        if bench.loop.state.step == 3:
            raise RuntimeError("lost the device")
        return honest(requests)

    bench.engine.generate = generate  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost the device"):
        bench.run()
    # with overlap the step whose groups were there already may still be taken
    assert bench.saved[-1][0]["step"] == bench.loop.state.step in ((3, 4) if ahead else (3,))


@pytest.mark.parametrize("steps_taken", [0, 1])
def test_a_run_goes_on_once_the_recorder_is_mended(tmp_path: Path, steps_taken: int) -> None:
    """The refused groups were in the spool: a resumed run took them up, broken routes and all, and was
    refused again without a single call of the engine. Where a part of the batch had been learned from, the
    trainer is no longer that of any step and is not saved; the steps before are in the spool still."""
    bench = Bench(tmp_path, steps=5, checkpoint_every=2)
    raises_at(bench, 3, Misaligned("shifted", SHIFTED, steps_taken=steps_taken))
    with pytest.raises(Misaligned):
        bench.run()
    assert bench.saved[-1][0]["step"] == (2 if steps_taken else 3)
    fixed = Bench(tmp_path, steps=5, **as_saved(bench))
    assert fixed.run().why is Finish.DONE
    assert [row["rollout/from_spool"] for row in fixed.rows] == ([4, 0, 0] if steps_taken else [0, 0])


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_checkpoint_that_fails_hides_no_refusal(
    tmp_path: Path, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """It came first, and raised instead: the groups stayed in the spool, and every resumed run took them up
    and was refused again."""
    bench = Bench(tmp_path, steps=5, checkpoint_every=2)
    raises_at(bench, 3, Misaligned("shifted", SHIFTED))

    def save(state: LoopState) -> int:
        if state.step == 3:
            raise error("no more room")
        return bench.save(state)

    bench.loop.save = save
    with pytest.raises(Misaligned):
        bench.run()
    assert caplog.messages == ["step 3 could not be saved: no more room"]
    assert bench.saved[-1][0]["step"] == 2
    fixed = Bench(tmp_path, steps=5, **as_saved(bench))
    assert fixed.run().why is Finish.DONE
    assert [row["rollout/from_spool"] for row in fixed.rows] == [4, 0, 0]


def test_what_was_measured_has_a_file_and_a_pool_of_seconds_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three arms are three forward passes over the batch, and teach nothing."""
    bench = Bench(tmp_path, steps=2, flops=TEN_A_ROW)
    measured = {"seconds": 0.005, "arms": {"native": {}, "replay": {}, "floor": {}}}
    honest = bench.trainer.step

    def step(batch: Batch) -> StepReport:
        time.sleep(0.01)
        report = honest(batch)
        if bench.loop.state.step:
            return report
        metrics = {**report.metrics, "passes/measure": 3.0}
        return replace(report, metrics=metrics, mismatch=measured, note="replay is on")

    bench.trainer.step = step  # type: ignore[method-assign]
    bench.run()
    assert list(bench.folder.mismatch.rows()) == [{"step": 1, **measured}]
    first, second = bench.rows
    assert first["flops/measure"] == first["flops/train"] > 0  # 3 x 10 a row, and 10 + 20
    assert second["flops/measure"] == 0
    assert caplog.messages == ["step 1: replay is on"]
    assert [row["time/measure_s"] for row in bench.rows] == [0.005, 0]
    assert bench.rows[0]["time/train_s"] >= 0.005


def test_a_failure_inside_a_training_step_is_never_checkpointed(tmp_path: Path) -> None:
    """A trainer that breaks after the first of two optimizer steps is neither before nor after the step:
    saved under the number of the last one, it would make a resumed run different without a word."""
    bench = Bench(tmp_path, checkpoint_every=2)
    raises_at(bench, 3, RuntimeError("out of memory"), learned=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.run()
    assert bench.saved[-1][0]["step"] == 2
    resumed = Bench(tmp_path, **as_saved(bench))
    resumed.run()
    assert [row["rollout/from_spool"] for row in resumed.rows] == [4, 4, 0, 0]  # no rollout is paid twice


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGINT, Finish.INTERRUPTED),
        (signal.SIGTERM, Finish.TERMINATED),
    ],
)
def test_one_signal_ends_after_the_step_saved(tmp_path: Path, number: signal.Signals, why: Finish) -> None:
    before = signal.getsignal(number)
    bench = Bench(tmp_path)
    send(bench, number, 2)
    finished = bench.run()
    assert (finished.why, finished.state.step) == (why, 2)
    assert bench.saved[-1][0]["step"] == 2
    assert signal.getsignal(number) is before


def test_sigterm_abandons_a_step_that_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run saves what it has; the groups that were finished stay in the spool for the resumed run."""

    class Stuck(IsRight):
        async def grade(self, group: Group) -> list[Reward]:
            if group.step == 2 and int(group.prompt.uid[1:]) % 2:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
                await asyncio.sleep(60)
            return await super().grade(group)

    bench = Bench(tmp_path, grader=Stuck(), grace_s=0.1)
    finished = bench.run()
    assert (finished.why, finished.state.step) == (Finish.TERMINATED, 1)
    assert bench.saved[-1][0]["step"] == 1
    assert "what followed step 1 was abandoned" in caplog.messages[0]
    resumed = Bench(tmp_path, state=finished.state, logits=bench.trainer.logits)
    resumed.run()
    assert resumed.rows[0]["rollout/from_spool"] == 2


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing_reported(tmp_path: Path) -> None:
    class Stuck(IsRight):
        async def grade(self, group: Group) -> list[Reward]:
            if group.step == 3:
                for delay in (0.02, 0.06):
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
                await asyncio.sleep(60)
            return await super().grade(group)

    bench = Bench(tmp_path, grader=Stuck(), prompts_per_step=1, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert [row["step"] for row in bench.folder.metrics.rows()] == [1, 2]
    assert bench.saved[-1][0]["step"] == 2


class GoesWrong:
    """Every answer earns 1, until step 8; then one in many does."""

    async def grade(self, group: Group) -> list[Reward]:
        right = [group.step < 8 or (i == 0 and group.step % 2 == 0) for i in range(len(group.trajectories))]
        return [Reward(value=float(value)) for value in right]


@pytest.mark.slow
def test_the_loop_tells_a_collapse_once_and_stops_where_it_was_asked_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path / "goes-on", steps=40, grader=GoesWrong(), max_empty_steps=99)
    assert bench.run().why is Finish.DONE
    reported = zip(bench.folder.watch.rows(), caplog.messages, strict=True)
    early, (alarm, note) = reported  # a bandit never ends an answer by itself
    assert early[0]["rule"] == "truncated_early" and "look: the run begins" in early[1]
    assert alarm["rule"] == "reward" and alarm["collapse"] and "collapse: the reward is" in note
    assert [row["watch/collapsed"] for row in bench.rows] == [
        float(step >= alarm["step"]) for step in range(1, 41)
    ]

    stopped = Bench(
        tmp_path / "stops", steps=40, grader=GoesWrong(), max_empty_steps=99, stop_on_collapse=True
    )
    finished = stopped.run()
    assert (finished.why, finished.state.step) == (Finish.COLLAPSED, alarm["step"])
    assert stopped.saved[-1][0]["step"] == alarm["step"]
    assert [row["step"] for row in stopped.folder.eval.rows()] == [0, alarm["step"]], "what it ended as"


@pytest.mark.slow
def test_a_resumed_run_remembers_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To resume a run that stopped is to say that it shall go on: the same collapse stops it no more."""
    stops: dict[str, Any] = {"grader": GoesWrong(), "max_empty_steps": 99, "stop_on_collapse": True}
    first = Bench(tmp_path, steps=40, **stops)
    state = first.run().state
    caplog.clear()
    again = Bench(
        tmp_path, steps=40, state=LoopState(**state.to_json()), logits=first.trainer.logits, **stops
    )
    assert again.run().why is Finish.DONE
    assert {row["watch/collapsed"] for row in again.rows} == {1.0}
    assert len(list(again.folder.watch.rows())) == 2 and not caplog.messages


def test_a_schedule_in_tokens_and_a_set_with_its_own(tmp_path: Path) -> None:
    """A step samples 64 tokens: 150 more are passed in steps 3, 5, 8 and 10. The other set counts steps."""
    bench = Bench(tmp_path, steps=11, eval_every="150 tokens")
    hard = replace(bench.loop.evaluations[0], name="hard", every=Every(amount=4))
    bench.loop.evaluations = [*bench.loop.evaluations, hard]
    bench.run()
    rows = list(bench.folder.eval.rows())
    steps = {name: [row["step"] for row in rows if row["set"] == name] for name in ("eval", "hard")}
    assert steps == {"eval": [0, 3, 5, 8, 10, 11], "hard": [0, 4, 8, 11]}
    assert [row["spent"]["tokens"] for row in rows if row["set"] == "hard"] == [0, 256, 512, 704]


def test_an_evaluation_that_a_signal_left_out_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=6, eval_every=2)
    bench.observer.on_step = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 4 else None
    assert bench.run().why is Finish.TERMINATED
    assert [row["step"] for row in bench.folder.eval.rows()] == [0, 2]
    Bench(tmp_path, steps=6, eval_every=2, **as_saved(bench)).run()
    whole = Bench(tmp_path / "whole", steps=6, eval_every=2)
    whole.run()
    evals = [list(map(deterministic, run.eval.rows())) for run in (bench.folder, whole.folder)]
    assert evals[0] == evals[1]


def test_a_run_that_is_not_worth_the_rest_ends_with_all_its_scores(tmp_path: Path) -> None:
    """The main set is due every 2 steps and the other never: it is scored when the forecast ends the run. The
    forecast is made after scores of the main set alone, before training not at all."""
    requested: list[int] = []

    def should_stop(step: int) -> bool:
        requested.append(step)
        return step >= 4

    def bench(state: LoopState | None = None, logits: Any = None) -> Bench:
        made = Bench(tmp_path, steps=20, eval_every=2, state=state, logits=logits)
        hard = replace(made.loop.evaluations[0], name="hard", every=Every())
        made.loop.evaluations, made.observer.should_stop = [hard, *made.loop.evaluations], should_stop
        return made

    first = bench()
    finished = first.run()
    assert (finished.why, finished.state.step, requested) == (Finish.ENOUGH, 4, [2, 4])
    rows = [(row["step"], row["set"]) for row in first.folder.eval.rows()]
    assert rows == [(0, "hard"), (0, "eval"), (2, "eval"), (4, "eval"), (4, "hard")]
    (saved, logits) = first.saved[-1]
    again = bench(LoopState(**saved), logits)  # called again, it gives the same
    assert again.run().why is Finish.ENOUGH and requested == [2, 4, 4]
    assert [(row["step"], row["set"]) for row in first.folder.eval.rows()] == rows
