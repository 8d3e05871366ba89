"""Play episodes, and grade siblings as soon as the last of them has ended.

    play            one task per prompt, all at once: the engine batches the requests
      rollout_group    G episodes; their first turns are one call, so the engine computes their prompt once;
                    every later turn is a call of its own, made the moment the environment has answered
        grade       while other groups are still being generated

Failures are data. An episode that breaks ends with ``Stop.ERROR`` and one sentence, a grader that breaks
gives verdicts of None with a reason, and the group carries both: ``health`` counts them and ``drop_reason``
says whether enough is left to learn from. A sentence begins with its kind ("env: ...", "grader: ..."), the
name under which it is counted. Only the failure of the engine itself, or the loss of the grader, is raised.
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

END_S = 10.0  # for cancelled tasks to end
FAILED = (Stop.ERROR, Stop.ABORT)  # ends after which a trajectory is neither graded nor trained on


class Fault(StrEnum):
    """The kinds of failure that this module names; the first word of the sentence."""

    PROMPT_TOO_LONG = "prompt_too_long"
    ENV = "env"
    ENGINE = "engine"
    GRADER = "grader"
    NOT_FINITE = "reward_not_finite"


class Drop(StrEnum):
    """Why a whole group is not trained on."""

    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_FEW_EPISODES = "too_few_episodes"  # the others ended in an error
    TOO_FEW_VERDICTS = "too_few_verdicts"
    ZERO_VARIANCE = "zero_variance"  # judged by the loop, where the algorithm drops them


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Where episodes are played, and how."""

    engine: Engine
    env: Callable[[Prompt], Env]  # a fresh episode
    grader: Grader
    sampling: Sampling
    context_limit: int  # tokens of prompt, answers and replies together
    interruption: Interruption | None = None  # of thinking; sampling.max_tokens is not used with one
    identity: str = ""  # of what samples and judges: differs where other groups would be played
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
    """A graded group, and when (``time.perf_counter``) its last token and its last verdict came."""

    group: Group
    generated_at: float
    graded_at: float
    spooled: bool = False  # by an earlier process, and read back
    paid: bool = False  # and that process, or one in between, has a row in the ledger for it


async def play(
    stage: RolloutContext,
    asks: Sequence[RolloutRequest],
    on_group: Callable[[int, RolloutResult], None] = lambda index, played: None,
) -> list[RolloutResult]:
    """Play all groups at once and return them in the order of the requests; ``on_group`` sees each as it
    finishes.

    A cancelled or failed call leaves no episode running.
    """

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
    """The siblings of one prompt, played and graded together; ``generated`` is called in between."""
    episodes = [_Episode(stage, ask.prompt, (*ask.seed, k)) for k in range(ask.group_size)]
    try:
        await asyncio.gather(*(episode.open() for episode in episodes))
        await _play_together(stage.engine, episodes)
    finally:
        await asyncio.gather(*(episode.close() for episode in episodes))
    generated_at = time.perf_counter()
    generated()
    trajectories = tuple(episode.trajectory() for episode in episodes)
    group = await grade(stage.grader, Group(prompt=ask.prompt, trajectories=trajectories, step=ask.step))
    return RolloutResult(group=group, generated_at=generated_at, graded_at=time.perf_counter())


async def play_episode(stage: RolloutContext, prompt: Prompt, seed: tuple[int, ...]) -> Trajectory:
    """One episode by itself, ungraded: what each member of ``rollout_group`` does, one call at a time."""
    episode = _Episode(stage, prompt, seed)
    try:
        await episode.open()
        if episode.starting:
            await episode.begin()
        await _play_on(stage.engine, episode)
    finally:
        await episode.close()
    return episode.trajectory()


async def grade(grader: Grader, group: Group) -> Group:
    """The group with a Reward for every member whose episode did not fail; the others keep None."""
    played = [k for k, trajectory in enumerate(group.trajectories) if trajectory.stop not in FAILED]
    if not played:
        return group
    siblings = replace(group, trajectories=tuple(group.trajectories[k] for k in played))
    try:
        rewards = await grader.grade(siblings)
        if len(rewards) != len(played):
            raise ValueError(f"{len(rewards)} verdicts for {len(played)} trajectories")
    except Lost:  # the grader itself: the run ends
        raise
    except Exception as error:  # a user's code: whatever it raises is counted, and never scored 0
        rewards = [Reward(value=None, reason=_sentence(Fault.GRADER, error))] * len(played)
    judged = list(group.trajectories)
    for k, reward in zip(played, rewards, strict=True):
        judged[k] = replace(judged[k], reward=_check_finite(reward))
    return replace(group, trajectories=tuple(judged))


def verdicts(group: Group) -> np.ndarray:
    """Rewards [G] float64; NaN where there is no verdict."""
    values = [None if t.reward is None else t.reward.value for t in group.trajectories]
    return np.array([math.nan if value is None else value for value in values], np.float64)


def drop_reason(group: Group, min_verdicts: int) -> Drop | None:
    """Why too little of the group is left to train on; None when at least ``min_verdicts`` members count."""
    if np.isfinite(verdicts(group)).sum() >= min_verdicts:
        return None
    if any(fault_name(t.error) == Fault.PROMPT_TOO_LONG for t in group.trajectories):
        return Drop.PROMPT_TOO_LONG
    played = sum(t.stop not in FAILED for t in group.trajectories)
    return Drop.TOO_FEW_EPISODES if played < min_verdicts else Drop.TOO_FEW_VERDICTS


def fault_name(sentence: str) -> str:
    """The kind of failure that a sentence reports: what stands before its first colon."""
    return sentence.partition(":")[0].strip()


async def first_context(env: Env) -> Any:
    """What ``env.start()`` gives, after ``open()`` where the environment has one; an awaitable for a context
    that is still to come."""
    if (opened := getattr(env, "open", None)) is not None:
        await opened()
    return env.start()


async def close_env(env: Env | None) -> None:
    """``close()`` the environment, if it has that; it may be a coroutine."""
    close = getattr(env, "close", None)
    if close is not None and isinstance(closing := close(), Awaitable):
        await closing


class _Episode:
    """One episode under way: ``request`` is what the engine is to answer next, None when it is over."""

    def __init__(self, stage: RolloutContext, prompt: Prompt, seed: tuple[int, ...]) -> None:
        self.request: Request | None = None
        self._stage, self._seed, self._prompt = stage, seed, prompt
        self._turns: list[Turn] = []
        self._stop, self._error = Stop.ABORT, ""
        self._history = np.zeros(0, np.int32)
        self._begun: tuple[Request, Completion] | None = None  # the thought that ``request`` goes on with
        self._env: Env | None = None
        self._new_row, self._row_seed, self._begun_rows = False, seed, Counter[int]()
        self._starting: Awaitable[Any] | None = None

    async def open(self) -> None:
        """Make the environment, and request the first answer unless its context is still to come."""
        try:
            self._env = self._stage.env(self._prompt)
            context = await first_context(self._env)
        except Exception as error:  # a user's code: counted, and the siblings go on
            self._fail(_sentence(Fault.ENV, error))
        else:
            if isinstance(context, Awaitable):
                self._starting = context
            else:
                self._ask(context)

    @property
    def starting(self) -> bool:
        """Does its first context still have to come (an agent's first call)?"""
        return self._starting is not None

    async def begin(self) -> None:
        """Wait for the first context."""
        assert self._starting is not None
        starting, self._starting = self._starting, None
        try:
            context = await starting
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_sentence(Fault.ENV, error))
        self._ask(context)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            turns=tuple(self._turns),
            stop=self._stop,
            seed=self._seed,
            env_reward=getattr(self._env, "reward", None),
            error=self._error,
        )

    async def close(self) -> None:
        """End the environment, whether or not the episode has ended."""
        if isinstance(self._starting, Coroutine):
            self._starting.close()  # it has no caller any more
        try:
            await close_env(self._env)
        except Exception as error:  # a user's code
            if not self._error:
                self._fail(_sentence(Fault.ENV, error))

    async def answer(self, engine: Engine) -> Completion | None:
        """What the engine gives for ``request``; None where the caller has left before the end."""
        assert self.request is not None
        left = getattr(self._env, "left", None)
        if left is None:
            return await _answer_request(engine, self.request)
        completion = asyncio.create_task(_answer_request(engine, self.request))
        departure = asyncio.create_task(left())
        try:
            await asyncio.wait({completion, departure}, return_when=asyncio.FIRST_COMPLETED)
            return completion.result() if completion.done() else None
        finally:
            await end_tasks([completion, departure])

    async def replace_request(self) -> None:
        """The caller of ``request`` has left: ask the environment what to request next."""
        self.request = self._begun = None
        try:
            reply = await getattr(self._env, "instead")()  # noqa: B009  of environments that have ``left``
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_sentence(Fault.ENV, error))
        if reply is not None:
            self._ask(reply)

    async def hear(self, part: Completion) -> None:
        """Take the answer to ``request``: a whole one, then the environment says what comes next, or the
        part before or behind an interruption."""
        assert self.request is not None
        requested, completion = self._join(self.request, part)
        if completion is None:
            return
        context = requested.tokens[len(self._history) :]
        in_thought = self._stage.ends_in_thought(requested.tokens, completion.tokens)
        self._turns.append(
            Turn(context=context, completion=completion, new_row=self._new_row, in_thought=in_thought)
        )
        self._new_row = False
        self._history = np.concatenate([requested.tokens, completion.tokens])
        self.request, self._stop = None, completion.stop
        if completion.stop is Stop.ERROR:
            return self._fail(f"{Fault.ENGINE}: {completion.error or 'no reason given'}")
        takes_half = getattr(self._env, "takes_half", False) and completion.stop is Stop.LENGTH
        if completion.stop in (Stop.LENGTH, Stop.ABORT) and not takes_half:
            return  # a reply to half an answer would teach nothing
        assert self._env is not None
        try:
            reply = await self._env.step(completion)
        except Exception as error:  # a user's code: counted, and the siblings go on
            return self._fail(_sentence(Fault.ENV, error))
        if reply is not None:
            self._ask(reply)

    def _join(self, requested: Request, part: Completion) -> tuple[Request, Completion | None]:
        """(what the turn requested first, its whole answer); the answer is None while a part is to come."""
        interruption, stage = self._stage.interruption, self._stage
        if interruption is None:
            return requested, part
        if self._begun is not None:
            (first, thought), self._begun = self._begun, None
            return first, interruption.join(first, thought, requested, part)
        again = interruption.second_request(requested, part, stage.sampling, stage.context_limit)
        if again is None:
            return requested, part
        self._begun, self.request = (requested, part), again
        return requested, None

    def _ask(self, context: Any) -> None:
        seed = self._seed
        if isinstance(context, NewRow):
            self._new_row, self._history = bool(self._turns), np.zeros(0, np.int32)
            context, seed = context.tokens, self._seed_of_row(context.tokens)
        self._row_seed = seed if not len(self._history) else self._row_seed
        tokens = np.concatenate([self._history, np.asarray(context, np.int32)])
        room = self._stage.context_limit - len(tokens)
        if room > 0:
            sampling, interruption = self._stage.sampling, self._stage.interruption
            most = min(sampling.max_tokens, room)
            if interruption is not None:
                most = interruption.first_tokens(self._row_seed, len(tokens), room)
            sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
            self.request = Request(
                tokens=tokens,
                sampling=sampling,
                seed=self._row_seed,
                uid=self._prompt.uid,
                routes_from=max(0, len(self._history) - 1),  # what was sampled last had not run yet
            )
        elif self._turns:
            self._stop = Stop.LENGTH
        else:
            self._fail(
                f"{Fault.PROMPT_TOO_LONG}: {len(tokens)} tokens leave no room for an answer in a context of "
                f"{self._stage.context_limit}; shorten the prompt or raise the limit"
            )

    def _seed_of_row(self, tokens: np.ndarray) -> tuple[int, ...]:
        """Rows of an episode share no noise, and theirs depends on what they begin with, not on their order;
        the first has the episode's own."""
        if not self._turns:
            return self._seed
        digest = hashlib.sha256(tokens.astype("<i4").tobytes()).digest()
        address = int.from_bytes(digest[:8], "little", signed=True)
        self._begun_rows[address] += 1
        return (*self._seed, address, self._begun_rows[address])

    def _fail(self, sentence: str) -> None:
        self._stop, self._error = Stop.ERROR, sentence


async def _play_together(engine: Engine, episodes: Sequence[_Episode]) -> None:
    """First turns in one call; each episode goes on by itself as soon as its own answer is there."""
    requested = [episode for episode in episodes if episode.request is not None]
    requests = [episode.request for episode in requested if episode.request is not None]
    tasks: list[asyncio.Task[None]] = []

    async def start(episode: _Episode) -> None:
        await episode.begin()
        await _play_on(engine, episode)

    async def go_on(episode: _Episode, completion: Completion) -> None:
        await episode.hear(completion)
        await _play_on(engine, episode)

    late = [asyncio.create_task(start(episode)) for episode in episodes if episode.starting]
    try:
        if requested:
            async for index, completion in engine.generate(requests):
                tasks.append(asyncio.create_task(go_on(requested[index], completion)))
        if len(tasks) != len(requested):
            raise RuntimeError(f"the engine gave {len(tasks)} completions for {len(requested)} requests")
        await asyncio.gather(*tasks, *late)
    finally:
        await end_tasks([*tasks, *late])


async def _play_on(engine: Engine, episode: _Episode) -> None:
    while episode.request is not None:
        completion = await episode.answer(engine)
        if completion is None:
            await episode.replace_request()
        else:
            await episode.hear(completion)


async def _answer_request(engine: Engine, request: Request) -> Completion:
    completions = [completion async for _, completion in engine.generate([request])]
    if len(completions) != 1:
        raise RuntimeError(f"the engine gave {len(completions)} completions for 1 request")
    return completions[0]


async def end_tasks(tasks: Sequence[asyncio.Task[Any]], limit_s: float = END_S) -> None:
    """Cancel what still runs and wait for it: no task may outlive a failed call. User code that
    ignores the cancellation is abandoned after ``limit_s``."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=limit_s)
        for task in ended:
            if not task.cancelled():
                task.exception()  # retrieved, or asyncio would log it


def _check_finite(reward: Reward) -> Reward:
    if reward.value is None or math.isfinite(reward.value):
        return reward
    return replace(reward, value=None, reason=f"{Fault.NOT_FINITE}: the reward is {reward.value}")


def _sentence(fault: Fault, error: Exception) -> str:
    return f"{fault}: {type(error).__name__}: {error}"
