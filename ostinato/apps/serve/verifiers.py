"""Environments of the library verifiers, as they are: their tasks are rows, their episodes are agents.

    [task]
    agent = "verifiers:ID"        # a taskset that verifiers finds: an installed package, a module
    env_params = {agent = {harness = {id = "bash"}, runtime = {type = "docker"}}}     # its block [env]

A harness reaches the policy by the address of its rollout, as any agent. The default runtime is
"subprocess", a process of this machine. The library is imported only in this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ostinato.apps.serve.elsewhere import MODEL
from ostinato.config.tasks import VERIFIERS
from ostinato.env.rows import compute_holdout_mask
from ostinato.types import Prompt

KEY_VARIABLE = "OSTINATO_VERIFIERS_KEY"  # the library reads its key from this variable, which is not set
MAX_EPISODES = (
    16  # episodes: each starts a server and clients of its own, some tenths of a second of the processor
)
MAX_PROMPT_LETTERS = 500  # characters of a task's prompt in a row


class VerifiersAgent:
    """The taskset ``id``: its tasks as rows, and the agent that plays them."""

    def __init__(self, spec: str, params: Mapping[str, Any]) -> None:
        """``spec`` is "verifiers:ID". Raises ValueError where the library or the taskset is missing, or its
        block [env] is wrong."""
        self._spec, self._places = spec, asyncio.Semaphore(MAX_EPISODES)
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ModuleNotFoundError as error:
            raise ValueError(
                f"task.agent {spec!r} needs {error.name}; install it: pip install verifiers"
            ) from error
        block = {
            **params,
            "taskset": {"id": spec.removeprefix(VERIFIERS), **params.get("taskset", {})},
            "agent": {"runtime": {"type": "subprocess"}, **params.get("agent", {})},
        }
        try:
            config = resolve_env_config(block)
            self._load_environment = lambda: load_environment(
                config
            )  # for each episode, as it holds the episode's servers
            taskset = self._load_environment().taskset
            if not taskset.bounded:
                raise ValueError("its taskset is endless; give it a bound in task.env_params.taskset")
            self.tasks = list(taskset)
        except Exception as error:  # a user's code, and pydantic's reports of several lines
            raise ValueError(
                f"task.agent {spec!r} with {dict(params)} raised {type(error).__name__}: {error}"
            ) from error

    def rows(self, split: str, n: int | None, *, holdout: float = 0.1) -> list[Prompt]:
        """Return the tasks of ``split`` as rows: the question, for display, and the index."""
        uids = [f"{self._spec}/{index}" for index in range(len(self.tasks))]
        prompts = [str(task.data.prompt) for task in self.tasks]
        mask, texts = (
            compute_holdout_mask(prompts, holdout),
            [prompt[:MAX_PROMPT_LETTERS] for prompt in prompts],
        )
        rows = [
            Prompt(uid=uid, messages=({"role": "user", "content": text},), columns={"index": index})
            for index, (uid, text) in enumerate(zip(uids, texts, strict=True))
            if mask[index] == (split == "eval")
        ]
        if not rows:
            raise ValueError(
                f"task.agent {self._spec!r} has {len(mask)} tasks, none for {split}; set task.params.holdout"
            )
        return rows[:n]

    async def play(self, base_url: str, row: Mapping[str, Any]) -> float:
        """Play the task with the row's index, and return the sum of its weighted rewards. Raises RuntimeError
        for an episode that failed."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        env = self._load_environment()
        client = EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        async with self._places, env.serving():
            (slot,) = env.slots(self.tasks[row["index"]])
            episode = await env.run_slot(slot, ModelContext(model=MODEL, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in errors) or "it has failed"
            )
        return float(sum(trace.reward for trace in episode.traces))
