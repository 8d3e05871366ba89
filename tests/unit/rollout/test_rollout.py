"""Playing: siblings together, turns one after the other, failures as data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from reference.fake_engine import FakeEngine, scripted

from ostinato.rollout.rollout import (
    Drop,
    RolloutContext,
    RolloutRequest,
    find_drop_reason,
    list_verdicts,
    parse_fault_name,
    play_episode,
    play_groups,
    rollout_group,
)
from ostinato.types import Completion, Group, Prompt, Request, Reward, Sampling, Stop

END = 9
PROMPT = Prompt(uid="p", text="p")
SAMPLING = Sampling(max_tokens=4, stop_tokens=(END,))


class Talk:
    """Says ``replies`` one after the other; a reply that is an exception is raised."""

    def __init__(self, start: Sequence[int], replies: Sequence[Sequence[int] | Exception] = ()) -> None:
        self._start, self._replies = start, list(replies)

    def start(self) -> np.ndarray:
        return np.array(self._start, np.int32)

    async def step(self, completion: Completion) -> np.ndarray | None:
        if not self._replies:
            return None
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return np.array(reply, np.int32)


class CountTokens:
    """Reward: the number of sampled tokens of the last answer."""

    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=float(len(t.turns[-1].completion.tokens))) for t in group.trajectories]


class Rewards:
    def __init__(self, *values: float | Exception | None) -> None:
        self._values = values

    async def grade(self, group: Group) -> list[Reward]:
        for value in self._values:
            if isinstance(value, Exception):
                raise value
        return [Reward(value=v, reason="" if v is not None else "mute") for v in self._values]  # type: ignore[arg-type]


def answers(*lengths: int) -> FakeEngine:
    """Sibling k answers with ``lengths[k]`` tokens, the last of which is END."""
    return FakeEngine(scripted(lambda request: [1] * (lengths[request.seed[-1]] - 1) + [END], 10))


def stage(
    engine: Any, env: Callable[[Prompt], Any] | None = None, grader: Any = None, **options: Any
) -> RolloutContext:
    return RolloutContext(
        engine=engine,
        env=env or (lambda prompt: Talk([5, 6])),
        grader=grader or CountTokens(),
        **{"sampling": SAMPLING, "context_limit": 64} | options,
    )


def ask(group_size: int, index: int = 0) -> RolloutRequest:
    return RolloutRequest(prompt=PROMPT, seed=(0, 1, index), group_size=group_size, step=1)


def play_one(stage: RolloutContext, group_size: int) -> Group:
    return asyncio.run(rollout_group(stage, ask(group_size))).group


def test_siblings_ask_in_one_call_and_keep_their_order() -> None:
    engine = answers(4, 2, 3)
    group = play_one(stage(engine), 3)
    assert [len(call) for call in engine.calls] == [3]
    assert [request.seed for request in engine.calls[0]] == [(0, 1, 0, 0), (0, 1, 0, 1), (0, 1, 0, 2)]
    assert {request.uid for request in engine.calls[0]} == {PROMPT.uid}  # whose history may be drafted from
    assert [trajectory.seed[-1] for trajectory in group.trajectories] == [0, 1, 2]
    assert list_verdicts(group).tolist() == [4, 2, 3]
    assert group.step == 1 and find_drop_reason(group, 2) is None


def test_a_turn_knows_whether_its_answer_ends_inside_a_thought() -> None:
    """Where the template opens the thought no tag is in the answer: one that was cut off looked finished."""
    opening, closing = 5, 1

    def ends_in_thought(context: np.ndarray, answer: np.ndarray) -> bool:
        return context[-1] == opening and closing not in answer

    group = play_one(
        stage(answers(1, 3), lambda prompt: Talk([6, opening]), ends_in_thought=ends_in_thought), 2
    )
    assert [trajectory.turns[-1].in_thought for trajectory in group.trajectories] == [True, False]


def test_later_turns_carry_the_whole_history_as_it_was() -> None:
    engine = answers(2, 3)
    group = play_one(stage(engine, lambda prompt: Talk([5, 6], [[7], [8, 8]])), 2)
    assert [len(call) for call in engine.calls] == [2, 1, 1, 1, 1]
    for trajectory in group.trajectories:
        requested = [call[0] for call in engine.calls[1:] if call[0].seed == trajectory.seed]
        answer = trajectory.turns[0].completion.tokens.tolist()
        assert requested[0].tokens.tolist() == [5, 6, *answer, 7]
        assert requested[1].tokens.tolist() == [5, 6, *answer, 7, *answer, 8, 8]
        assert [turn.context.tolist() for turn in trajectory.turns] == [[5, 6], [7], [8, 8]]
        assert trajectory.stop is Stop.EOS


def test_an_episode_alone_is_the_episode_in_its_group() -> None:
    """The twin: siblings share a call, never a token of noise."""
    uniform = lambda adapters, request, answer: np.zeros(10)  # noqa: E731
    setting = stage(FakeEngine(uniform), lambda prompt: Talk([5, 6], [[7], [8]]))
    group = play_one(setting, 4)
    for member in group.trajectories:
        alone = asyncio.run(play_episode(setting, PROMPT, member.seed))
        assert [t.completion.tokens.tolist() for t in alone.turns] == [
            t.completion.tokens.tolist() for t in member.turns
        ]
        assert alone.stop is member.stop
    assert len({str([t.completion.tokens for t in member.turns]) for member in group.trajectories}) > 1


def test_a_broken_episode_is_excluded_by_name_and_its_siblings_are_graded() -> None:
    envs = iter([Talk([5]), Talk([5], [RuntimeError("tool on fire")]), Talk([5])])
    group = play_one(stage(answers(2, 2, 3), lambda prompt: next(envs)), 3)
    broken = group.trajectories[1]
    assert (broken.stop, broken.error, broken.reward) == (Stop.ERROR, "env: RuntimeError: tool on fire", None)
    assert len(broken.turns) == 1  # what was sampled is kept: it was paid for
    np.testing.assert_array_equal(list_verdicts(group), [2, np.nan, 3])
    assert find_drop_reason(group, 2) is None and find_drop_reason(group, 3) is Drop.TOO_FEW_EPISODES


class Scored(Talk):
    """Gives a reward of its own, and counts how often it is closed."""

    closed = 0
    reward = 2.5

    def close(self) -> None:
        Scored.closed += 1


def test_an_environments_own_reward_travels_and_every_episode_is_closed() -> None:
    broken = lambda prompt: Scored([5, 6], [RuntimeError("broken")])  # noqa: E731
    group = play_one(stage(answers(2, 3), broken), 2)
    assert [t.env_reward for t in group.trajectories] == [2.5, 2.5] and Scored.closed == 2
    assert all(parse_fault_name(t.error) == "env" for t in group.trajectories)


def test_an_env_that_cannot_start_is_an_error_of_the_episode() -> None:
    def env(prompt: Prompt) -> Talk:
        raise KeyError("answer")

    engine = answers(2)
    group = play_one(stage(engine, env), 2)
    assert engine.calls == []
    assert {parse_fault_name(t.error) for t in group.trajectories} == {"env"}
    assert find_drop_reason(group, 2) is Drop.TOO_FEW_EPISODES


def test_a_prompt_beyond_the_context_is_named_and_never_asked() -> None:
    engine = answers(2, 2)
    group = play_one(stage(engine, lambda prompt: Talk(range(8)), context_limit=8), 2)
    assert engine.calls == []
    assert find_drop_reason(group, 2) is Drop.PROMPT_TOO_LONG
    assert group.trajectories[0].error.startswith("prompt_too_long: 8 tokens leave no room")


def test_a_context_used_up_by_later_turns_is_a_truncation() -> None:
    engine = answers(2, 2)
    group = play_one(stage(engine, lambda prompt: Talk([5, 6], [[7] * 4, [7] * 4]), context_limit=10), 2)
    trajectory = group.trajectories[0]
    assert len(trajectory.turns) == 2 and trajectory.stop is Stop.LENGTH and trajectory.error == ""
    assert engine.calls[0][0].sampling.max_tokens == 4
    assert engine.calls[1][0].sampling.max_tokens == 2  # 2 + 2 + 4 of 10 are used


def test_a_truncated_answer_gets_no_reply() -> None:
    engine = FakeEngine(scripted(lambda request: [1] * 9, 10))
    group = play_one(stage(engine, lambda prompt: Talk([5], [[7]])), 2)
    assert [len(t.turns) for t in group.trajectories] == [1, 1]
    assert {t.stop for t in group.trajectories} == {Stop.LENGTH}


@pytest.mark.parametrize(
    ("grader", "fault"),
    [
        (Rewards(ZeroDivisionError("oops")), "grader"),
        (Rewards(1.0), "grader"),  # one verdict for two
        (Rewards(float("nan"), float("inf")), "reward_not_finite"),
        (Rewards(None, None), "mute"),
    ],
)
def test_a_fault_of_the_grader_is_no_verdict_and_never_a_zero(grader: Rewards, fault: str) -> None:
    group = play_one(stage(answers(2, 2), grader=grader), 2)
    rewards = [trajectory.reward for trajectory in group.trajectories]
    assert all(reward is not None and reward.value is None for reward in rewards)
    assert {parse_fault_name(reward.reason) for reward in rewards if reward} == {fault}
    assert find_drop_reason(group, 1) is Drop.TOO_FEW_VERDICTS


def test_groups_come_back_in_order_and_are_announced_as_they_finish() -> None:
    """Grading overlaps: the short group is judged while the long one is still waiting for its verdict."""

    class SlowFirst:
        async def grade(self, group: Group) -> list[Reward]:
            await asyncio.sleep(0.03 if group.trajectories[0].seed[2] == 0 else 0)
            return [Reward(value=1.0)] * len(group.trajectories)

    seen: list[int] = []
    played = asyncio.run(
        play_groups(
            stage(answers(2, 2), grader=SlowFirst()),
            [ask(2, i) for i in range(3)],
            lambda i, p: seen.append(i),
        )
    )
    assert [p.group.trajectories[0].seed[2] for p in played] == [0, 1, 2]
    assert seen[-1] == 0 and sorted(seen) == [0, 1, 2]
    assert played[0].graded_at - played[0].generated_at >= 0.02
    assert all(p.generated_at <= p.graded_at for p in played)


def test_an_engine_that_breaks_ends_the_call_and_leaves_nothing_running() -> None:
    class Dies:
        def publish(self, adapters: Any, version: int) -> None: ...

        async def generate(self, requests: Sequence[Request]):
            await asyncio.sleep(0 if requests[0].seed[2] else 60)
            raise RuntimeError("lost the device")
            yield

    async def attempt() -> set[Any]:
        with pytest.raises(RuntimeError, match="lost the device"):
            await play_groups(stage(Dies()), [ask(2, i) for i in range(3)])
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(attempt()) == set()


def test_an_engine_that_forgets_a_request_is_an_error_not_a_hang() -> None:
    class Forgets:
        def publish(self, adapters: Any, version: int) -> None: ...

        async def generate(self, requests: Sequence[Request]):
            return
            yield

    with pytest.raises(RuntimeError, match="0 completions for 2 requests"):
        play_one(stage(Forgets()), 2)
