"""A memory for chats: messages in, as many messages out as the budget allows; unchanged below the budget.

    [pinned messages, with "Earlier in this conversation ..." behind them] [the newest messages, verbatim]

``Chat`` is one conversation; it gets all its messages at every request and finds out which are new.
``ShorteningRenderer`` keeps an episode of ``env`` within the budget: a context that is shortened begins a row
of its own.
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
    """One conversation. ``measure``: tokens of messages as the model reads them, at most ``budget``. The
    first ``pinned`` messages (None: the system messages at the beginning) stay as they are."""

    memory: Memory  # with ``chat_sizes``
    budget: int
    measure: Callable[[Sequence[Message]], int]
    pinned: int | None = None
    state: MemoryState = field(default_factory=MemoryState)
    digest: str = ""  # of the messages in the state

    def shorten(self, messages: Sequence[Message], day: str = "") -> list[Message]:
        """Add the new ones of these messages to the state, and return all of them within the budget. If they
        do not begin with the messages of the state, the state is made anew, with the pins that it had. Raises
        ValueError for messages that cannot be brought within the budget, and for a ``day`` that is no
        date."""
        prefix_digests, head, pins = hash_prefixes(messages), self._count_pinned(messages), set[str]()
        if self.state.turns and (
            self.state.turns > len(prefix_digests) or prefix_digests[self.state.turns - 1] != self.digest
        ):
            pins = {block.source for block in self.state.blocks if block.pinned}
            self.state = MemoryState()
        for k in range(self.state.turns, len(messages)):
            prefix = messages[: k + 1]
            memory = self._make_memory(prefix, head)
            turn = Turn(
                speaker=_get_speaker(prefix[k]), text=extract_text(prefix[k]), day=day, pinned=k < head
            )
            self.state = memory.append(self.state, turn)
            for block in self.state.blocks:
                if block.turn == k and block.source in pins and not block.pinned:
                    self.state = memory.pin(self.state, block.id)
        self.digest = prefix_digests[-1]
        self.state = self._make_memory(messages, head).fit(self.state)  # a pin may exceed the budget
        return format_state(self.state, messages, head)

    def renderer(self, renderer: Renders) -> ShorteningRenderer:
        """Return a renderer for the episode of this chat."""
        return ShorteningRenderer(renderer, self)

    def _make_memory(self, messages: Sequence[Message], head: int) -> Memory:
        """Make a memory that measures a state by these messages. The tokens of a request without messages
        (its tools) are taken off the budget and off each measurement."""
        empty = self.measure([{"role": "user", "content": ""}])
        sizes = replace(self.memory.sizes, budget=self.budget - empty)
        measure_state = lambda state: self.measure(format_state(state, messages, head)) - empty  # noqa: E731
        return replace(self.memory, sizes=sizes, whole=measure_state)

    def _count_pinned(self, messages: Sequence[Message]) -> int:
        if self.pinned is not None:
            return self.pinned
        chat_positions = (k for k, message in enumerate(messages) if message["role"] != "system")
        return next(chat_positions, len(messages))


def format_state(state: MemoryState, messages: Sequence[Message], head: int) -> list[Message]:
    """Return ``state`` as messages: the first ``head`` of ``messages``, a note with the turns that are
    shortened, and the newest messages verbatim. ``messages`` are the originals, one for each turn. They
    are returned as they are if only messages of the head are shortened. The newest message is shortened
    if no verbatim message can be the first of a chat."""
    newest_turn, tail_turn = len(messages) - 1, _find_verbatim_tail(state)
    if tail_turn <= head:
        return [*messages]
    first_role = "assistant" if head and messages[head - 1]["role"] == "user" else "user"
    while tail_turn <= newest_turn and messages[tail_turn]["role"] != first_role:
        tail_turn += 1
    tail_messages: list[Message] = [*messages[tail_turn:]]
    if not tail_messages:  # the newest message itself is shortened, or does not begin a chat
        text = "".join(
            block.text + " " * (block.level > 0) for block in state.blocks if block.turn == newest_turn
        )
        role = messages[newest_turn]["role"]
        tail_messages = [{"role": "user" if role == "tool" else role, "content": text}]
        tail_turn = newest_turn
    lines = "".join(block.line for block in state.blocks if head <= block.turn < tail_turn)
    note = f"{NOTE}{lines}".rstrip() if lines else ""
    if not head:
        return [*([{"role": "system", "content": note}] if note else []), *tail_messages]
    *earlier_messages, last_pinned = messages[:head]
    content = "\n\n".join(filter(None, [extract_text(last_pinned), note]))
    return [*earlier_messages, {**last_pinned, "content": content}, *tail_messages]


def _find_verbatim_tail(state: MemoryState) -> int:
    """Return the first turn of the tail in which no block is missing or shortened."""
    first_turn = state.turns
    for age, block in enumerate(reversed(state.blocks), 1):
        if block.level or block.id != state.next_id - age:
            return first_turn
        first_turn = block.turn if not block.part else first_turn
    return 0 if len(state.blocks) == state.next_id else first_turn


def _get_speaker(message: Message) -> str:
    return str(message.get("name") or message["role"])


def extract_text(message: Message) -> str:
    """Return the text of a message, followed by its tool calls as JSON."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    calls = [
        json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()
    ]
    return "\n".join(filter(None, [content, *calls]))


def hash_prefixes(messages: Sequence[Message]) -> list[str]:
    """Return digests of the first message, of the first two, and so on."""
    hex_digests, digest = [], hashlib.sha256()
    for message in messages:
        digest.update(
            json.dumps([message["role"], _get_speaker(message), extract_text(message)]).encode() + b"\n"
        )
        hex_digests.append(digest.hexdigest())
    return hex_digests


class Renders(Protocol):
    """The methods of ``render.Renderer`` that are used here."""

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
    """Return sizes for messages within ``budget`` tokens by ``measure``.

    The tokens of an empty chat are taken off the budget, and each block counts with the marks of a message.
    The slack leaves room for some turns. Until it is used up, the context only grows, so a model computes the
    new tokens alone. Raises ValueError for a budget that is too small.
    """
    empty = measure([{"role": "user", "content": ""}])
    marks = measure([{"role": r, "content": ""} for r in ("user", "assistant", "user")]) - empty
    sizes = Sizes.of(max(1, budget - empty), recent, per_block=max(0, -(-marks // 2)))
    return replace(sizes, slack=0.25)


class ShorteningRenderer:
    """A renderer of one episode, whose contexts have the budget of its chat. The messages of the prompt are
    never shortened.

    It adds to the counters of the memory ``memory/rows``, the number of contexts that were shortened.
    """

    def __init__(self, renderer: Renders, chat: Chat) -> None:
        self._renderer, self._chat, self._row_tokens, self._budget = renderer, chat, 0, chat.budget

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return self._renderer.decode(tokens, skip_special)

    def prompt(self, prompt: Prompt) -> np.ndarray:
        """Begin the episode: return the tokens [P] int32 of its prompt, pin the messages of the prompt, and
        take the tokens of its tools off the budget. Raises ValueError for a prompt that is longer than the
        budget for pinned messages."""
        tokens = self._renderer.prompt(prompt)
        self._chat.pinned, self._row_tokens = len(prompt.messages or ()), len(tokens)
        if prompt.tools or prompt.template_kwargs:  # their tokens are in every context
            self._chat.budget = self._budget - len(tokens) + len(self._renderer.chat(prompt.messages or ()))
        if prompt.messages:
            self._chat.shorten(prompt.messages)
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
        """Return the tokens [C] int32 behind the answer, or a new row. The row is new if the renderer begins
        one, or if it would exceed the budget; then the context is shortened. Raises ValueError for messages
        that cannot be brought within the budget."""
        context = self._renderer.after_turn(
            messages, new_messages, answer, tools, template_kwargs, prefill=prefill
        )
        is_new = isinstance(context, NewRow)
        self._row_tokens = len(context.tokens) if is_new else self._row_tokens + len(answer) + len(context)
        if self._row_tokens <= self._budget:
            return context
        short_messages = self._chat.shorten([*messages, *new_messages])
        tokens = self._renderer.chat(short_messages, tools=tools, template_kwargs=template_kwargs)
        self._row_tokens = len(tokens)
        self._chat.memory.counters["memory/rows"] += 1
        return NewRow(tokens)
