"""The spool gives back what it was given, byte for byte, and only to those who ask the same question."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loop import a_spool

from ostinato.observe.ledger import Ledger
from ostinato.pipeline.spool import Spool, address, newest_version
from ostinato.rollout.rollout import RolloutContext, RolloutRequest
from ostinato.run import JsonlZst, RunFolder
from ostinato.types import (
    NO_EXPERT,
    Completion,
    Group,
    Prompt,
    Reward,
    Sampling,
    Stop,
    Support,
    Trajectory,
    Turn,
)

PROMPT = Prompt(
    uid="p", text="p", columns={"answer": object()}
)  # columns need not be JSON: they are not stored


def ask(step: int = 1) -> RolloutRequest:
    return RolloutRequest(prompt=PROMPT, seed=(0, step, 5), group_size=2, step=step)


def routes(rng: np.random.Generator, rows: int) -> np.ndarray:
    ids = rng.integers(0, 99, (rows, 2, 3)).astype(np.int8)
    ids[rng.random(rows) < 0.5] = NO_EXPERT
    return ids


def group(rng: np.random.Generator, step: int, reward: float | None, routed: bool) -> Group:
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
    turn = Turn(context=rng.integers(0, 99, 2).astype(np.int32), completion=completion)
    verdict = Reward(value=reward, reason="because", parts={"exact": reward, "other": None})
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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), reward=st.none() | st.floats(-1e9, 1e9), routed=st.booleans())
def test_round_trip(tmp_path_factory, seed: int, reward: float | None, routed: bool) -> None:
    path = tmp_path_factory.mktemp("spool") / "inflight.jsonl.zst"
    played = group(np.random.default_rng(seed), 1, reward, routed)
    a_spool(path).put("here", played)
    found = a_spool(path)
    taken = found.take("here", ask(), 7.0)
    assert taken is not None and taken.spooled and (taken.generated_at, taken.graded_at) == (7.0, 7.0)
    assert same(taken.group, played)
    assert found.take("here", ask(), 7.0) is None  # given once
    assert a_spool(path).take("there", ask(), 0.0) is None


def test_a_checkpoint_forgets_what_it_covers(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    spool, rng = a_spool(path), np.random.default_rng(0)
    for step in (1, 2, 3):
        spool.put(f"step {step}", group(rng, step, 1.0, False))
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
        spool.put(f"step {step}", group(rng, step, 1.0, False))
    again = a_spool(path)
    again.reject(["step 2"])
    for found in (again, a_spool(path)):
        taken = [found.take(f"step {step}", ask(step), 0.0) is not None for step in (1, 2, 3)]
        assert taken == [True, False, True]


def test_a_group_that_a_later_policy_went_on_with_is_not_given_back(tmp_path: Path) -> None:
    """It began under policy 2 and has tokens of 3. A run that was resumed at version 2 would train on tokens
    that are younger than its trainer, of a policy that it may never have."""
    path = tmp_path / "inflight.jsonl.zst"
    played = group(np.random.default_rng(3), 1, 1.0, True)
    newest = newest_version(played)
    assert newest == max(turn.completion.versions.max() for turn in played.trajectories[0].turns) > 0
    a_spool(path).put("here", played)
    assert a_spool(path).take("here", ask(), 0.0, newest - 1) is None
    assert a_spool(path).take("here", ask(), 0.0, newest) is not None


def test_a_group_is_kept_for_as_long_as_a_step_may_train_on_it(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    a_spool(path).put("here", group(np.random.default_rng(0), 1, 1.0, False), until=4)
    for step, there in ((3, True), (4, False)):
        spool = Spool(path, Ledger(folder=RunFolder(tmp_path)), step=step)
        assert (spool.take("here", ask(), 0.0) is not None) is there
        spool.forget(step)
    assert not list(JsonlZst(path).rows())


def test_an_end_torn_by_a_kill_costs_one_group(tmp_path: Path) -> None:
    path = tmp_path / "inflight.jsonl.zst"
    spool, rng = a_spool(path), np.random.default_rng(0)
    spool.put("first", group(rng, 1, 1.0, True))
    spool.put("second", group(rng, 1, 1.0, True))
    path.write_bytes(path.read_bytes()[:-5])
    torn = a_spool(path)
    torn.put("third", group(rng, 1, 1.0, True))
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
    base = address(ask(), stage, 0)
    others = [
        address(replace(ask(), seed=(1, 1, 5)), stage, 0),
        address(replace(ask(), group_size=3), stage, 0),
        address(replace(ask(), prompt=Prompt(uid="q", text="q")), stage, 0),
        address(ask(), replace(stage, sampling=replace(sampling, temperature=0.5)), 0),
        address(ask(), replace(stage, sampling=replace(sampling, stop_tokens=(1,))), 0),
        address(ask(), replace(stage, context_limit=65), 0),
        address(ask(), replace(stage, identity="int8"), 0),
        address(ask(), stage, 1),
    ]
    assert len({base, *others}) == len(others) + 1
