"""``ostinato proxy``: serve a policy at an address for each rollout of an agent, without a trainer.

    agent --{address}/rollout/{any id}/v1/...--> AgentServer --> AgentEpisode --> the engine of launch.served

The first request under an id begins its rollout. The posted end, or a time without calls, ends the rollout,
and then a row as in trajectories.jsonl.zst is written. The id is the seed: the same id and the same replies
of tools give the same tokens under the same policy.
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
from ostinato.apps.serve.served import RunningService, ServiceSpec, follow_runs, open_service
from ostinato.apps.serve.service import Limits
from ostinato.config import Recipe
from ostinato.engine.engine_thread import EngineThread
from ostinato.launch.engine import AnyEngine
from ostinato.launch.inputs import load_app, make_sampling
from ostinato.protocols import Grader
from ostinato.rollout.rollout import RolloutContext, play_episode
from ostinato.run import JsonlZst, group_rows
from ostinato.types import Completion, Group, Prompt, Request, Reward

log = logging.getLogger(__name__)
REQUEST_S = 3600.0  # for an answer


@dataclass(frozen=True, slots=True)
class _Engine:
    """A policy in its thread, as a ``protocols.Engine`` for another event loop."""

    thread: EngineThread[AnyEngine]
    policy: str

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        policy_requests = [replace(request, policy=self.policy) for request in requests]
        async for index, event in self.thread.generate(policy_requests, REQUEST_S):
            if isinstance(event, Completion):
                yield index, event

    def publish(self, adapters: Any, version: int) -> None:
        raise NotImplementedError("the proxy follows the run itself")


class Proxy:
    """Rollouts by id, which are written as they end; ``idle_s`` without a call ends a rollout."""

    def __init__(
        self, served: RunningService, recipe: Recipe, out: JsonlZst, place: Place, idle_s: float
    ) -> None:
        self.num_written = self.num_lost = 0
        self._served, self._recipe, self._out, self._idle_s = served, recipe, out, idle_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended_ids: set[str] = set()
        self._loop, self._renderer = asyncio.get_running_loop(), served.service.renderer
        calls = recipe.task.agent_tool_calls
        self._server = AgentServer(self._renderer, place, calls=calls, open_rollout=self._begin_rollout)
        memory = recipe.task.memory
        chats = load_app("task.memory")(recipe.memory, self._renderer, Counter()) if memory else lambda: None
        self._new_chat = chats
        self._context = RolloutContext(
            engine=_Engine(served.thread, served.service.find_model("").policy),
            env=self._make_episode,
            grader=cast(Grader, None),  # rewards are posted
            sampling=make_sampling(recipe.rollout, self._renderer),
            context_limit=served.service.limits.context,
        )

    async def run(self, until: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until the event; ``ready`` gets the address. Open rollouts are then written as they are."""
        follower = asyncio.create_task(follow_runs(self._served))
        try:
            ready(self._server.address)
            await until.wait()
        finally:
            follower.cancel()
            for id_ in self._tasks:
                self._server.finish_rollout(id_)
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._server.close()

    def _make_episode(self, prompt: Prompt) -> AgentEpisode:
        async def wait_for_end(base_url: str, row: Mapping[str, Any]) -> float | None:
            """Wait for the end of another program, whose calls and end are all that the proxy gets."""
            return await self._server.remote_rollouts.wait_for_end(
                base_url, lambda: episode.silent_s > self._idle_s
            )

        limits: dict[str, Any] = {"max_calls": float("inf"), "silence_s": None, "chat": self._new_chat()}
        episode = AgentEpisode(
            self._server, wait_for_end, prompt, counters=Counter[str](), id_=prompt.uid, **limits
        )
        return episode

    async def _begin_rollout(self, id_: str) -> None:
        """Begin the rollout of a new id, from the server's thread. Raises ApiError 410 after its end."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._wait_for_rollout(id_), self._loop))

    async def _wait_for_rollout(self, id_: str) -> None:
        if id_ in self._ended_ids:
            raise ApiError(f"rollout {id_!r} has ended; use a new id", status=410, code="rollout_ended")
        if id_ not in self._tasks:
            self._tasks[id_] = asyncio.create_task(self._play(id_))
        while id_ in self._tasks and not self._server.has_rollout(id_):
            await asyncio.sleep(0)

    async def _play(self, id_: str) -> None:
        """Play a rollout and write it; count it as lost where the engine fails."""
        address = int.from_bytes(hashlib.sha256(id_.encode()).digest()[:4], "big") >> 1
        try:
            trajectory = await play_episode(
                self._context, Prompt(uid=id_, text=""), (self._recipe.seed, address)
            )
            if trajectory.turns:
                text = self._renderer.decode(trajectory.turns[0].context, skip_special=False)
                versions = [
                    version for turn in trajectory.turns for version in turn.completion.versions.tolist()
                ]
                reward = Reward(value=trajectory.env_reward)
                group = Group(
                    prompt=Prompt(uid=id_, text=text),
                    trajectories=(replace(trajectory, reward=reward),),
                    step=max(versions, default=0),
                )
                self._out.append(*group_rows(group))
                self.num_written += 1
        except Exception:  # of the engine: this rollout is lost, and the others go on
            log.exception("rollout %s is not written", id_)
            self.num_lost += 1
        finally:
            self._ended_ids.add(id_)
            del self._tasks[id_]


def record_rollouts(
    target: str, recipe: Recipe, overrides: Sequence[str], *, out: Path, place: Place, idle_s: float
) -> None:
    """Serve rollouts of ``target`` until SIGTERM or Ctrl-C. Raises ValueError if it cannot be served."""
    out.parent.mkdir(parents=True, exist_ok=True)

    async def run() -> Proxy:
        end = asyncio.Event()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, end.set)
        server = Proxy(served, recipe, JsonlZst(out), place, idle_s)
        await server.run(end, lambda url: print(f"address {url}/rollout/ID/v1 (Ctrl-C ends it)", flush=True))
        return server

    serving = ServiceSpec(target=target, overrides=tuple(overrides), limits=Limits(context=0))
    with open_service(serving) as served:
        server = asyncio.run(run())
        print(
            f"{server.num_written} rollouts in {out}"
            + (f", {server.num_lost} lost" if server.num_lost else "")
        )
