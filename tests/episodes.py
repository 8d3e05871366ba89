"""Rollouts of agents on an engine of their own, for tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.agents import AgentEpisode
from ostinato.engine.local import LocalEngine
from ostinato.launch.policy import serve_policy
from ostinato.render import Renderer
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, rollout_group
from ostinato.types import Group, Prompt, Reward, Sampling

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "1+1="},), columns={"seed": 5})


class OwnReward:
    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=trajectory.env_reward) for trajectory in group.trajectories]


class World:
    """An engine of its own, and rollouts on it."""

    def __init__(self, policy: Any, server: AgentServer) -> None:
        self.policy = policy
        engine = serve_policy(policy)
        assert isinstance(engine, LocalEngine)
        self.engine = engine
        self.renderer: Renderer = policy.renderer
        self.server, self.counters = server, Counter[str]()

    def play(
        self,
        env: Any,
        prompt: Prompt = PROMPT,
        size: int = 4,
        stop: tuple[str, ...] = (),
        context: int = 400,
    ) -> Group:
        stage = RolloutContext(
            engine=self.engine,
            env=env,
            grader=OwnReward(),
            sampling=Sampling(max_tokens=16, stop_tokens=self.renderer.stop_tokens, stop_strings=stop),
            context_limit=context,
        )
        ask = RolloutRequest(prompt=prompt, seed=(0, 1, 2), group_size=size, step=1)
        return asyncio.run(rollout_group(stage, ask)).group

    def agent(
        self,
        agent: Any,
        calls: int = 4,
        silence_s: float = 20.0,
        is_queued: bool = False,
        new_chat: Callable[[], Any] = lambda: None,
    ) -> Any:
        return lambda prompt: AgentEpisode(
            self.server,
            agent,
            prompt,
            max_calls=calls,
            silence_s=silence_s,
            counters=self.counters,
            is_queued=is_queued,
            chat=new_chat(),
        )


def turns_of(group: Group) -> list[list[tuple[list[int], list[int], list[float]]]]:
    return [
        [
            (t.context.tolist(), t.completion.tokens.tolist(), t.completion.logprobs.tolist())
            for t in trajectory.turns
        ]
        for trajectory in group.trajectories
    ]
