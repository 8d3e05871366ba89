"""Who comes next and who left for good; batches kept to grow old; what a kill leaves in the spool."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion, episode, group_of
from reference.fake_engine import FakeEngine
from small_loop import (
    BanditTrainer,
    Bench,
    Dies,
    IsRight,
    Killed,
    Stream,
    a_spool,
    as_saved,
    bandit,
    deterministic,
    send,
)

from ostinato.algo.pack import pack
from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.env.tasks import Rows
from ostinato.observe.ledger import Ledger
from ostinato.pipeline.buffer import find_places, find_solved
from ostinato.pipeline.credit import assign_credit
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.pipeline.spool import Spool, find_newest_version, make_address
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play_groups
from ostinato.run import JsonlZst, RunFolder
from ostinato.types import (
    NO_EXPERT,
    Batch,
    Completion,
    Group,
    Prompt,
    Reward,
    Sampling,
    StepReport,
    Stop,
    Support,
    Trajectory,
    Turn,
)


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
        requests = [
            RolloutRequest(prompt=Stream().prompt(i), seed=(0, step, i), group_size=8, step=step)
            for i in range(4 * step - 4, 4 * step)
        ]
        groups = [item.group for item in asyncio.run(play_groups(stage, requests))]
        credit = assign_credit(groups, bench.loop.algorithm, min_verdicts=2, answer_tokens=2)
        if credit.samples:
            trainer.step(pack(credit.samples, credit.weights, tokens_per_microbatch=64, version=step - 1))
    assert trainer.logits.tobytes() == bench.trainer.logits.tobytes()


@pytest.mark.parametrize(("staleness", "dies_at"), [(0, 4), (0, 6), (2, 1), (2, 4), (2, 6), (2, 8)])
def test_a_stale_run_that_was_killed_is_the_run_that_was_not(
    tmp_path: Path, staleness: int, dies_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The policies that sampled the queue are gone; their groups are in the spool, their rounds in the
    checkpoint, and who had left the stream when each was admitted is known again."""
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


def test_the_older_checkpoint_gives_the_same_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_lost_queue_is_played_anew_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    reported = "does not have 8, which policies 2 to 3 sampled; policy 4 plays them anew"
    assert caplog.text.count(reported) == 1
    assert [row.get("groups/played_anew") for row in resumed.rows] == [8, None, None, None, None]
    assert resumed.trainer.ages == [{0}, {1}, {2}, {2}, {2}]
    assert resumed.loop.state.cursor == 36  # no prompt is lost


def test_a_refused_round_is_played_anew_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
            raise Misaligned("foreign", Diagnosis(cause=Cause.STALE, fixed_overlap=0.5))
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


# ---- the stream of prompts: who is solved leaves for good, and no other prompt changes


PROMPTS = 7
NAMES = [f"p{n}" for n in range(PROMPTS)]


def rows(seed: int) -> Rows:
    return Rows([Prompt(uid=name, text="?") for name in NAMES], seed=seed)


def places_slow(tasks: Rows, cursor: int, count: int, retired: Sequence[str]) -> list[int]:
    """The twin: write out many epochs, strike out who has left, and read on from the cursor."""
    epochs = 2 + cursor // PROMPTS + count * PROMPTS
    written = [(index, tasks.prompt(index).uid) for index in range(epochs * PROMPTS)]
    return [index for index, uid in written if index >= cursor and uid not in retired][:count]


gone = st.lists(st.sampled_from(NAMES), unique=True, max_size=PROMPTS)


@given(seed=st.integers(0, 9), cursor=st.integers(0, 30), count=st.integers(1, 6), retired=gone)
def test_places_against_the_slow_twin(seed: int, cursor: int, count: int, retired: list[str]) -> None:
    assert find_places(rows(seed), cursor, count, retired) == places_slow(rows(seed), cursor, count, retired)


@given(seed=st.integers(0, 9), count=st.integers(1, 5), leaving=st.lists(gone, max_size=6))
def test_who_left_never_comes_again_and_the_others_keep_their_order(
    seed: int, count: int, leaving: list[list[str]]
) -> None:
    """Steps of ``count`` prompts, after each of which some leave; all that is carried is cursor and names."""
    tasks, cursor, retired, walked = rows(seed), 0, [], []
    for names in leaving:
        step = find_places(tasks, cursor, count, retired)
        if not step:
            break
        assert len(step) == count and not {tasks.prompt(index).uid for index in step} & set(retired)
        walked += step
        cursor = step[-1] + 1
        retired += [name for name in names if name not in retired]
    assert walked == sorted(set(walked))  # no place twice: no prompt twice in an epoch
    passed = set(range(cursor)) - set(walked)
    assert {tasks.prompt(index).uid for index in passed} <= set(retired)


def test_nobody_left_is_an_empty_step() -> None:
    """From the second place of an epoch to the last but one of the next, more places than an epoch has may be
    of prompts that left, though one is there yet: only twice as many prove that nothing is."""
    seed, late = next(  # first in epoch 0 and last in epoch 1
        (seed, first)
        for seed in range(100)
        if (first := rows(seed).prompt(0).uid) == rows(seed).prompt(2 * PROMPTS - 1).uid
    )
    others = [name for name in NAMES if name != late]
    assert find_places(rows(seed), 1, 1, others) == [2 * PROMPTS - 1]
    assert find_places(rows(seed), 3, 2, NAMES) == []


def group(uid: str, rewards: Sequence[float | None]) -> Group:
    return group_of(*(episode(completion(1), reward=value) for value in rewards), uid=uid)


@pytest.mark.parametrize(
    ("rewards", "leaves"),
    [
        ([1.0] * 9 + [-1.0], True),  # 0.9 is enough, in any count
        ([1.0] * 18 + [0.0] * 2, True),
        ([1.0] * 14 + [0.0] * 2, False),  # 0.875
        ([1.0, 1.0, None], True),  # of those with a verdict
        ([1.0, None, None], False),  # one is no rate
        ([0.5, 0.5], False),
        ([], False),
    ],
)
def test_nine_of_ten_are_solved_for_good(rewards: list[float | None], leaves: bool) -> None:
    assert find_solved([group("a", rewards)], share=0.9, solved_at=1.0) == ("a",) * leaves


def test_each_leaves_once_and_in_order() -> None:
    groups = [group(uid, [1.0, 1.0]) for uid in "bacb"]
    assert find_solved(groups, share=0.9, solved_at=1.0, retired={"c"}) == ("b", "a")


# ---- the spool gives back what it was given, byte for byte, and only to those who ask the same question


PROMPT = Prompt(
    uid="p", text="p", columns={"answer": object()}
)  # columns need not be JSON: they are not stored


def ask(step: int = 1) -> RolloutRequest:
    return RolloutRequest(prompt=PROMPT, seed=(0, step, 5), group_size=2, step=step)


def routes(rng: np.random.Generator, rows: int) -> np.ndarray:
    ids = rng.integers(0, 99, (rows, 2, 3)).astype(np.int8)
    ids[rng.random(rows) < 0.5] = NO_EXPERT
    return ids


def spooled(rng: np.random.Generator, step: int, reward: float | None, routed: bool) -> Group:
    length = int(rng.integers(0, 4))
    completion = Completion(
        tokens=rng.integers(0, 2**31 - 1, length).astype(np.int32),
        logprobs=rng.normal(size=length).astype(np.float32),
        edges=rng.uniform(size=length).astype(np.float32) if routed else None,
        versions=rng.integers(0, 9, length).astype(np.int32),
        stop=Stop.LENGTH,
        text="ä\n\x00",
        support=Support.of([np.arange(n, dtype=np.int32) for n in range(length)]) if length % 2 else None,
        experts=routes(rng, length) if routed else None,
        prompt_experts=routes(rng, 2) if routed else None,
        drafted=5,
        accepted=2,
        passes=3,
        cached_tokens=1,
    )
    context = rng.integers(0, 99, 2).astype(np.int32)
    turn = Turn(context=context, completion=completion, in_thought=routed)
    parts, metrics = {"exact": reward, "other": None}, {"words": 2.5} if routed else {}
    verdict = Reward(value=reward, reason="because", parts=parts, metrics=metrics)
    played = Trajectory(turns=(turn, turn), stop=Stop.EOS, seed=(0, step, 5, 0), reward=verdict)
    failed = Trajectory(turns=(), stop=Stop.ERROR, seed=(0, step, 5, 1), error="env: no")
    return Group(prompt=PROMPT, trajectories=(played, failed), step=step)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Group | Trajectory | Turn | Completion | Support):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


@given(seed=st.integers(0, 999), reward=st.none() | st.floats(-1e9, 1e9), routed=st.booleans())
def test_round_trip(tmp_path_factory, seed: int, reward: float | None, routed: bool) -> None:
    path = tmp_path_factory.mktemp("spool") / "inflight.jsonl.zst"
    played = spooled(np.random.default_rng(seed), 1, reward, routed)
    a_spool(path).put("here", played)
    found = a_spool(path)
    train_batch = found.take("here", ask(), 7.0)
    assert (
        train_batch is not None
        and train_batch.spooled
        and (train_batch.generated_at, train_batch.graded_at) == (7.0, 7.0)
    )
    assert same(train_batch.group, played)
    assert found.take("here", ask(), 7.0) is None  # given once
    assert a_spool(path).take("there", ask(), 0.0) is None


def test_a_checkpoint_forgets_what_it_covers(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    spool, rng = a_spool(path), np.random.default_rng(0)
    for step in (1, 2, 3):
        spool.put(f"step {step}", spooled(rng, step, 1.0, False))
    again = Spool(path, Ledger(folder=RunFolder(tmp_path)), step=1)  # has gone on from the checkpoint of 1
    assert [again.take(f"step {step}", ask(step), 0.0) is not None for step in (1, 2)] == [False, True]
    spool.forget(2)
    assert [a_spool(path).take(f"step {step}", ask(step), 0.0) is not None for step in (1, 2, 3)] == [
        False,
        False,
        True,
    ]


def test_what_the_trainer_refused_is_dropped_alone(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    spool, rng = a_spool(path), np.random.default_rng(0)
    for step in (1, 2, 3):
        spool.put(f"step {step}", spooled(rng, step, 1.0, False))
    again = a_spool(path)
    again.reject(["step 2"])
    for found in (again, a_spool(path)):
        train_batch = [found.take(f"step {step}", ask(step), 0.0) is not None for step in (1, 2, 3)]
        assert train_batch == [True, False, True]


def test_a_group_that_a_later_policy_went_on_with_is_not_given_back(tmp_path: Path) -> None:
    """It began under policy 2 and has tokens of 3. A run that was resumed at version 2 would train on tokens
    that are younger than its trainer, of a policy that it may never have."""
    path = tmp_path / "inflight.jsonl.zst"
    played = spooled(np.random.default_rng(3), 1, 1.0, True)
    newest = find_newest_version(played)
    assert newest == max(turn.completion.versions.max() for turn in played.trajectories[0].turns) > 0
    a_spool(path).put("here", played)
    assert a_spool(path).take("here", ask(), 0.0, newest - 1) is None
    assert a_spool(path).take("here", ask(), 0.0, newest) is not None


def test_a_group_is_kept_for_as_long_as_a_step_may_train_on_it(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    a_spool(path).put("here", spooled(np.random.default_rng(0), 1, 1.0, False), last_step=4)
    for step, there in ((3, True), (4, False)):
        spool = Spool(path, Ledger(folder=RunFolder(tmp_path)), step=step)
        assert (spool.take("here", ask(), 0.0) is not None) is there
        spool.forget(step)
    assert not list(JsonlZst(path).rows())


def test_an_end_torn_by_a_kill_costs_one_group(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    spool, rng = a_spool(path), np.random.default_rng(0)
    spool.put("first", spooled(rng, 1, 1.0, True))
    spool.put("second", spooled(rng, 1, 1.0, True))
    path.write_bytes(path.read_bytes()[:-5])
    torn = a_spool(path)
    torn.put("third", spooled(rng, 1, 1.0, True))
    found = a_spool(path)
    assert [found.take(name, ask(), 0.0) is not None for name in ("first", "second", "third")] == [
        True,
        False,
        True,
    ]


def test_the_address_names_everything_that_a_group_depends_on() -> None:
    """Whose weights sampled was not in it: a run resumed with an int8 engine took up bf16 rollouts."""
    sampling, unused = Sampling(max_tokens=4), cast(Any, None)
    stage = RolloutContext(
        engine=unused, env=unused, grader=unused, sampling=sampling, context_limit=64, identity="bf16"
    )
    base = make_address(ask(), stage, 0)
    others = [
        make_address(replace(ask(), seed=(1, 1, 5)), stage, 0),
        make_address(replace(ask(), group_size=3), stage, 0),
        make_address(replace(ask(), prompt=Prompt(uid="q", text="q")), stage, 0),
        make_address(ask(), replace(stage, sampling=replace(sampling, temperature=0.5)), 0),
        make_address(ask(), replace(stage, sampling=replace(sampling, stop_tokens=(1,))), 0),
        make_address(ask(), replace(stage, context_limit=65), 0),
        make_address(ask(), replace(stage, identity="int8"), 0),
        make_address(ask(), stage, 1),
    ]
    assert len({base, *others}) == len(others) + 1
