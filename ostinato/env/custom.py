"""A user's own environment, named by ``task.env``: a class with gymnasium's methods, on text.

    class Game:
        def __init__(self, **params): ...                    # task.env_params; one object for each episode
        def reset(self, *, seed, options): ...               # -> (what the policy reads first, info)
        def step(self, action: str): ...                     # -> (reply, reward, terminated, truncated, info)
        def close(self): ...                                 # optional
        tools = ("look",)                                    # optional: methods that the policy may call

``options`` are the columns of the row. A first text of "" means the row's own prompt. A reply that is a list
of messages starts a new conversation, without the earlier messages. The reward function ``env`` gives the sum
of the rewards of an episode. ``step`` and tools run in threads, each call within a time limit. An
error of ``step`` ends the episode as a counted fault, never as a reward of 0; that of a tool is its reply.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ostinato.env.dialogue import Words, answered
from ostinato.env.tools import Message, Toolbox, imported, in_time
from ostinato.types import Completion, NewRow, Prompt, Stop

SEEDS = "seeds"  # as task.source: the rows are seeds for ``reset``
STEP_S = 10.0


class TextEnv(Protocol):
    """The interface of the environments that ``task.env`` makes."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]: ...

    def step(self, action: str) -> tuple[str | Sequence[Message], float, bool, bool, Mapping[str, Any]]: ...


Factory = Callable[[], TextEnv]


def factory(spec: str, params: Mapping[str, Any]) -> Factory:
    """A function that makes one episode's environment. Raises ValueError if there is none or it fails."""
    make = imported(spec, "task.env", nearest="ostinato.env.games:GuessNumber")
    try:
        made = make(**params)
    except Exception as error:  # a user's code
        raise ValueError(
            f"task.env {spec!r} with {dict(params)} raised {type(error).__name__}: {error}"
        ) from error
    for name in ("reset", "step"):
        if not callable(getattr(made, name, None)):
            raise ValueError(f"task.env {spec!r} has no method {name}(); see docs/guide/environment.md")
    _close(made)
    return lambda: make(**params)


def seeds(make: Factory | None, spec: str, split: str, seed: int, n: int) -> list[Prompt]:
    """``n`` prompts of ``split``. Each is the first text of an environment reset with its own seed, or the
    seed itself if ``make`` is None (an agent has its own environment). The splits have different seeds;
    whether their games differ too is up to the environment."""
    prompts = []
    for k in range(n):
        number = int.from_bytes(hashlib.sha256(f"{split}/{seed}/{k}".encode()).digest()[:4], "big") >> 1
        text = str(number)
        if make is not None:
            made = make()
            text = _first(made, number, {"seed": number})
            _close(made)
        if not text:
            raise ValueError(
                f'task.env {spec!r}: reset() gives no text, and task.source = "seeds" has none either'
            )
        messages = ({"role": "user", "content": text},)
        prompts.append(Prompt(uid=f"env/{split}/{number}", messages=messages, columns={"seed": number}))
    return prompts


def _first(made: TextEnv, seed: int, options: Mapping[str, Any]) -> str:
    found = made.reset(seed=seed, options=options)
    text = found[0] if isinstance(found, tuple) else found
    if not isinstance(text, str):
        raise TypeError(f"reset() gives a {type(text).__name__}; return (text, info)")
    return text


def _close(made: TextEnv) -> None:
    close = getattr(made, "close", None)
    if callable(close):
        close()


class EnvEpisode:
    """One episode on ``prompt`` in an environment made by ``make``: at most ``max_turns`` answers.

    ``reward`` is the sum of the rewards so far. ``counters``: ``env/steps`` and those of ``Toolbox``.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: Words,
        make: Factory,
        max_turns: int,
        *,
        timeout_s: float = STEP_S,
        counters: Counter[str] | None = None,
    ) -> None:
        self.reward = 0.0
        self._prompt, self._renderer, self._turns_left = prompt, renderer, max_turns
        self._timeout_s, self._counters = timeout_s, Counter() if counters is None else counters
        self._env: TextEnv | None = make()
        tools = {name: getattr(self._env, name) for name in getattr(self._env, "tools", ())}
        self._tools = Toolbox(tools, timeout_s, self._counters)
        self._messages: list[Message] = []

    def start(self) -> np.ndarray:
        """[P] int32: the context of turn 0."""
        assert self._env is not None and self._prompt.messages is not None
        columns, given = self._prompt.columns, list(self._prompt.messages)
        seed = int.from_bytes(hashlib.sha256(self._prompt.uid.encode()).digest()[:4], "big") >> 1
        text = _first(self._env, int(columns.get("seed", seed)), columns)
        last = len(given) - 1 - (self._prompt.prefill is not None)  # the assistant's words stay behind it
        chat = [*given[:last], {"role": "user", "content": text}, *given[last + 1 :]] if text else given
        self._messages = list(self._tools.described(chat) if len(self._tools) else chat)
        return self._renderer.prompt(replace(self._prompt, messages=tuple(self._messages)))

    async def step(self, completion: Completion) -> np.ndarray | NewRow | None:
        """[C] int32: replies of tools, or of the environment; None when the episode is over."""
        self._turns_left -= 1
        if completion.stop not in (Stop.EOS, Stop.STRING):
            return None
        replies = await self._tools.replies(completion.text)
        over, fresh = False, list[Message]()
        if not replies:
            assert self._env is not None
            self._counters["env/steps"] += 1
            action = completion.text
            if completion.stop is Stop.STRING:  # the stop string is part of the action
                action = self._renderer.decode(completion.tokens)
            reply, reward, ended, cut, *_ = await in_time(self._env.step, {"action": action}, self._timeout_s)
            self.reward += float(reward)
            fresh = [] if isinstance(reply, str) else list(reply)
            replies, over = [{"role": "user", "content": reply}], bool(ended or cut)
        if over or not self._turns_left:
            return None
        if fresh:
            self._messages = fresh
            return NewRow(self._renderer.prompt(replace(self._prompt, messages=tuple(fresh))))
        self._messages, prompt = answered(self._messages, completion.text), self._prompt
        context = self._renderer.after_turn(
            self._messages, replies, completion.tokens, prompt.tools, prompt.template_kwargs
        )
        self._messages.extend(replies)
        return context

    def close(self) -> None:
        """Close the environment; later calls do nothing."""
        if self._env is not None:
            made, self._env = self._env, None
            _close(made)
