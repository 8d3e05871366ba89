"""The tasks of a recipe that agents play (``task.agent``): their server, and an episode for each prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.agents import AgentEpisode, ChatMemory, load_agent
from ostinato.apps.serve.elsewhere import Place
from ostinato.apps.serve.server import choose_key
from ostinato.config import Recipe
from ostinato.config.tasks import REMOTE, VERIFIERS, OneTask
from ostinato.protocols import Env
from ostinato.render import Renderer
from ostinato.types import Prompt

log = logging.getLogger(__name__)


class ServedTasks:
    """Episodes on ``server``, which ends with ``close``."""

    def __init__(self, server: AgentServer) -> None:
        self._server = server

    def make_episodes(
        self, task: OneTask, counters: Counter[str], new_memory: Callable[[], ChatMemory] | None
    ) -> Callable[[Prompt], Env]:
        """Return a function that makes the episode of a prompt."""
        if task.agent == REMOTE:
            agent = self._server.remote_rollouts.wait_for_worker
        elif task.agent_url:
            agent = partial(self._server.remote_rollouts.send_rollout, task.agent_url)
        else:
            agent = load_agent(task.agent, task.agent_command, task.env_params)

        is_verifiers = task.agent.startswith(VERIFIERS)  # such an agent may wait until others have ended
        silence_s = task.agent_wait_s if is_verifiers else task.agent_silence_s

        def make_episode(prompt: Prompt) -> Env:
            return AgentEpisode(
                self._server,
                agent,
                prompt,
                max_calls=task.max_turns,
                silence_s=silence_s,
                counters=counters,
                is_queued=task.agent == REMOTE,
                chat=new_memory() if new_memory else None,
            )

        return make_episode

    def close(self) -> None:
        self._server.close()


def open_agents(recipe: Recipe, renderer: Renderer) -> ServedTasks:
    """Open the server that the recipe's agents call. Raises ValueError for an agent that does not exist, or
    without a chat template."""
    tasks = [task for task in recipe.task.by_name.values() if task.has_agent]
    for task in tasks:
        if not task.agent_elsewhere:
            load_agent(task.agent, task.agent_command, task.env_params)  # raises ValueError if there is none
    if not renderer.has_chat_template:
        raise ValueError(f"task.agent needs a chat template, and {renderer.folder} has none")
    task, place = tasks[0], Place()  # the others have the same place
    if any(entry.agent_elsewhere for entry in tasks):
        key = choose_key(task.agent_host, "task.agent_host")
        place = Place(host=task.agent_host, port=task.agent_port, address=task.agent_address, key=key)
    server = AgentServer(renderer, place, calls=task.agent_tool_calls, wait_s=task.agent_wait_s)
    if any(entry.agent == REMOTE for entry in tasks):
        log.info("agents fetch rollouts at %s/rollouts/next", server.address)
    return ServedTasks(server)
