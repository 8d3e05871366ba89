"""A memory for chats: messages in, as many messages out as the budget allows, the same until it is reached.

    [pinned messages, with "Earlier in this conversation ..." behind them] [the newest messages, verbatim]

``Chat`` is one conversation; it is given all its messages at every request and knows which are new.
``Words`` keeps an episode of ``env`` within the budget: a context that is shortened begins a row of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from ostinato.apps.memory.blocks import MemoryState, Turn
from ostinato.apps.memory.keep import Memory, Sizes
from ostinato.types import NewRow, Prompt

Message = Mapping[str, Any]
NOTE = "Earlier in this conversation, shortened:\n"


@dataclass(slots=True, kw_only=True)
class Chat:
    """One conversation. ``measure``: tokens of messages as the model reads them, of which there may be
    ``budget``; the first ``pinned`` ones (None: those of the system at its beginning) stay as they are."""

    memory: Memory  # with ``chat_sizes``
    budget: int
    measure: Callable[[Sequence[Message]], int]
    pinned: int | None = None
    state: MemoryState = field(default_factory=MemoryState)
    seen: str = ""  # digest of the messages that are in it

    def shortened(self, messages: Sequence[Message], day: str = "") -> list[Message]:
        """These messages within the budget. Where they do not begin with those that are known, the memory is
        made anew, with the pins it had. ValueError for messages that cannot be brought within it."""
        seen, head, pins = digests(messages), self._head(messages), set[str]()
        if self.state.turns and (self.state.turns > len(seen) or seen[self.state.turns - 1] != self.seen):
            pins = {one.source for one in self.state.blocks if one.pinned}
            self.state = MemoryState()
        for k in range(self.state.turns, len(messages)):
            known = messages[: k + 1]
            keeper = self._keeper(known, head)
            turn = Turn(speaker=_speaker(known[k]), text=text_of(known[k]), day=day, pinned=k < head)
            self.state = keeper.append(self.state, turn)
            for block in self.state.blocks:
                if block.turn == k and block.source in pins and not block.pinned:
                    self.state = keeper.pin(self.state, block.id)
        self.seen = seen[-1]
        self.state = self._keeper(messages, head).fit(self.state)  # which after a pin may be over it
        return form(self.state, messages, head)

    def renderer(self, renderer: Renders) -> Words:
        """A renderer of the episode of this chat."""
        return Words(renderer, self)

    def _keeper(self, messages: Sequence[Message], head: int) -> Memory:
        """That measures a state as these messages, less what a request has without any (its tools)."""
        empty = self.measure([{"role": "user", "content": ""}])
        sizes = replace(self.memory.sizes, budget=self.budget - empty)
        whole = lambda state: self.measure(form(state, messages, head)) - empty  # noqa: E731
        return replace(self.memory, sizes=sizes, whole=whole)

    def _head(self, messages: Sequence[Message]) -> int:
        if self.pinned is not None:
            return self.pinned
        others = (k for k, message in enumerate(messages) if message["role"] != "system")
        return next(others, len(messages))


def form(state: MemoryState, messages: Sequence[Message], head: int) -> list[Message]:
    """What is in ``state`` as messages, of which ``messages`` are the originals, turn by turn."""
    newest, tail = len(messages) - 1, _verbatim_from(state)
    if tail <= head:
        return [*messages]
    begins = "assistant" if head and messages[head - 1]["role"] == "user" else "user"
    while tail <= newest and messages[tail]["role"] != begins:
        tail += 1
    last: list[Message] = [*messages[tail:]]
    if not last:  # the newest message itself is shortened, or does not begin a chat
        text = "".join(one.text + " " * (one.level > 0) for one in state.blocks if one.turn == newest)
        role = messages[newest]["role"]
        last = [{"role": "user" if role == "tool" else role, "content": text}]
        tail = newest
    lines = "".join(one.line for one in state.blocks if head <= one.turn < tail)
    note = f"{NOTE}{lines}".rstrip() if lines else ""
    if not head:
        return [*([{"role": "system", "content": note}] if note else []), *last]
    *before, at = messages[:head]
    content = "\n\n".join(filter(None, [text_of(at), note]))
    return [*before, {**at, "content": content}, *last]


def _verbatim_from(state: MemoryState) -> int:
    """The first turn of those at the end of which nothing is missing or shortened."""
    found = state.turns
    for age, block in enumerate(reversed(state.blocks), 1):
        if block.level or block.id != state.next_id - age:
            return found
        found = block.turn if not block.part else found
    return 0 if len(state.blocks) == state.next_id else found


def _speaker(message: Message) -> str:
    return str(message.get("name") or message["role"])


def text_of(message: Message) -> str:
    """The text of a message, with the tools that it calls as JSON behind it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    calls = [
        json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()
    ]
    return "\n".join(filter(None, [content, *calls]))


def digests(messages: Sequence[Message]) -> list[str]:
    """Of the first message, of the first two, and so on."""
    found, running = [], hashlib.sha256()
    for message in messages:
        running.update(json.dumps([message["role"], _speaker(message), text_of(message)]).encode() + b"\n")
        found.append(running.hexdigest())
    return found


class Renders(Protocol):
    """What is needed of ``render.Renderer``."""

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str: ...

    def prompt(self, prompt: Prompt) -> np.ndarray: ...

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = ...,
    ) -> np.ndarray: ...

    def after_turn(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        answer: Sequence[int] | np.ndarray = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = ...,
        *,
        prefill: str | None = None,
    ) -> np.ndarray | NewRow: ...


def chat_sizes(budget: int, recent: int, measure: Callable[[Sequence[Message]], int]) -> Sizes:
    """For messages within ``budget`` tokens by ``measure``: less what an empty chat has, with the marks of a
    message for each block, and slack for some turns: until it is used up, what a model has computed of the
    messages before is still the beginning of what it reads."""
    empty = measure([{"role": "user", "content": ""}])
    more = measure([{"role": r, "content": ""} for r in ("user", "assistant", "user")]) - empty
    sizes = Sizes.of(max(1, budget - empty), recent, per_block=max(0, -(-more // 2)))
    return replace(sizes, slack=0.25)


class Words:
    """A renderer of one episode, whose contexts have the budget of its chat; what the prompt has stays.

    Counters beside those of the memory: ``memory/rows``, contexts that were shortened.
    """

    def __init__(self, renderer: Renders, chat: Chat) -> None:
        self._renderer, self._chat, self._row, self._budget = renderer, chat, 0, chat.budget

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return self._renderer.decode(tokens, skip_special)

    def prompt(self, prompt: Prompt) -> np.ndarray:
        """[P] int32. ValueError for one that is longer than what stays in the memory may be."""
        tokens = self._renderer.prompt(prompt)
        self._chat.pinned, self._row = len(prompt.messages or ()), len(tokens)
        if prompt.tools or prompt.template_kwargs:  # what they add to messages is there in every context
            self._chat.budget = self._budget - len(tokens) + len(self._renderer.chat(prompt.messages or ()))
        if prompt.messages:
            self._chat.shortened(prompt.messages)
        return tokens

    def after_turn(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        answer: Sequence[int] | np.ndarray = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        prefill: str | None = None,
    ) -> np.ndarray | NewRow:
        """[C] int32 behind the answer, or the whole context where the row would be too long."""
        context = self._renderer.after_turn(
            messages, new_messages, answer, tools, template_kwargs, prefill=prefill
        )
        is_new = isinstance(context, NewRow)
        self._row = len(context.tokens) if is_new else self._row + len(answer) + len(context)
        if self._row <= self._budget:
            return context
        shortened = self._chat.shortened([*messages, *new_messages])
        tokens = self._renderer.chat(shortened, tools=tools, template_kwargs=template_kwargs)
        self._row = len(tokens)
        self._chat.memory.counters["memory/rows"] += 1
        return NewRow(tokens)
