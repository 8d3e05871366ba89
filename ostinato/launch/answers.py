"""Answers of a policy to prompts, from Python.

Nothing heavy is imported at the top: threads have to be chosen before torch is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.config.tasks import OneTask
from ostinato.env.rows import to_chat
from ostinato.env.tasks import add_system_prompt
from ostinato.launch import threads
from ostinato.launch.models import recipe_of
from ostinato.launch.policy import load_policy, serve
from ostinato.model.generation import sampling_defaults
from ostinato.types import Prompt, Request, Sampling, Stop

if TYPE_CHECKING:
    from ostinato.launch.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How a user wants to sample; None: as the model's generation_config.json says."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int

    def sampling(self, policy: Policy) -> Sampling:
        own = sampling_defaults(policy.folder)
        return Sampling(
            temperature=own.temperature if self.temperature is None else self.temperature,
            top_p=own.top_p if self.top_p is None else self.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            max_tokens=self.max_tokens,
            stop_tokens=policy.renderer.stop_tokens,
        )


def answer(
    target: str, prompts: Sequence[str | Sequence[Mapping[str, Any]]], options: SamplingOptions
) -> list[str]:
    """The texts with which ``target``, a run folder, a recipe or a model, answers ``prompts``: rendered as
    rows of its task are: a text as it is, or with ``task.params.chat`` as what a user says; messages by the
    chat template, with ``task.system_prompt`` in front.

    Raises ValueError for a prompt that leaves no room for an answer, RuntimeError when the engine fails.
    """
    threads.configure(recipe_of(target)[0])
    policy = load_policy(target)
    engine, sampling = serve(policy), options.sampling(policy)
    rows = [_prompt(prompt, f"prompt-{idx}", policy.recipe.task) for idx, prompt in enumerate(prompts)]
    requests = [
        Request(tokens=policy.renderer.prompt(row), sampling=sampling, seed=(options.seed, idx))
        for idx, row in enumerate(rows)
    ]

    async def run() -> list[str]:
        texts = [""] * len(requests)
        async for idx, completion in engine.generate(requests):
            if completion.stop is Stop.ERROR:
                raise RuntimeError(completion.error)
            texts[idx] = completion.text
        return texts

    return asyncio.run(run())


def _prompt(prompt: str | Sequence[Mapping[str, Any]], uid: str, task: OneTask) -> Prompt:
    row = Prompt(uid=uid, text=prompt) if isinstance(prompt, str) else Prompt(uid=uid, messages=tuple(prompt))
    row = to_chat(row) if task.params.get("chat") else row
    return add_system_prompt(row, task.system_prompt) if task.system_prompt else row
