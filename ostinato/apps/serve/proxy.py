"""``ostinato proxy``: an address for each rollout of an agent, in front of a policy, without a trainer.

    agent --{address}/rollout/{any id}/v1/...--> AgentServer --> AgentEpisode --> the engine of launch.served

The first request under an id begins its rollout, the posted end or a silence ends it, and then a row as in
trajectories.jsonl.zst is written. The id is the seed: the same id and the same replies of tools give the same
tokens under the same policy.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.agents import AgentEpisode
from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.elsewhere import Place
from ostinato.apps.serve.served import Served, Serving, follow, open_service
from ostinato.apps.serve.service import Limits
from ostinato.apps.serve.thread import EngineThread
from ostinato.config import Recipe
from ostinato.launch.inputs import load, sampling_of
from ostinato.protocols import Grader
from ostinato.rollout.rollout import RolloutContext, play_episode
from ostinato.run import JsonlZst, group_rows
from ostinato.types import Completion, Group, Prompt, Request, Reward

log = logging.getLogger(__name__)
REQUEST_S = 3600.0  # of one answer


@dataclass(frozen=True, slots=True)
class _Engine:
    """A policy in its thread, as a ``protocols.Engine`` of another event loop."""

    thread: EngineThread
    policy: str

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        mine = [replace(request, policy=self.policy) for request in requests]
        async for index, event in self.thread.generate(mine, REQUEST_S):
            if isinstance(event, Completion):
                yield index, event

    def publish(self, adapters: Any, version: int) -> None:
        raise NotImplementedError("the proxy follows the run itself")


class Proxy:
    """Rollouts by id, played and written as they end; ``idle_s`` without a call ends one."""

    def __init__(self, served: Served, recipe: Recipe, out: JsonlZst, place: Place, idle_s: float) -> None:
        self.written = self.lost = 0
        self._served, self._recipe, self._out, self._idle_s = served, recipe, out, idle_s
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._over: set[str] = set()
        self._loop, self._renderer = asyncio.get_running_loop(), served.service.renderer
        calls = recipe.task.agent_tool_calls
        self._server = AgentServer(self._renderer, place, calls=calls, opened=self._opened)
        memory = recipe.task.memory
        chats = load("task.memory")(recipe.memory, self._renderer, Counter()) if memory else lambda: None
        self._new_chat = chats
        self._stage = RolloutContext(
            engine=_Engine(served.thread, served.service.model("").policy),
            env=self._episode,
            grader=cast(Grader, None),  # rewards are posted
            sampling=sampling_of(recipe.rollout, self._renderer),
            context_limit=served.service.limits.context,
        )

    async def run(self, until: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until the event; ``ready`` gets the address. What is open then is written as it is."""
        following = asyncio.create_task(follow(self._served))
        try:
            ready(self._server.address)
            await until.wait()
        finally:
            following.cancel()
            for id_ in self._playing:
                self._server.finish(id_)
            await asyncio.gather(*self._playing.values(), return_exceptions=True)
            self._server.close()

    def _episode(self, prompt: Prompt) -> AgentEpisode:
        async def agent(base_url: str, row: Mapping[str, Any]) -> float | None:
            """Of another program, of which only calls and the end are seen."""
            return await self._server.elsewhere.end_of(base_url, lambda: episode.silent_s > self._idle_s)

        limits: dict[str, Any] = {"max_calls": float("inf"), "silence_s": None, "chat": self._new_chat()}
        episode = AgentEpisode(self._server, agent, prompt, counters=Counter[str](), id_=prompt.uid, **limits)
        return episode

    async def _opened(self, id_: str) -> None:
        """Called in the server's thread: begin the rollout of a new id. ApiError 410 after its end."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._open(id_), self._loop))

    async def _open(self, id_: str) -> None:
        if id_ in self._over:
            raise ApiError(f"rollout {id_!r} has ended; use a new id", status=410, code="rollout_ended")
        if id_ not in self._playing:
            self._playing[id_] = asyncio.create_task(self._play(id_))
        while id_ in self._playing and not self._server.has(id_):
            await asyncio.sleep(0)

    async def _play(self, id_: str) -> None:
        address = int.from_bytes(hashlib.sha256(id_.encode()).digest()[:4], "big") >> 1
        try:
            played = await play_episode(self._stage, Prompt(uid=id_, text=""), (self._recipe.seed, address))
            if played.turns:
                text = self._renderer.decode(played.turns[0].context, skip_special=False)
                versions = [version for turn in played.turns for version in turn.completion.versions.tolist()]
                reward = Reward(value=played.env_reward)
                group = Group(
                    prompt=Prompt(uid=id_, text=text),
                    trajectories=(replace(played, reward=reward),),
                    step=max(versions, default=0),
                )
                self._out.append(*group_rows(group))
                self.written += 1
        except Exception:  # the engine's: the rollout is lost, and the others go on
            log.exception("rollout %s is not written", id_)
            self.lost += 1
        finally:
            self._over.add(id_)
            del self._playing[id_]


def proxy(
    target: str, recipe: Recipe, overrides: Sequence[str], *, out: Path, place: Place, idle_s: float
) -> None:
    """Serve rollouts of ``target`` until SIGTERM or Ctrl-C. Raises ValueError for what cannot be served."""
    out.parent.mkdir(parents=True, exist_ok=True)

    async def run() -> Proxy:
        end = asyncio.Event()
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, end.set)
        made = Proxy(served, recipe, JsonlZst(out), place, idle_s)
        await made.run(end, lambda at: print(f"address {at}/rollout/ID/v1 (Ctrl-C ends it)", flush=True))
        return made

    serving = Serving(target=target, overrides=tuple(overrides), limits=Limits(context=0))
    with open_service(serving) as served:
        made = asyncio.run(run())
        print(f"{made.written} rollouts in {out}" + (f", {made.lost} lost" if made.lost else ""))
