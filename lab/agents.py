"""``ostinato bench agents``: what it costs that an agent plays, through OpenAI's client and HTTP, and no
environment in the process.

    built-in   an ``EnvEpisode`` that replies to every answer
    agent      the same replies, from a coroutine with OpenAI's client at the address of its rollout

Both play the same episodes: tokens and log-probabilities are compared in every round, to the bit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from lab.harness import Bench, Result, Say, columns, option
from lab.paired import alternate
from lab.settings import Clock, faster_dtype, folder_of
from lab.turns import FullMarks, Patient, prefill
from ostinato.env.custom import EnvEpisode, seeds
from ostinato.launch.engine import AnyEngine
from ostinato.launch.policy import load_policy, serve
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play
from ostinato.types import Group, Prompt, Sampling


class Talk:
    """Replies with a number to each of ``turns`` answers."""

    turns = 4

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self._left = self.turns
        return f"Compute: {seed % 97} + {seed % 89}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return f"And {len(action) % 10} more?", 0.0, self._left == 0, False, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(Bench):
    """``prompts`` times ``siblings`` episodes at once, of 4 answers of at most ``answer_tokens``."""

    models: tuple[str, ...] = option(("asset:seed-moe", "smollm2-135m"), "With commas.")
    prompts: int = option(16, "Of episodes, with four siblings each.")
    siblings: int = 4
    answer_tokens: int = option(32, "Of an answer, at most.")
    rounds: int = option(9, "Of both in turn.")
    least_s: float = 1.0
    clock: Clock = option(Clock.WALL, "cpu where others use the machine too.")

    def quick(self) -> Agents:
        return replace(self, prompts=2, rounds=2, least_s=0.0)

    def measure(self, say: Say) -> dict[str, Any]:
        found = {}
        for model in self.models:
            found[model] = self._of(model)
            say(f"{model}: agent / built-in {found[model]['ratio']:.3f} in seconds")
        return {"models": found}

    def _of(self, model: str) -> dict[str, Any]:
        from ostinato.apps.serve.agent_server import AgentServer
        from ostinato.apps.serve.agents import AgentEpisode

        policy = load_policy(model, f"model.dtype={faster_dtype(folder_of(model))}")
        engine, server = serve(policy), AgentServer(policy.renderer)
        stop_tokens, played = policy.renderer.stop_tokens, dict[str, list[Group]]()
        limits = {"max_calls": Talk.turns, "silence_s": 600.0}
        episodes: dict[str, Callable[[Prompt], Any]] = {
            "built-in": lambda one: EnvEpisode(one, policy.renderer, Talk, Talk.turns),
            "agent": lambda one: AgentEpisode(server, talk, one, counters=Counter[str](), **limits),
        }

        def rollouts(name: str) -> Callable[[], None]:
            def run() -> None:
                played[name] = self._play(engine, episodes[name], stop_tokens)
                if len(played) == 2 and tokens_of(played["agent"]) != tokens_of(played["built-in"]):
                    raise ValueError(f"{model}: the agent has played other episodes than the environment")

            return run

        try:
            pair = alternate(
                rollouts("built-in"), rollouts("agent"), self.rounds, self.clock.read, self.least_s
            )
        finally:
            server.close()
        trajectories = [t for group in played["agent"] for t in group.trajectories]
        return pair.figures() | {"episodes": len(trajectories), "prefill": prefill(trajectories)}

    def _play(self, engine: AnyEngine, env: Callable[[Prompt], Any], stop: tuple[int, ...]) -> list[Group]:
        engine.publish(None, engine.version + 1)  # forgets the prefix tree
        stage = RolloutContext(
            engine=Patient(engine),
            env=env,
            grader=FullMarks(),
            sampling=Sampling(max_tokens=self.answer_tokens, stop_tokens=stop),
            context_limit=engine.context_limit,
        )
        requests = [
            RolloutRequest(prompt=prompt, seed=(0, 1, number), group_size=self.siblings, step=1)
            for number, prompt in enumerate(seeds(Talk, "Talk", "train", 0, self.prompts))
        ]
        return [one.group for one in asyncio.run(play(stage, requests))]

    @staticmethod
    def table(result: Result) -> Table:
        names = ("model", "built-in s", "agent s", "agent / built-in", "tokens run again")
        rows = []
        for model, f in result["models"].items():
            ratio = f"{f['ratio']:.3f} ({f['low']:.3f} to {f['high']:.3f})"
            rows.append((model, f["base_s"], f["other_s"], ratio, f["prefill"]["run_again"]))
        return columns("An agent with OpenAI's client, and the same episodes built in", names, rows)


async def talk(base_url: str, row: Mapping[str, Any]) -> None:
    """``Talk`` through OpenAI's client."""
    game, client = Talk(), _client().with_options(base_url=base_url)
    messages: list[Any] = [{"role": "user", "content": game.reset(seed=row["seed"], options={})[0]}]
    while True:
        message = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        reply, _, ended, *_ = game.step(message.content or "")
        if ended:
            return
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": reply}]


_CLIENTS: dict[int, Any] = {}


def _client() -> Any:
    """One for all rollouts of an event loop: making one takes long."""
    from openai import AsyncOpenAI

    loop = id(asyncio.get_running_loop())
    if loop not in _CLIENTS:
        _CLIENTS[loop] = AsyncOpenAI(api_key="none", base_url="http://unused", max_retries=0)
    return _CLIENTS[loop]


def tokens_of(groups: list[Group]) -> list[Any]:
    """Tokens and log-probabilities of every answer."""
    turns = [turn.completion for group in groups for t in group.trajectories for turn in t.turns]
    return [(one.tokens.tolist(), one.logprobs.tolist()) for one in turns]
