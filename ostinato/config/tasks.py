"""The tasks of a recipe: where prompts come from, and what an episode is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ostinato.config.fields import Code, Count, Names, PathKind, Positive, Rewards, RowsName, Section, Seed

REMOTE = "remote"  # as task.agent: workers elsewhere fetch the rollouts
VERIFIERS = "verifiers:"  # as task.agent, in front of the id of a taskset of the library verifiers


class OneTask(Section):
    """Where prompts come from, and what an episode is."""

    source: RowsName = "arithmetic"
    n_train: Count = 4096  # 0: every row of a file
    params: dict[str, Any] = Field(default_factory=dict)  # of the source
    columns: dict[str, Any] = Field(default_factory=dict)  # for rewards, in every row that lacks them
    system_prompt: str = ""
    overlong: Literal["refuse", "filter"] = "refuse"  # rows whose prompt leaves no room for an answer
    max_turns: Positive = 1
    tools: Annotated[Names, PathKind.CODE] = ()  # "calculator", "file.py:function", "mcp:COMMAND or URL"
    env: Code = ""  # an environment of your own, "module:Class", "file.py:Class" (docs/guide/environment.md)
    env_params: dict[str, Any] = Field(
        default_factory=dict
    )  # what the class is made with; [env] of verifiers
    memory: bool = False  # contexts of an episode stay within memory.budget (docs/memory.md)
    agent: Code = ""  # "module:function", "file.py:function" (OpenAI client), "verifiers:ID" or "remote"
    agent_command: Annotated[Names, PathKind.WORD] = ()  # the same as a command line
    agent_url: str = ""  # of a service that plays a rollout for each POST
    agent_tool_calls: Literal["json", "equals"] = "json"  # how the model writes them (docs/agents.md)
    agent_silence_s: Annotated[float, Field(gt=0)] = 60.0  # between two calls of an agent
    agent_wait_s: Annotated[float, Field(gt=0)] = 600.0  # to be fetched ("remote"); calls of verifiers
    agent_host: str = "127.0.0.1"  # that agents elsewhere reach; another one needs $OSTINATO_API_KEY
    agent_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any that is free
    agent_address: str = ""  # http://name:port, where agents have another one than host and port

    @model_validator(mode="before")
    @classmethod
    def _choose_source(cls, keys: Any) -> Any:
        """An environment is given seeds where no other source is named."""
        is_env = isinstance(keys, Mapping) and keys.get("env") and "source" not in keys
        return {**keys, "source": "seeds"} if is_env else keys

    @property
    def rows_from(self) -> str:
        """What the prompts are named by: the source, or the taskset of an agent."""
        return self.agent if self.agent.startswith(VERIFIERS) else self.source

    @property
    def has_agent(self) -> bool:
        return bool(self.agent or self.agent_command or self.agent_url)

    @property
    def agent_elsewhere(self) -> bool:
        return self.agent == REMOTE or bool(self.agent_url)


class MixedTask(OneTask):
    """One task of a mixture, with the keys of ``[task]`` beside these. Its prompts come in the order of its
    own epochs, and take ``weight`` / (sum of all weights) of the places of the stream, evenly spread."""

    name: str  # in metrics, scores, and in front of the uids of its prompts
    weight: Annotated[float, Field(gt=0)] = 1.0
    rewards: Rewards = ()  # those of reward.functions that judge it; empty: all


class TaskSection(OneTask):
    """``source``: "arithmetic", "gym:<name>", a .jsonl, .csv or .parquet file, a dataset folder, "hf:<name>",
    or "seeds": numbers for ``env``, the default with one. With tables ``[[task.mix]]`` these have the keys,
    but for ``seed``."""

    seed: Seed = 0  # of prompts and their order
    mix: Annotated[tuple[MixedTask, ...], Field(strict=False)] = ()  # several tasks, as below

    @property
    def by_name(self) -> dict[str, OneTask]:
        """The tasks of the mixture; without one this task, under the name ""."""
        return {task.name: task for task in self.mix} or {"": self}

    @model_validator(mode="after")
    def _check(self) -> TaskSection:
        names = [one.name for one in self.mix]
        if bad := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(f"task.mix has the name {bad[0]!r}; use letters, digits, '.', '_' and '-'")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"task.mix has the name {twice[0]!r} twice; give each task its own")
        for key, field in OneTask.model_fields.items() if self.mix else ():
            value = getattr(self, key)
            if value != field.get_default(call_default_factory=True):
                raise ValueError(
                    f"task.{key} is {value!r} beside task.mix, whose tasks have their own; move it into one"
                )
        return self
