"""Agents as they are: each rollout has an address, and what it trains on are the tokens that were sampled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.apps.memory.chat import NOTE
from ostinato.apps.memory.conversations import make_conversations
from ostinato.config.sections import MemorySection
from ostinato.engine.local import LocalEngine
from ostinato.env.custom import EnvEpisode, make_seed_prompts
from ostinato.env.games import GuessNumber, PriceList
from ostinato.env.tasks import load_tasks
from ostinato.launch.policy import load_policy
from ostinato.rollout.convert import make_samples
from ostinato.types import Prompt, Stop

pytest.importorskip("openai")
import toy_agents as agents
from episodes import PROMPT, World, turns_of

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.agents import load_agent
from ostinato.apps.serve.toolcalls import convert_to_equals, read_equals

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
price_agent: Any = import_module("price_agent")


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("asset:seed-moe", "model.dtype=float32")


@pytest.fixture(scope="module")
def server(policy: Any) -> Iterator[AgentServer]:
    made = AgentServer(policy.renderer)
    yield made
    made.close()


@pytest.fixture
def world(policy: Any, server: AgentServer) -> World:
    return World(policy, server)


def test_an_agent_with_openais_client_plays_the_episode_of_the_built_in_environment(
    world: World, policy: Any, server: AgentServer
) -> None:
    """Bit for bit: the same tokens, log-probabilities and rewards, nothing computed twice; and once more."""
    for prompt in make_seed_prompts(GuessNumber, "g", "train", 0, 3):
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


def test_an_agent_with_a_tool_plays_the_episodes_of_the_built_in_shop(policy: Any) -> None:
    """``tools`` in, ``tool_calls`` out, the tool's answer back, over several turns: tokens, log-probabilities
    and rewards are those of the built-in environment, bit for bit; nothing is computed twice; once more."""
    server = AgentServer(policy.renderer, calls="equals")
    try:
        calls = 0
        for prompt in make_seed_prompts(Sums, "g", "train", 0, 2):
            built_in = World(policy, server).play(shop(policy.renderer), prompt, stop=("=",))
            played = [World(policy, server) for _ in range(2)]
            groups = [one.play(one.agent(sums, 3), prompt, stop=("=",)) for one in played]
            assert turns_of(groups[0]) == turns_of(groups[1]) == turns_of(built_in)
            rewards = [[t.env_reward for t in group.trajectories] for group in (groups[0], built_in)]
            assert rewards[0] == rewards[1]
            for trajectory in groups[0].trajectories:
                calls += len(trajectory.turns) - 1
                history = 0
                for turn in trajectory.turns:
                    assert turn.completion.cached_tokens >= history - 1  # of siblings it finds even more
                    history += len(turn.context) + len(turn.completion.tokens)
        assert calls > 4
    finally:
        server.close()


class Sums(PriceList):
    """Asks for what the model computes step by step, so that it calls the tool before it has learned to."""

    def reset(self, *, seed: int, options: Any) -> Any:
        super().reset(seed=seed, options=options)
        (row,) = load_tasks("arithmetic", "train", seed, 1)
        assert row.messages is not None
        return row.messages[0]["content"], {}


async def sums(base_url: str, row: Any) -> float:
    return await price_agent.visit(Sums(), agents.client().with_options(base_url=base_url), row["seed"])


def shop(renderer: Any) -> Any:
    return lambda prompt: EnvEpisode(prompt, renderer, Sums, 3)


async def two_tools(base_url: str, row: Any) -> float:
    tools: Any = [*price_agent.TOOLS, *price_agent.TOOLS]
    client, messages = agents.client().with_options(base_url=base_url), [{"role": "user", "content": "1"}]
    await client.chat.completions.create(model="policy", messages=messages, tools=tools)  # type: ignore[arg-type]
    return 1.0


def test_short_tool_calls_are_for_one_tool(policy: Any) -> None:
    server = AgentServer(policy.renderer, calls="equals")
    try:
        world = World(policy, server)
        refused = world.play(world.agent(two_tools), size=1).trajectories[0]
        assert "is for one tool with one parameter; the request has 2" in refused.error
    finally:
        server.close()
    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": '{"item": 5}'}}
    chat = [{"role": "assistant", "content": "4+", "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    assert convert_to_equals(chat, ()) == [
        {"role": "assistant", "content": "4+5="},
        {"role": "user", "content": "9"},
    ]
    assert read_equals("4+05 =", price_agent.TOOLS, "p")[1][0].arguments == '{"item": 5}'
    assert read_equals("4+5", price_agent.TOOLS, "p") == ("4+5", ())


def test_other_conversations_are_rows_of_their_own_with_one_advantage(world: World) -> None:
    group = world.play(world.agent(agents.two_rows, calls=5), size=2)
    rows = [[len(row) for row in trajectory.rows] for trajectory in group.trajectories]
    assert rows == [[1, 1, 1, 1]] * 2 and world.counters["agent/rows"] == 8
    made = make_samples(group, 0, np.array([1.0, -0.5]))
    assert [one.uid for one in made] == [f"p#{m}{r}" for m in (0, 1) for r in ("", ".1", ".2", ".3")]
    assert {float(one.advantages.sum() / one.loss_mask.sum()) for one in made[:4]} == {1.0}
    again = [one.tokens.tolist() for one in made[1:3]]
    assert again[0] != again[1]  # the same request a second time has noise of its own
    assert all(one.experts is not None for one in made)


@pytest.mark.parametrize(("budget", "tools"), [(220, []), (800, price_agent.TOOLS)])
def test_an_agent_with_a_memory_keeps_its_task_and_stays_within_the_budget(
    world: World, budget: int, tools: Any
) -> None:
    """A row for each state of the memory, one advantage for the episode."""
    new_chat = make_conversations(MemorySection(budget=budget), world.renderer, world.counters)
    watches = partial(agents.watches, **({"tools": tools} if tools else {}))
    group = world.play(world.agent(watches, calls=20, new_chat=new_chat), size=2, context=900)
    for trajectory in group.trajectories:
        assert not trajectory.error and trajectory.env_reward == 1.0 and len(trajectory.turns) == 12
        length = 0
        for turn in trajectory.turns:
            length = len(turn.context) + (0 if turn.new_row else length)
            assert length <= budget
            length += len(turn.completion.tokens)
        first, *rows = [world.renderer.decode(row[0].context) for row in trajectory.rows]
        assert rows and NOTE not in first
        assert all("Watch the log of plant 42." in row and NOTE in row for row in rows)
        assert f"Line 10: sensor {70} shows 30 degrees." in rows[-1]
    assert world.counters["memory/rows"] == sum(len(one.rows) - 1 for one in group.trajectories)
    made = make_samples(group, 0, np.array([1.0, -0.5]))
    shares = [float(one.advantages.sum() / one.loss_mask.sum()) for one in made]
    assert shares == [1.0] * len(group.trajectories[0].rows) + [-0.5] * len(group.trajectories[1].rows)
    again = World(world.policy, world.server)
    same = again.play(again.agent(watches, calls=20, new_chat=new_chat), size=2, context=900)
    assert turns_of(same) == turns_of(group)


def test_tools_that_leave_no_room_for_a_memory_are_refused_in_a_sentence(world: World) -> None:
    new_chat = make_conversations(MemorySection(budget=220), world.renderer, world.counters)
    watches = partial(agents.watches, tools=price_agent.TOOLS)
    (failed,) = world.play(world.agent(watches, new_chat=new_chat), size=1).trajectories
    assert "memory.budget is" in failed.error and "use a budget of at least both" in failed.error


def test_every_dialect_and_the_reward_by_an_event(world: World) -> None:
    pytest.importorskip("anthropic")
    group = world.play(world.agent(agents.dialects), size=2)
    assert [len(t.rows) for t in group.trajectories] == [3, 3]
    assert [t.reward.value for t in group.trajectories if t.reward] == [0.5, 0.5]


def test_a_row_of_text_has_messages_for_its_agent_too(world: World) -> None:
    """It had ``text`` alone, and the agent of the guide, which sends ``row["messages"]``, failed in every
    episode."""
    rows = list[Any]()

    def sees(base_url: str, row: Any) -> float:
        rows.append(row)
        return agents.plain(base_url, row)

    group = world.play(world.agent(sees), Prompt(uid="p", text="1+1=", columns={"answer": "2"}), size=1)
    chat = [{"role": "user", "content": "1+1="}]
    assert rows == [{"uid": "p", "prompt": "1+1=", "messages": chat, "answer": "2"}]
    assert group.trajectories[0].env_reward == 0.25


def test_an_agent_may_be_a_plain_function_or_a_command(world: World) -> None:
    group = world.play(world.agent(agents.plain), size=2)
    assert [t.env_reward for t in group.trajectories] == [0.25, 0.25]
    program = (
        "import json, os, sys, urllib.request as u; row = json.load(sys.stdin);"
        "base = os.environ['OPENAI_BASE_URL'];"
        "kind = {'Content-Type': 'application/json'};"
        "post = lambda path, body: u.urlopen(u.Request(base + path, json.dumps(body).encode(), kind)).read();"
        "post('/chat/completions', {'model': 'policy', 'messages': row['messages']});"
        "post('/reward', {'value': row['seed']})"
    )
    group = world.play(world.agent(load_agent("", [sys.executable, "-c", program])), size=2)
    assert [t.env_reward for t in group.trajectories] == [5.0, 5.0]
    broken = world.play(
        world.agent(load_agent("", [sys.executable, "-c", "raise SystemExit('no key')"])), size=1
    )
    assert "ended with 1: no key" in broken.trajectories[0].error


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (agents.silent, "the agent ended without a call"),
        (agents.hangs, "the agent made no call for 0.5 s"),
        (agents.breaks, "the agent raised KeyError: 'no such tool'"),
        (agents.wrong_model, "the model 'gpt-4' is not served to agents"),
        (agents.wants_a_grammar, "leave response_format and tool_choice out"),
    ],
)
def test_an_agent_that_fails_is_a_named_fault_and_no_zero(world: World, agent: Any, sentence: str) -> None:
    group = world.play(world.agent(agent, silence_s=0.5), size=2)
    for trajectory in group.trajectories:
        assert trajectory.stop is Stop.ERROR and trajectory.error.startswith("env: RuntimeError:")
        assert sentence in trajectory.error and trajectory.reward is None


def test_an_agent_that_calls_for_ever_is_ended_at_its_last_turn(world: World) -> None:
    group = world.play(world.agent(agents.for_ever, calls=3), size=2)
    assert [len(t.turns) for t in group.trajectories] == [3, 3]
    assert all(t.stop is not Stop.ERROR for t in group.trajectories) and world.counters["agent/refused"] == 2


class Silent:
    """An engine that computes its first ``calls`` answers and hands none of them out."""

    def __init__(self, engine: LocalEngine, calls: int) -> None:
        self._engine, self._calls, self.freed = engine, calls, 0

    def publish(self, adapters: Any, version: int) -> None:
        raise AssertionError

    async def generate(self, requests: Any) -> Any:
        self._calls -= 1
        if self._calls < 0:
            async for pair in self._engine.generate(requests):
                yield pair
            return
        try:
            async for _ in self._engine.generate(requests):
                await asyncio.Event().wait()
        finally:
            self.freed += 1


def test_an_agent_that_hangs_up_frees_its_sequence_and_goes_on(world: World) -> None:
    """What had no caller any more was computed to its end, and its tokens were trained on."""
    engine, world.engine = world.engine, Silent(world.engine, 2)  # type: ignore[assignment]
    for seed in (4, 5):  # a stream, and none
        prompt = Prompt(uid="p", messages=PROMPT.messages, columns={"seed": seed})
        world.engine._calls = 2  # type: ignore[attr-defined]
        group = world.play(world.agent(agents.hangs_up), prompt, size=2)
        assert [len(t.turns) for t in group.trajectories] == [2, 2]
        assert all(t.env_reward == 1.0 and t.stop is not Stop.ERROR for t in group.trajectories)
        assert all(t.turns[0].completion.stop is not Stop.ABORT for t in group.trajectories)
    assert world.counters["agent/left"] == world.engine.freed == 4  # type: ignore[attr-defined]
    assert not engine.under_way()
    whole = World.play(world, world.agent(agents.plain), size=1).trajectories[0]
    assert (
        whole.turns[0].completion.tokens.tolist() == group.trajectories[0].turns[0].completion.tokens.tolist()
    )


def test_an_agent_that_only_hangs_up_is_a_fault(world: World) -> None:
    world.engine = Silent(world.engine, 9)  # type: ignore[assignment]
    (trajectory,) = world.play(world.agent(agents.only_hangs_up), size=1).trajectories
    assert "the agent hung up on every call" in trajectory.error and trajectory.reward is None


def test_two_writers_of_a_rollout_are_answered_one_by_one_and_one_reward_counts(world: World) -> None:
    kept: list[float] = []
    prompt = Prompt(uid="p", messages=PROMPT.messages, columns={"seed": 5, "kept": kept})
    (trajectory,) = world.play(world.agent(agents.two_writers), prompt, size=1).trajectories
    assert len(trajectory.turns) == 3 and [trajectory.env_reward] == kept


def test_a_rollout_that_has_ended_is_not_there(world: World, server: AgentServer) -> None:
    import httpx2

    world.play(world.agent(agents.plain), size=1)
    from ostinato.apps.serve.server import format_address

    base = format_address(server._listening)
    reply = httpx2.post(f"{base}/rollout/1/v1/reward", json={"value": 1})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "rollout_not_found"
    assert not server._episodes
