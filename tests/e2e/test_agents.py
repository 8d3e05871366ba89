"""Agents as they are: each rollout has an address, and what it trains on are the tokens that were sampled."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ostinato.engine.local import LocalEngine
from ostinato.env.custom import EnvEpisode, seeds
from ostinato.env.games import GuessNumber
from ostinato.launch.policy import load_policy, serve
from ostinato.render import Renderer
from ostinato.rollout.convert import samples
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, rollout_group
from ostinato.types import Group, Prompt, Reward, Sampling, Stop

pytest.importorskip("openai")
import agents

from ostinato.serve.agents import AgentEpisode, AgentServer, agent_of

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "1+1="},), columns={"seed": 5})


class OwnReward:
    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=trajectory.env_reward) for trajectory in group.trajectories]


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("asset:seed-moe", "model.dtype=float32")


@pytest.fixture(scope="module")
def server(policy: Any) -> Iterator[AgentServer]:
    made = AgentServer(policy.renderer)
    yield made
    made.close()


class World:
    """An engine of its own, and rollouts on it."""

    def __init__(self, policy: Any, server: AgentServer) -> None:
        self.engine: LocalEngine = serve(policy)
        self.renderer: Renderer = policy.renderer
        self.server, self.counters = server, Counter[str]()

    def play(self, env: Any, prompt: Prompt = PROMPT, size: int = 4, max_tokens: int = 16) -> Group:
        stage = RolloutContext(
            engine=self.engine,
            env=env,
            grader=OwnReward(),
            sampling=Sampling(max_tokens=max_tokens, stop_tokens=self.renderer.stop_tokens),
            context_limit=400,
        )
        ask = RolloutRequest(prompt=prompt, seed=(0, 1, 2), group_size=size, step=1)
        return asyncio.run(rollout_group(stage, ask)).group

    def agent(self, agent: Any, calls: int = 4, silence_s: float = 20.0) -> Any:
        return lambda prompt: AgentEpisode(
            self.server, agent, prompt, max_calls=calls, silence_s=silence_s, counters=self.counters
        )


@pytest.fixture
def world(policy: Any, server: AgentServer) -> World:
    return World(policy, server)


def turns_of(group: Group) -> list[list[tuple[list[int], list[int], list[float]]]]:
    return [
        [
            (t.context.tolist(), t.completion.tokens.tolist(), t.completion.logprobs.tolist())
            for t in trajectory.turns
        ]
        for trajectory in group.trajectories
    ]


def test_an_agent_with_openais_client_plays_the_episode_of_the_built_in_environment(
    world: World, policy: Any, server: AgentServer
) -> None:
    """Bit for bit: the same tokens, log-probabilities and rewards, nothing computed twice; and once more."""
    for prompt in seeds(GuessNumber, "g", "train", 0, 3):
        built_in = world.play(lambda one: EnvEpisode(one, world.renderer, GuessNumber, 4), prompt)
        played = [World(policy, server) for _ in range(2)]
        groups = [one.play(one.agent(agents.guess), prompt) for one in played]
        assert turns_of(groups[0]) == turns_of(groups[1]) == turns_of(built_in)
        assert [t.env_reward for t in groups[0].trajectories] == [t.env_reward for t in built_in.trajectories]
        assert max(len(t.turns) for t in groups[0].trajectories) > 1
        for trajectory in groups[0].trajectories:
            history = 0
            for turn in trajectory.turns:
                if history:  # all that has run is found in the prefix tree
                    assert turn.completion.cached_tokens == history - 1
                history += len(turn.context) + len(turn.completion.tokens)


def test_other_conversations_are_rows_of_their_own_with_one_advantage(world: World) -> None:
    group = world.play(world.agent(agents.two_rows, calls=5), size=2)
    rows = [[len(row) for row in trajectory.rows] for trajectory in group.trajectories]
    assert rows == [[1, 1, 1, 1]] * 2 and world.counters["agent/rows"] == 8
    made = samples(group, 0, np.array([1.0, -0.5]))
    assert [one.uid for one in made] == [f"p#{m}{r}" for m in (0, 1) for r in ("", ".1", ".2", ".3")]
    assert {float(one.advantages.sum() / one.loss_mask.sum()) for one in made[:4]} == {1.0}
    again = [one.tokens.tolist() for one in made[1:3]]
    assert again[0] != again[1]  # the same request a second time has noise of its own
    assert all(one.experts is not None for one in made)


def test_every_dialect_and_the_reward_by_an_event(world: World) -> None:
    pytest.importorskip("anthropic")
    group = world.play(world.agent(agents.dialects), size=2)
    assert [len(t.rows) for t in group.trajectories] == [3, 3]
    assert [t.reward.value for t in group.trajectories if t.reward] == [0.5, 0.5]


def test_an_agent_may_be_a_plain_function_or_a_command(world: World) -> None:
    group = world.play(world.agent(agents.plain), size=2)
    assert [t.env_reward for t in group.trajectories] == [0.25, 0.25]
    program = (
        "import json, os, sys, urllib.request as u; row = json.load(sys.stdin);"
        "base = os.environ['OPENAI_BASE_URL'];"
        "post = lambda path, body: u.urlopen(u.Request(base + path, json.dumps(body).encode())).read();"
        "post('/chat/completions', {'model': 'policy', 'messages': row['messages']});"
        "post('/reward', {'value': row['seed']})"
    )
    group = world.play(world.agent(agent_of("", [sys.executable, "-c", program])), size=2)
    assert [t.env_reward for t in group.trajectories] == [5.0, 5.0]
    broken = world.play(
        world.agent(agent_of("", [sys.executable, "-c", "raise SystemExit('no key')"])), size=1
    )
    assert "ended with 1: no key" in broken.trajectories[0].error


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (agents.silent, "the agent ended without a call"),
        (agents.hangs, "the agent made no call for 0.5 s"),
        (agents.breaks, "the agent raised KeyError: 'no such tool'"),
        (agents.wrong_model, "the model 'gpt-4' is not served to agents"),
    ],
)
def test_an_agent_that_fails_is_a_fault_with_its_name_and_never_a_zero(
    world: World, agent: Any, sentence: str
) -> None:
    group = world.play(world.agent(agent, silence_s=0.5), size=2)
    for trajectory in group.trajectories:
        assert trajectory.stop is Stop.ERROR and trajectory.error.startswith("env: RuntimeError:")
        assert sentence in trajectory.error and trajectory.reward is None


def test_an_agent_that_calls_for_ever_is_ended_at_its_last_turn(world: World) -> None:
    group = world.play(world.agent(agents.for_ever, calls=3), size=2)
    assert [len(t.turns) for t in group.trajectories] == [3, 3]
    assert all(t.stop is not Stop.ERROR for t in group.trajectories) and world.counters["agent/refused"] == 2


def test_a_rollout_that_has_ended_is_not_there(world: World, server: AgentServer) -> None:
    import httpx2

    world.play(world.agent(agents.plain), size=1)
    from ostinato.serve.server import address

    base = address(server._listening)
    reply = httpx2.post(f"{base}/rollout/1/v1/reward", json={"value": 1})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "rollout_not_found"
    assert not server._episodes
