"""Plays episodes, and grades siblings as soon as the last of them has ended.

    play            a task per prompt, all at once: the engine batches the requests
      rollout_group    G episodes; their first turns are a single call, so the engine computes their prompt
      once;
                    every later turn is a call of its own, made as soon as the environment has answered
        grade       while other groups are still being generated

Failures are data. An episode that breaks ends with ``Stop.ERROR`` and a sentence, a grader that breaks gives
verdicts of None with a reason, and the group carries both: ``health`` counts them, and ``find_drop_reason``
decides whether enough is left to learn from. A sentence begins with its kind ("env: ...", "grader: ..."),
under which it is counted. Only an error of the engine, or the loss of the grader, is raised.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from ostinato.failure import Lost
from ostinato.protocols import Engine, Env, Grader
from ostinato.rollout.interrupt import Interruption
from ostinato.types import (
    Completion,
    Group,
    NewRow,
    Prompt,
    Request,
    Reward,
    Sampling,
    Stop,
    Trajectory,
    Turn,
)

END_S = 10.0  # limit for cancelled tasks to end
FAILED = (Stop.ERROR, Stop.ABORT)  # ends after which a trajectory is neither graded nor trained on


class Fault(StrEnum):
    """The kinds of failure that this module reports; the first word of the sentence."""

    PROMPT_TOO_LONG = "prompt_too_long"
    ENV = "env"
    ENGINE = "engine"
    GRADER = "grader"
    NOT_FINITE = "reward_not_finite"


class Drop(StrEnum):
    """The reasons why a whole group is not trained on."""

    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_FEW_EPISODES = "too_few_episodes"  # the others ended in an error
    TOO_FEW_VERDICTS = "too_few_verdicts"
    ZERO_VARIANCE = "zero_variance"  # decided by the loop, where the algorithm drops such groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The engine, environments, grader and limits with which episodes are played."""

    engine: Engine
    env: Callable[[Prompt], Env]  # a fresh episode
    grader: Grader
    sampling: Sampling
    context_limit: int  # tokens of prompt, answers and replies together
    interruption: Interruption | None = None  # of thinking; with it sampling.max_tokens is not used
    identity: str = ""  # of model, environment and grader: differs where other groups would be played
    ends_in_thought: Callable[[np.ndarray, np.ndarray], bool] = lambda context, answer: False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRequest:
    """A group to be played. Member k is seeded (*seed, k)."""

    prompt: Prompt
    seed: tuple[int, ...]  # (run seed, step, index of the prompt in the stream)
    group_size: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutResult:
    """A graded group, and the times (``time.perf_counter``) of its last token and its last verdict."""

    group: Group
    generated_at: float
    graded_at: float
    spooled: bool = False  # written by an earlier process, and read back
    paid: bool = False  # and that process, or a later one, has a row in the ledger for it


async def play_groups(
    stage: RolloutContext,
    asks: Sequence[RolloutRequest],
    on_group: Callable[[int, RolloutResult], None] = lambda index, played: None,
) -> list[RolloutResult]:
    """Play all groups at once and return them in the order of the requests; ``on_group`` is called with each
    as it finishes. The error of a group is raised. A cancelled or failed call leaves no episode running."""

    async def play_group(index: int) -> RolloutResult:
        played = await rollout_group(stage, asks[index])
        on_group(index, played)
        return played

    tasks = [asyncio.create_task(play_group(index)) for index in range(len(asks))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(tasks)


async def rollout_group(
    stage: RolloutContext, ask: RolloutRequest, generated: Callable[[], None] = lambda: None
) -> RolloutResult:
    """Play and grade the siblings of a prompt together; ``generated`` is called in between. Their
    environments are closed, also after an error."""
    episodes = [_Episode(stage, ask.prompt, (*ask.seed, member)) for member in range(ask.group_size)]
    try:
        await asyncio.gather(*(episode.open() for episode in episodes))
        await _play_together(stage.engine, episodes)
    finally:
        await asyncio.gather(*(episode.close() for episode in episodes))
    generated_at = time.perf_counter()
    generated()
    trajectories = tuple(episode.make_trajectory() for episode in episodes)
    group = await grade_group(
        stage.grader, Group(prompt=ask.prompt, trajectories=trajectories, step=ask.step)
    )
    return RolloutResult(group=group, generated_at=generated_at, graded_at=time.perf_counter())


async def play_episode(stage: RolloutContext, prompt: Prompt, seed: tuple[int, ...]) -> Trajectory:
    """Play a single episode without grading it, as each member of ``rollout_group`` is played."""
    episode = _Episode(stage, prompt, seed)
    try:
        await episode.open()
        if episode.is_starting:
            await episode.begin()
        await _play_to_end(stage.engine, episode)
    finally:
        await episode.close()
    return episode.make_trajectory()


async def grade_group(grader: Grader, group: Group) -> Group:
    """Return the group with a Reward for every member whose episode did not fail; the others keep None. A
    value that is not finite, or an error of the grader, becomes a reward without a value. Raises ``Lost`` if
    the grader is lost."""
    indices = [index for index, trajectory in enumerate(group.trajectories) if trajectory.stop not in FAILED]
    if not indices:
        return group
    siblings = replace(group, trajectories=tuple(group.trajectories[index] for index in indices))
    try:
        rewards = await grader.grade(siblings)
        if len(rewards) != len(indices):
            raise ValueError(f"{len(rewards)} verdicts for {len(indices)} trajectories")
    except Lost:  # the grader itself is lost: the run ends
        raise
    except Exception as error:  # a user's code: any error is counted, and never scored 0
        rewards = [Reward(value=None, reason=_format_fault(Fault.GRADER, error))] * len(indices)
    trajectories = list(group.trajectories)
    for index, reward in zip(indices, rewards, strict=True):
        trajectories[index] = replace(trajectories[index], reward=_check_finite(reward))
    return replace(group, trajectories=tuple(trajectories))


def list_verdicts(group: Group) -> np.ndarray:
    """Return rewards [G] float64; NaN where there is no verdict."""
    values = [None if t.reward is None else t.reward.value for t in group.trajectories]
    return np.array([math.nan if value is None else value for value in values], np.float64)


def find_drop_reason(group: Group, min_verdicts: int) -> Drop | None:
    """Return why too few members of the group can be trained on; None if ``min_verdicts`` of them have a
    verdict."""
    if np.isfinite(list_verdicts(group)).sum() >= min_verdicts:
        return None
    if any(parse_fault_name(t.error) == Fault.PROMPT_TOO_LONG for t in group.trajectories):
        return Drop.PROMPT_TOO_LONG
    num_played = sum(t.stop not in FAILED for t in group.trajectories)
    return Drop.TOO_FEW_EPISODES if num_played < min_verdicts else Drop.TOO_FEW_VERDICTS


def parse_fault_name(sentence: str) -> str:
    """Return the kind of failure that a sentence reports: the words before its first colon."""
    return sentence.partition(":")[0].strip()


async def start_env(env: Env) -> Any:
    """Open the environment if it has ``open()``, and return the result of its ``start()``: the first
    context, or an awaitable for a context that is still to come."""
    if (open_env := getattr(env, "open", None)) is not None:
        await open_env()
    return env.start()


async def close_env(env: Env | None) -> None:
    """Close the environment, if it has ``close()``, which may be a coroutine."""
    close = getattr(env, "close", None)
    if close is not None and isinstance(result := close(), Awaitable):
        await result


class _Episode:
    """An episode that is being played. ``request`` is the next one for the engine; None if it is over, or
    its first context is still to come."""

    def __init__(self, stage: RolloutContext, prompt: Prompt, seed: tuple[int, ...]) -> None:
        self.request: Request | None = None
        self._stage, self._seed, self._prompt = stage, seed, prompt
        self._turns: list[Turn] = []
        self._stop, self._error = Stop.ABORT, ""
        self._tokens = np.zeros(0, np.int32)
        self._cut_thought: tuple[Request, Completion] | None = (
            None  # its request, and what ``request`` continues
        )
        self._env: Env | None = None
        self._new_row, self._row_seed, self._num_rows_by_address = False, seed, Counter[int]()
        self._first_context: Awaitable[Any] | None = None

    async def open(self) -> None:
        """Make the environment, and request the first answer unless its context is still to come. An error
        of the environment, as in all methods, ends the episode with it and is not raised."""
        try:
            self._env = self._stage.env(self._prompt)
            context = await start_env(self._env)
        except Exception as error:  # a user's code: counted, and the siblings go on
            self._fail(_format_fault(Fault.ENV, error))
        else:
            if isinstance(context, Awaitable):
                self._first_context = context
            else:
                self._make_request(context)

    @property
    def is_starting(self) -> bool:
        """Whether the first context is still to come (an agent's first call)."""
        return self._first_context is not None

    async def begin(self) -> None:
        """Wait for the first context, and request the first answer."""
        assert self._first_context is not None
        awaitable, self._first_context = self._first_context, None
        try:
            context = await awaitable
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_format_fault(Fault.ENV, error))
        self._make_request(context)

    def make_trajectory(self) -> Trajectory:
        return Trajectory(
            turns=tuple(self._turns),
            stop=self._stop,
            seed=self._seed,
            env_reward=getattr(self._env, "reward", None),
            ended=getattr(self._env, "ended", ""),
            last_reply=getattr(self._env, "last_reply", ""),
            error=self._error,
        )

    async def close(self) -> None:
        """Close the environment and an awaitable that was not awaited. An error of that fails the episode,
        unless it has failed before."""
        if isinstance(self._first_context, Coroutine):
            self._first_context.close()  # nothing will await it
        try:
            await close_env(self._env)
        except Exception as error:  # a user's code
            if not self._error:
                self._fail(_format_fault(Fault.ENV, error))

    async def request_answer(self, engine: Engine) -> Completion | None:
        """Return the engine's answer to ``request``. None if the caller left before its end; then the
        request is cancelled."""
        assert self.request is not None
        wait_for_leave = getattr(self._env, "left", None)
        if wait_for_leave is None:
            return await _answer_request(engine, self.request)
        answer = asyncio.create_task(_answer_request(engine, self.request))
        leave = asyncio.create_task(wait_for_leave())
        try:
            await asyncio.wait({answer, leave}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            await end_tasks([answer, leave])

    async def replace_request(self) -> None:
        """Replace ``request``, whose caller has left, by what the environment requests next, if anything."""
        self.request = self._cut_thought = None
        try:
            reply = await getattr(self._env, "instead")()  # noqa: B009  of environments that have ``left``
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_format_fault(Fault.ENV, error))
        if reply is not None:
            self._make_request(reply)

    async def take_answer(self, part: Completion) -> None:
        """Take the answer to ``request``. A complete answer becomes a turn; then the environment returns the
        next context, unless the answer was truncated, aborted or failed. A part before an interruption
        requests the part after it."""
        assert self.request is not None
        request, completion = self._join_parts(self.request, part)
        if completion is None:
            return
        context = request.tokens[len(self._tokens) :]
        in_thought = self._stage.ends_in_thought(request.tokens, completion.tokens)
        self._turns.append(
            Turn(context=context, completion=completion, new_row=self._new_row, in_thought=in_thought)
        )
        self._new_row = False
        self._tokens = np.concatenate([request.tokens, completion.tokens])
        self.request, self._stop = None, completion.stop
        if completion.stop is Stop.ERROR:
            return self._fail(f"{Fault.ENGINE}: {completion.error or 'no reason given'}")
        takes_half = getattr(self._env, "takes_half", False) and completion.stop is Stop.LENGTH
        if completion.stop in (Stop.LENGTH, Stop.ABORT) and not takes_half:
            return  # a reply to half an answer is of no use for training
        assert self._env is not None
        try:
            reply = await self._env.step(completion)
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_format_fault(Fault.ENV, error))
        if reply is not None:
            self._make_request(reply)

    def _join_parts(self, request: Request, answer: Completion) -> tuple[Request, Completion | None]:
        """Return (first request of the turn, its complete answer). If a part is still to come, store this
        one, set ``request``, and return None for the answer."""
        interruption, stage = self._stage.interruption, self._stage
        if interruption is None:
            return request, answer
        if self._cut_thought is not None:
            (first_request, thought), self._cut_thought = self._cut_thought, None
            return first_request, interruption.join(first_request, thought, request, answer)
        second_request = interruption.make_second_request(
            request, answer, stage.sampling, stage.context_limit
        )
        if second_request is None:
            return request, answer
        self._cut_thought, self.request = (request, answer), second_request
        return request, None

    def _make_request(self, context: Any) -> None:
        """Request the answer to ``context``; without room for it end the episode instead."""
        seed = self._seed
        if isinstance(context, NewRow):
            self._new_row, self._tokens = bool(self._turns), np.zeros(0, np.int32)
            context, seed = context.tokens, self._make_row_seed(context.tokens)
        self._row_seed = seed if not len(self._tokens) else self._row_seed
        tokens = np.concatenate([self._tokens, np.asarray(context, np.int32)])
        room = self._stage.context_limit - len(tokens)
        if room > 0:
            sampling, interruption = self._stage.sampling, self._stage.interruption
            max_tokens = min(sampling.max_tokens, room)
            if interruption is not None:
                max_tokens = interruption.count_first_tokens(self._row_seed, len(tokens), room)
            sampling = replace(
                sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
            )
            self.request = Request(
                tokens=tokens,
                sampling=sampling,
                seed=self._row_seed,
                uid=self._prompt.uid,
                routes_from=max(0, len(self._tokens) - 1),  # the last sampled token had not run yet
            )
        elif self._turns:
            self._stop = Stop.LENGTH
        else:
            self._fail(
                f"{Fault.PROMPT_TOO_LONG}: {len(tokens)} tokens leave no room for an answer in a context of "
                f"{self._stage.context_limit}; shorten the prompt or raise the limit"
            )

    def _make_row_seed(self, tokens: np.ndarray) -> tuple[int, ...]:
        """Return the seed of a new row, and count it. Rows of an episode share no noise, and it depends on
        the tokens with which a row begins, not on the order of other rows; the first row has the episode's
        own seed."""
        if not self._turns:
            return self._seed
        digest = hashlib.sha256(tokens.astype("<i4").tobytes()).digest()
        address = int.from_bytes(digest[:8], "little", signed=True)
        self._num_rows_by_address[address] += 1
        return (*self._seed, address, self._num_rows_by_address[address])

    def _fail(self, sentence: str) -> None:
        self._stop, self._error = Stop.ERROR, sentence


async def _play_together(engine: Engine, episodes: Sequence[_Episode]) -> None:
    """Play the first turns in a single call; each episode continues by itself as soon as it has its answer.
    Raises RuntimeError for a missing answer. No task is left running."""
    ready = [episode for episode in episodes if episode.request is not None]
    requests = [episode.request for episode in ready if episode.request is not None]
    tasks: list[asyncio.Task[None]] = []

    async def start_late(episode: _Episode) -> None:
        await episode.begin()
        await _play_to_end(engine, episode)

    async def continue_episode(episode: _Episode, completion: Completion) -> None:
        await episode.take_answer(completion)
        await _play_to_end(engine, episode)

    start_tasks = [asyncio.create_task(start_late(episode)) for episode in episodes if episode.is_starting]
    try:
        if ready:
            async for index, completion in engine.generate(requests):
                tasks.append(asyncio.create_task(continue_episode(ready[index], completion)))
        if len(tasks) != len(ready):
            raise RuntimeError(f"the engine gave {len(tasks)} completions for {len(ready)} requests")
        await asyncio.gather(*tasks, *start_tasks)
    finally:
        await end_tasks([*tasks, *start_tasks])


async def _play_to_end(engine: Engine, episode: _Episode) -> None:
    while episode.request is not None:
        completion = await episode.request_answer(engine)
        if completion is None:
            await episode.replace_request()
        else:
            await episode.take_answer(completion)


async def _answer_request(engine: Engine, request: Request) -> Completion:
    completions = [completion async for _, completion in engine.generate([request])]
    if len(completions) != 1:
        raise RuntimeError(f"the engine gave {len(completions)} completions for 1 request")
    return completions[0]


async def end_tasks(tasks: Sequence[asyncio.Task[Any]], limit_s: float = END_S) -> None:
    """Cancel running tasks and wait for their end: no task may outlive a failed call. User code that ignores
    the cancellation is abandoned after ``limit_s``."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended_tasks, _ = await asyncio.wait(tasks, timeout=limit_s)
        for task in ended_tasks:
            if not task.cancelled():
                task.exception()  # asyncio would log an error that is not retrieved


def _check_finite(reward: Reward) -> Reward:
    if reward.value is None or math.isfinite(reward.value):
        return reward
    return replace(reward, value=None, reason=f"{Fault.NOT_FINITE}: the reward is {reward.value}")


def _format_fault(fault: Fault, error: Exception) -> str:
    return f"{fault}: {type(error).__name__}: {error}"
