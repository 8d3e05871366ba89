"""A user's own environment, named by ``task.env``: a class with gymnasium's methods, on text.

    class Game:
        def __init__(self, **params): ...                    # task.env_params; one object for each episode
        def reset(self, *, seed, options): ...               # -> (the policy's first text, info)
        def step(self, action: str): ...                     # -> (reply, reward, terminated, truncated, info)
        def close(self): ...                                 # optional
        tools = ("look",)                                    # optional: methods that the policy may call

``options`` are the columns of the row. A first text of "" means the row's own prompt. A reply that is a list
of messages starts a new conversation, without the earlier messages. The reward function ``env`` gives the sum
of the rewards of an episode. All methods run in threads, each call within CALL_S, ``__init__`` and ``reset``
of one episode at a time; texts have at most MAX_CHARS. An error ends the episode as a counted fault, never as
a reward of 0; that of a tool is its reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ostinato.env.dialogue import ChatRenderer, continue_chat
from ostinato.env.rows import to_chat
from ostinato.env.tools import Message, Toolbox, call_in_time
from ostinato.inputs import has_surrogate
from ostinato.objects import load_named
from ostinato.threads import within
from ostinato.types import Completion, NewRow, Prompt, Stop

T = TypeVar("T")
SEEDS = "seeds"  # as task.source: the rows are seeds for ``reset``
CALL_S = 10.0  # for each call of a method
MAX_CHARS = 1_000_000  # of one text of an environment; tokenising more takes many seconds


class TextEnv(Protocol):
    """The interface of the environments that ``task.env`` makes."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]: ...

    def step(self, action: str) -> tuple[str | Sequence[Message], float, bool, bool, Mapping[str, Any]]: ...


Factory = Callable[[], TextEnv]


def make_factory(spec: str, params: Mapping[str, Any]) -> Factory:
    """Return a function that makes the environment of an episode. One environment is made, and closed, to
    check it. Raises ValueError if there is none of this name, or if it fails, is late, or lacks a method."""
    make = load_named(spec, "task.env", nearest="ostinato.env.games:GuessNumber")
    with _name_failures(spec, params):
        env = _call_in_time("__init__", lambda: make(**params))
    for name in ("reset", "step"):
        if not callable(getattr(env, name, None)):
            raise ValueError(f"task.env {spec!r} has no method {name}(); see docs/guide/environment.md")
    with _name_failures(spec, params):
        _call_in_time("close", lambda: _close_env(env))
    return lambda: make(**params)


@contextmanager
def _name_failures(spec: str, params: Mapping[str, Any]) -> Iterator[None]:
    """Turn every exception of a user's environment before a run into a ValueError with the environment's
    name."""
    try:
        yield
    except Exception as error:  # a user's code
        raise ValueError(
            f"task.env {spec!r} with {dict(params)} raised {type(error).__name__}: {error}"
        ) from error


def _call_in_time(method: str, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
    """Return what ``call`` returns. Raises TimeoutError with the name of the method, and what ``call``
    raises."""
    try:
        return within(call, timeout_s)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"{method}() has not returned in {timeout_s:g} s") from error


def make_seed_prompts(
    make: Factory | None, spec: str, split: str, seed: int, n: int, *, timeout_s: float = CALL_S
) -> list[Prompt]:
    """Make ``n`` prompts of ``split``. Each is the first text of an environment, which is made, reset with
    its own seed and closed; or the seed itself if ``make`` is None (an agent has its own environment). The
    splits have different seeds; whether their games differ too is up to the environment. Raises ValueError if
    an environment fails or gives no text."""
    prompts = []
    for number in range(n):
        env_seed = (
            int.from_bytes(hashlib.sha256(f"{split}/{seed}/{number}".encode()).digest()[:4], "big") >> 1
        )
        text = str(env_seed)
        if make is not None:
            with _name_failures(spec, {"seed": env_seed}):
                env = _call_in_time("__init__", make, timeout_s)
                text = _call_in_time(
                    "reset", partial(_reset_env, env, env_seed, {"seed": env_seed}), timeout_s
                )
                _call_in_time("close", partial(_close_env, env), timeout_s)
        if not text:
            raise ValueError(
                f'task.env {spec!r}: reset() gives no text, and task.source = "seeds" has none either'
            )
        messages = ({"role": "user", "content": text},)
        prompts.append(Prompt(uid=f"env/{split}/{env_seed}", messages=messages, columns={"seed": env_seed}))
    return prompts


def _reset_env(env: TextEnv, seed: int, options: Mapping[str, Any]) -> str:
    """Reset an environment and return its first text. Raises TypeError or ValueError if that is none."""
    observation = env.reset(seed=seed, options=options)
    return _check_text(
        observation[0] if isinstance(observation, tuple) and observation else observation, "reset"
    )


def _check_text(value: Any, method: str) -> str:
    """Return ``value``. Raises TypeError if it is no text, and ValueError if it is too long or has half of a
    surrogate pair."""
    if not isinstance(value, str):
        raise TypeError(f"{method}() gives a {type(value).__name__} as its text; return a str, as documented")
    if len(value) > MAX_CHARS:
        raise ValueError(f"{method}() gives {len(value):,} characters; at most {MAX_CHARS:,} are read")
    if has_surrogate(value):
        raise ValueError(f"{method}() gives half of a surrogate pair, which is no character; replace it")
    return value


def _close_env(env: TextEnv) -> None:
    """Call the environment's ``close``, if it has one."""
    close = getattr(env, "close", None)
    if callable(close):
        close()


class EnvEpisode:
    """One episode on ``prompt`` in an environment made by ``make``: at most ``max_turns`` answers.

    ``reward`` is the sum of the rewards so far; ``ended`` and ``last_reply`` as in ``Trajectory``.
    ``counters``: ``env/steps`` and those of ``Toolbox``.
    Episodes that share ``opening`` open one after another: an environment may seed the process's generators.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: ChatRenderer,
        make: Factory,
        max_turns: int,
        *,
        timeout_s: float = CALL_S,
        counters: Counter[str] | None = None,
        opening: asyncio.Lock | None = None,
    ) -> None:
        self.reward, self.ended, self.last_reply = 0.0, "", ""
        self._renderer, self._turns_left = renderer, max_turns
        self._timeout_s, self._counters = timeout_s, Counter() if counters is None else counters
        self._prompt, self._make, self._open_lock = prompt, make, opening or asyncio.Lock()
        self._env: TextEnv | None = None
        self._tools = Toolbox({}, timeout_s, self._counters)
        self._messages: list[Message] = []

    async def open(self) -> None:
        """Make and reset the environment, whose first text and tools become part of the prompt. Raises what
        the environment raises, TimeoutError, and TypeError or ValueError for a first text that cannot be
        used."""
        columns, messages = self._prompt.columns, list(to_chat(self._prompt).messages or ())
        seed = int.from_bytes(hashlib.sha256(self._prompt.uid.encode()).digest()[:4], "big") >> 1
        async with self._open_lock:
            self._env = env = await self._call("__init__", self._make)
            text = await self._call(
                "reset", partial(_reset_env, env, int(columns.get("seed", seed)), columns)
            )
        tools = {name: getattr(env, name) for name in getattr(env, "tools", ())}
        self._tools = Toolbox(tools, self._timeout_s, self._counters)
        self._prompt = replace(to_chat(self._prompt), tools=(*self._prompt.tools, *self._tools.schemas))
        user_index = len(messages) - 1 - (self._prompt.prefill is not None)  # before the prefill
        additions = [{"role": "user", "content": text}] if text else []
        chat = [*messages[:user_index], *additions, *messages[user_index + len(additions) :]]
        self._messages = list(chat)

    def start(self) -> np.ndarray:
        """Return the context of turn 0 [P] int32. The environment must be open."""
        return self._renderer.prompt(replace(self._prompt, messages=tuple(self._messages)))

    async def _call(self, method: str, call: Callable[..., T], **arguments: Any) -> T:
        """Return what a method of the environment returns. Raises TimeoutError with the method's name, and
        what the method raises."""
        try:
            return await call_in_time(call, arguments, self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{method}() has not returned in {self._timeout_s:g} s") from error

    async def step(self, completion: Completion) -> np.ndarray | NewRow | None:
        """Run the answer's tool calls, or one step of the environment, whose reward is added to ``reward``.
        Return the next context [C] int32, or a NewRow if the environment replaces the chat; None when the
        episode is over, which sets ``ended`` and ``last_reply`` unless the answer itself was cut off. Raises
        what the environment raises, TimeoutError, and TypeError or ValueError for a wrong result."""
        self._turns_left -= 1
        if completion.stop not in (Stop.EOS, Stop.STRING):
            return None
        replies = await self._tools.run_calls(completion.text)
        new_chat = list[Message]()
        if not replies:
            assert self._env is not None
            self._counters["env/steps"] += 1
            action = completion.text
            if completion.stop is Stop.STRING:  # the stop string is part of the action
                action = self._renderer.decode(completion.tokens)
            result = await self._call("step", partial(self._env.step, action))
            reply, reward, self.ended = _read_step(result)
            self.reward += reward
            new_chat = [] if isinstance(reply, str) else reply
            replies = [{"role": "user", "content": reply}]
        self.ended = self.ended or ("" if self._turns_left else "max_turns")
        if self.ended:
            self.last_reply = "\n".join(str(message["content"]) for message in new_chat or replies)
            return None
        if new_chat:
            self._messages = new_chat
            return NewRow(self._renderer.prompt(replace(self._prompt, messages=tuple(new_chat))))
        self._messages, context = continue_chat(
            self._renderer, self._prompt, self._messages, completion, replies
        )
        return context

    async def try_step(self, action: str) -> str:
        """Take one step of an open environment before a run, and return a warning or "". An exception of the
        environment is a warning too, since not every text is a valid action. Raises TypeError or ValueError
        for a step that no action could make right: of a wrong signature or with a wrong result."""
        assert self._env is not None
        with contextlib.suppress(ValueError):  # a callable may have no signature
            inspect.signature(self._env.step).bind(action)
        try:
            result = await self._call("step", partial(self._env.step, action))
        except Exception as error:  # a user's code
            return f"raised {type(error).__name__}: {error}, on a first answer"
        *_, ended = _read_step(result)
        is_cut = self._turns_left == 1 and not ended
        return "goes on after a first answer, and task.max_turns is 1, so it never replies" if is_cut else ""

    async def close(self) -> None:
        """Close the environment if it is open; later calls do nothing. Raises what its ``close`` raises, and
        TimeoutError."""
        if self._env is not None:
            env, self._env = self._env, None
            await self._call("close", partial(_close_env, env))


def _read_step(result: Any) -> tuple[str | list[Message], float, str]:
    """Return (reply, reward, how the episode has ended or "") from the result of ``step``. Raises TypeError
    or ValueError for a result of another form."""
    if not isinstance(result, tuple | list) or len(result) < 4:
        raise TypeError(f"step() gives {result!r:.80}; return (reply, reward, terminated, truncated, info)")
    reply, reward, terminated, truncated, *_ = result
    is_chat = isinstance(reply, list | tuple)
    for text in [message["content"] for message in reply] if is_chat else [reply]:
        _check_text(text, "step")
    ended = "terminated" if terminated else "truncated" if truncated else ""
    return list(reply) if is_chat else reply, _read_number(reward), ended


def _read_number(reward: Any) -> float:
    """Convert a reward to float. Raises TypeError for a text, even of digits, as for reward functions."""
    if isinstance(reward, str | bytes | bytearray) or not hasattr(reward, "__float__"):
        raise TypeError(f"step() gives the reward {reward!r:.80}, a {type(reward).__name__}; return a number")
    return float(reward)
