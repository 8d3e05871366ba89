"""The applications that a recipe can name, by what names them: the core imports none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from ostinato.config.tasks import OneTask
from ostinato.env.dialogue import Words
from ostinato.protocols import Env
from ostinato.types import Prompt

APPS = {
    "task.agent": "ostinato.apps.serve.agent_tasks:open_agents",
    "verifiers:": "ostinato.apps.serve.verifiers:VerifiersAgent",
    "task.memory": "ostinato.apps.memory.conversations:conversations",
    "judge:": "ostinato.apps.product.panel:scorers",
    "judge revisions": "ostinato.apps.product.judges:pinned",
    "forecast": "ostinato.apps.scaling.forecast:new_forecaster",
}


class EpisodeMemory(Protocol):
    """What keeps the contexts of one episode within a budget."""

    def renderer(self, renderer: Words) -> Words: ...


class AgentTasks(Protocol):
    """Episodes that agents play through a server of this process."""

    def episodes(
        self, task: OneTask, counters: Counter[str], new_memory: Callable[[], EpisodeMemory] | None
    ) -> Callable[[Prompt], Env]: ...

    def close(self) -> None: ...


def load(name: str) -> Callable[..., Any]:
    """The function of the application that is named by ``name``, a key of ``APPS``. ModuleNotFoundError
    where a package that it needs is not installed."""
    module, _, function = APPS[name].partition(":")
    return getattr(import_module(module), function)
