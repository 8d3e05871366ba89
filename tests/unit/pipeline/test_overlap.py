"""Rollouts that go on while the trainer learns, on the bandit of ``small_loop``: how old its tokens are, and
that no prompt is lost or trained on twice, however it is slowed down, killed and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loop import (
    TEN_A_ROW,
    BanditTrainer,
    Bench,
    IsRight,
    Killed,
    Lesson,
    Stuck,
    as_saved,
    deterministic,
    plan,
)

from ostinato.config import Recipe
from ostinato.launch.checks import check_recipe
from ostinato.observe.ledger import Ledger, Terms, read, summary
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.pipeline.signals import Stalled
from ostinato.pipeline.state import StalenessViolation
from ostinato.types import Batch, Group, Reward, StepReport


class Slow(IsRight):
    """Verdicts take from nothing to longer than a step; it dies at the ``dies``-th group."""

    def __init__(self, seed: int = 0, dies: int = 0) -> None:
        super().__init__()
        self.random, self.left = random.Random(seed), dies

    async def grade(self, group: Group) -> list[Reward]:
        if group.prompt.uid.startswith("p"):  # and not held out
            self.left -= 1
            if self.left == 0:
                raise Killed
        await asyncio.sleep(self.random.choice([0.0, 0.0, 0.0, 0.001, 0.004]))
        return await super().grade(group)


def overlapped(path: Path, **changes: Any) -> Bench:
    usual: dict[str, Any] = {"overlap": True, "staleness": 2, "train_s": 0.001, "prompts_per_step": 2}
    usual |= {"max_empty_steps": 99, "trajectories_every": 1, "eval_every": 99, "grader": Slow()}
    bench = Bench(path, **{**usual, **changes})
    bench.trainer.lr, bench.loop.evaluations = 0.5, ()
    return bench


def trained_on(bench: Bench) -> list[str]:
    """Prompts of the steps that count, once for each batch that had them."""
    rows = bench.folder.trajectories.rows()
    return [uid for _, uid in sorted({(row["step"], row["uid"]) for row in rows})]


def adds_up(state: LoopState) -> None:
    assert state.admitted == state.trained + sum(state.dropped.values()) + len(state.ahead)


def test_without_staleness_it_is_the_synchronous_loop(tmp_path: Path) -> None:
    """k = 0: the same bits as in lockstep, whatever is slow."""
    plain = Bench(tmp_path / "plain", steps=5, checkpoint_every=2, trajectories_every=1)
    plain.run()
    other = Bench(tmp_path / "overlap", steps=5, checkpoint_every=2, trajectories_every=1, overlap=True)
    other.grader = Slow()
    other.run()
    assert other.trainer.logits.tobytes() == plain.trainer.logits.tobytes()
    rows = [list(map(deterministic, one.folder.metrics.rows())) for one in (plain, other)]
    more = ("pipeline/", "queue/", "staleness/hist")
    rows[1] = [{name: n for name, n in row.items() if not name.startswith(more)} for row in rows[1]]
    assert rows[0] == rows[1]
    kept = [list(one.folder.trajectories.rows()) for one in (plain, other)]
    assert kept[0] == kept[1]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 4), st.integers(0, 10**6))
def test_no_token_is_older_than_was_allowed(staleness: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = overlapped(Path(folder), steps=6, staleness=staleness, grader=Slow(seed))
        finished = bench.run()
        assert finished.why is Finish.DONE and not finished.state.ahead
        assert max(max(ages) for ages in bench.trainer.ages) <= staleness
        assert finished.state.trained == 12 and bench.rows[-1]["groups/trained_total"] == 12
        for row in bench.rows:
            dropped = sum(n for name, n in row.items() if name.startswith("groups/dropped_total/"))
            left = row["groups/trained_total"] + dropped + row["groups/outstanding"]
            assert row["groups/admitted_total"] == left
            assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/wasted"]
            by_age = [n for name, n in row.items() if name.startswith("staleness/hist/")]
            assert sum(by_age) == row["tokens/trained"]
        assert not finished.state.dropped
        assert sorted(trained_on(bench)) == sorted(f"p{n}" for n in range(12))


def lives(path: Path, dies: Sequence[int], **changes: Any) -> list[Bench]:
    """One process after another, each from the last checkpoint; all but the last are killed."""
    benches: list[Bench] = []
    state, logits = None, None
    for seed, at in enumerate([*dies, 0]):
        bench = overlapped(path, **changes, state=state, logits=logits, grader=Slow(seed, at))
        with suppress(Killed):
            bench.run()
        benches.append(bench)
        if bench.saved:
            saved, logits = bench.saved[-1]
            state = LoopState(**json.loads(json.dumps(saved)))
    return benches


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=2), st.integers(0, 3), st.integers(1, 3))
def test_killed_at_any_group_nothing_is_lost_and_nothing_trained_on_twice(
    dies: list[int], staleness: int, every: int
) -> None:
    """kill -9, as far as a test in one process can. What was on its way is found in the spool or played
    anew."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"steps": 6, "checkpoint_every": every, "staleness": staleness}
        benches = lives(Path(folder) / "run", dies, **sizes, flops=TEN_A_ROW)
        last = benches[-1]
        assert last.loop.state.step == 6 and not last.loop.state.ahead
        adds_up(last.loop.state)
        assert all(max(ages) <= staleness for bench in benches for ages in bench.trainer.ages)
        seen = trained_on(last)
        assert len(seen) == len(set(seen)) == 12 == last.loop.state.trained
        assert sorted(seen) == sorted(f"p{n}" for n in range(12))
        found = summary(read(last.folder))
        assert found.tokens["sampled"] == found.tokens["trained"] + sum(found.dropped.values())


def test_what_was_under_way_is_found_or_played_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C after two steps: of the four groups ahead those that had ended are in the spool, and the others
    are played by the policy of then; each is trained on once."""
    first = overlapped(tmp_path, steps=9)
    stuck = Stuck(lambda group: group.prompt.uid in ("p6", "p7"))
    first.loop.stage = Bench(tmp_path, grader=stuck).loop.stage
    first.observer.on_step = lambda row: os.kill(os.getpid(), signal.SIGINT) if row["step"] == 2 else None
    finished = first.run()
    assert finished.why is Finish.INTERRUPTED and finished.state.step == 2
    assert [one.place for one in finished.state.ahead] == [4, 5, 6, 7]
    again = overlapped(tmp_path, steps=9, **as_saved(first))
    again.run()
    assert sorted(trained_on(again)) == sorted(f"p{n}" for n in range(18))
    assert caplog.text.count("does not have 2, which policy 1 sampled; policy 2 plays") == 1
    assert again.rows[0]["groups/played_anew"] == 2 and again.rows[0]["rollout/from_spool"] == 2


def test_a_policy_that_is_not_there_yet_has_sampled_nothing(tmp_path: Path) -> None:
    """Killed in step 5 with the checkpoint of step 2: what was on its way then has ended since under policies
    3 and 4, and is in the spool. The resumed run trains on it at version 2, where its tokens would be younger
    than the trainer; so it is played anew."""
    killed = overlapped(tmp_path, steps=9, checkpoint_every=2, grader=Slow(dies=14))
    with pytest.raises(Killed):
        killed.run()
    saved, logits = killed.saved[0]
    state = LoopState(**saved)
    again = overlapped(tmp_path, steps=9, state=state, logits=logits)
    assert again.run().why is Finish.DONE
    assert all(min(ages) >= 0 for ages in again.trainer.ages)


def test_more_staleness_or_less_when_a_run_goes_on(tmp_path: Path) -> None:
    """What the recipe of now finds too old is played anew, and in the places that there are."""
    first = overlapped(tmp_path, steps=12, staleness=4)
    first.observer.on_step = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 4 else None
    assert first.run().why is Finish.TERMINATED
    saved, logits = first.saved[-1]
    for number, changed in enumerate(
        ({"staleness": 0}, {"staleness": 1}, {"prompts_per_step": 1}, {"overlap": False, "staleness": 1})
    ):
        path = tmp_path.parent / f"{tmp_path.name}-{number}"
        again = overlapped(
            path, **{"steps": 12, "staleness": 4, **changed}, state=LoopState(**saved), logits=logits
        )
        (path / "inflight.jsonl.zst").write_bytes((tmp_path / "inflight.jsonl.zst").read_bytes())
        assert again.run().why is Finish.DONE
        adds_up(again.loop.state)
        assert max(max(ages) for ages in again.trainer.ages) <= again.loop.plan.recipe.pipeline.staleness


def test_sigterm_drains_what_runs_into_the_spool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing new is admitted, the step ends, and what is on its way may end too: the resumed run plays none
    of it again."""
    bench = overlapped(tmp_path, steps=9, grader=Slow(), grace_s=10.0)
    bench.observer.on_step = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 3 else None
    finished = bench.run()
    assert (finished.why, finished.state.step) == (Finish.TERMINATED, 3)
    assert len(finished.state.ahead) == 4
    again = overlapped(tmp_path, steps=9, **as_saved(bench))
    again.run()
    assert sum(row["rollout/from_spool"] for row in again.rows) == 4
    assert "anew" not in caplog.text
    assert sorted(trained_on(again)) == sorted(f"p{n}" for n in range(18))


def test_a_drain_ends_with_the_grace_period(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck(lambda group: int(group.prompt.uid[1:]) >= 4, Lesson())
    bench = overlapped(tmp_path, steps=9, grader=stuck, grace_s=0.05, eval_at_start=False)
    learn = bench.trainer.step

    def learns(batch: Batch) -> StepReport:
        if len(bench.rows) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.1)
        return learn(batch)

    bench.trainer.step = learns  # type: ignore[method-assign]
    finished = bench.run()
    assert (finished.why, finished.state.step, bench.saved[-1][0]["step"]) == (Finish.TERMINATED, 2, 2)
    assert "what followed step 2 was abandoned" in caplog.messages[-1]


def test_a_second_ctrl_c_does_not_wait_for_the_trainer(tmp_path: Path) -> None:
    bench = overlapped(tmp_path, steps=9, checkpoint_every=1, grader=Lesson())
    learn, let_go = bench.trainer.step, threading.Event()

    def learns(batch: Batch) -> StepReport:
        if len(bench.rows) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            while bench.loop._signals.received is None:
                let_go.wait(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            let_go.wait(20)
        return learn(batch)

    bench.trainer.step = learns  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    let_go.set()
    assert bench.saved[-1][0]["step"] == 2 and len(list(bench.folder.metrics.rows())) == 2


def test_a_wait_without_progress_ends_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    bench = overlapped(tmp_path, steps=9, grader=Stuck(lambda group: group.prompt.uid == "p3"), watch_s=0.1)
    with pytest.raises(Stalled, match=r"waits for its groups; on the way .*: p3 \(grading for"):
        bench.run()
    assert bench.saved[-1][0]["step"] == len(bench.rows) > 0  # and can be resumed


def test_tokens_are_progress(tmp_path: Path) -> None:
    """A group that takes longer than the limit ends nothing while its engine samples."""

    class Long(IsRight):
        async def grade(self, group: Group) -> list[Reward]:
            await asyncio.sleep(0.25 if group.prompt.uid == "p3" else 0)
            return await super().grade(group)

    clock = iter(range(10**9))
    bench = overlapped(tmp_path, steps=2, grader=Long(), watch_s=0.1)
    bench.workers.progress = lambda: next(clock)
    assert bench.run().why is Finish.DONE


def test_a_trainer_that_hangs_is_named_and_not_saved(tmp_path: Path) -> None:
    bench = overlapped(tmp_path, steps=9, watch_s=0.1, grader=Lesson())
    let_go = threading.Event()

    def hangs(batch: Batch) -> StepReport:
        let_go.wait(20)
        return StepReport(metrics={})

    bench.trainer.step = hangs  # type: ignore[method-assign]
    with pytest.raises(Stalled, match="step 1 is training"):
        bench.run()
    let_go.set()
    assert not bench.saved


def test_a_batch_that_is_too_old_is_refused_by_name(tmp_path: Path) -> None:
    """The feed does not let it happen; if it did, nothing would be learned from it."""
    bench = overlapped(tmp_path, steps=9, staleness=3, grader=Lesson())

    def on_step(row: Any) -> None:  # behind the back of the feed
        bench.loop.plan = plan(staleness=0, steps=9, overlap=True)

    bench.observer.on_step = on_step
    with pytest.raises(
        StalenessViolation, match=r"tokens that are \[1\] versions old where pipeline\.staleness is 0"
    ):
        bench.run()
    assert bench.saved[-1][0]["step"] == 1 and len(bench.trainer.ages) == 1


def test_with_workers_lockstep_trains_in_a_thread_and_is_the_same(tmp_path: Path) -> None:
    """A pool hears its workers in the event loop of the run: were it blocked by the trainer, they would seem
    to be silent."""
    plain, other = (Bench(tmp_path / name, steps=4, staleness=1) for name in ("plain", "workers"))
    pools = {"samplers": 1, "trainer": 1}
    other.loop.ledger = Ledger(folder=other.folder, terms=Terms(devices=2, pools=pools))
    threads, learn = set[int](), other.trainer.step

    def learns(batch: Batch) -> StepReport:
        threads.add(threading.get_ident())
        return learn(batch)

    other.trainer.step = learns  # type: ignore[method-assign]
    for bench in (plain, other):
        bench.run()
    assert threading.get_ident() not in threads
    assert other.trainer.logits.tobytes() == plain.trainer.logits.tobytes()


def test_sampling_goes_on_while_the_trainer_learns(tmp_path: Path) -> None:
    """The trainer waits until a group has ended that was admitted when its batch had been taken."""
    ended = threading.Event()

    class Tells(Lesson):
        async def grade(self, group: Group) -> list[Reward]:
            if group.prompt.uid == "p5":
                ended.set()
            return await super().grade(group)

    bench = overlapped(tmp_path, steps=3, staleness=1, grader=Tells())

    class Waits(BanditTrainer):
        def step(self, batch: Batch) -> StepReport:
            if len(self.ages) == 1:  # its groups are p2 and p3; p4 and p5 were admitted after the first step
                assert ended.wait(10)
            return super().step(batch)

    bench.loop.trainer = bench.trainer = Waits(lr=0.5)
    assert bench.run().why is Finish.DONE


def test_all_weights_are_not_trained_under_the_sampler_that_reads_them() -> None:
    """In one process they are the same tensors. Adapters are copied when they are published."""
    overlap = {"overlap": True, "staleness": 1}
    full = Recipe.parse({"pipeline": overlap, "adapter": {"kind": "full"}, "model": {"dtype": "float32"}})
    with pytest.raises(
        ValueError, match=r"pipeline\.overlap is true with adapter\.kind \"full\" in one process"
    ):
        check_recipe(full)
    check_recipe(Recipe.parse({"pipeline": overlap}))
    check_recipe(Recipe.parse({"adapter": {"kind": "full"}, "model": {"dtype": "float32"}}))
