"""Sessions whose chats are kept within a budget of tokens, for ``ostinato serve --memory`` and for the proxy
in front of any other OpenAI-compatible address (``ostinato memory serve``).

GET /v1/memory/{session}: which of its blocks are in the context, shortened or gone. POST {"pin": id},
{"unpin": id} or {"restore": id} to it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ostinato.apps.memory.chat import Chat, Message, chat_sizes, hash_prefixes
from ostinato.apps.memory.keep import Memory
from ostinato.apps.memory.refill import Refiller
from ostinato.apps.memory.sessions import Sessions
from ostinato.apps.serve.calls import ApiError, read_json
from ostinato.apps.serve.metrics import Metrics

COUNTERS = ("rewritten", "gone", "unsupported", "too_long", "failed", "read", "wrote")


@dataclass(slots=True, kw_only=True)
class Remembered:
    """The chats of one server. ``count`` and ``measure`` return the tokens of a text, and of messages.

    Raises ValueError for a budget that is too small for a chat.
    """

    sessions: Sessions
    budget: int
    recent: int = 0  # 0: a third
    count: Callable[[str], int]
    measure: Callable[[Sequence[Message]], int]
    refiller: Refiller | None = None
    counters: Counter[str] = field(default_factory=Counter)
    _locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def __post_init__(self) -> None:
        self._make_memory("")  # raises its error for a budget that is too small

    def show(self, metrics: Metrics) -> None:
        """Add the counters of the memory to the metrics of a server."""
        read = lambda name: self.counters[f"memory/{name}"]  # noqa: E731
        metrics.add_counts(
            "memory", "Blocks rewritten and gone, refills refused, tokens read and written", COUNTERS, read
        )

    async def shorten(
        self,
        session: str,
        messages: Sequence[Message],
        measure: Callable[[Sequence[Message]], int] | None = None,
    ) -> tuple[str, list[Message]]:
        """Return (session, its messages within the budget), and save the session. An empty name stands for
        the session with the most of these messages, or for a new one. Raises ApiError for messages that
        cannot be brought within the budget."""
        name = (
            session
            or self.sessions.find_best_match(hash_prefixes(messages))
            or f"chat-{secrets.token_hex(8)}"
        )
        async with self._locks[name]:
            return name, await asyncio.to_thread(self._shorten, name, messages, measure or self.measure)

    def _shorten(
        self, name: str, messages: Sequence[Message], measure: Callable[[Sequence[Message]], int]
    ) -> list[Message]:
        """Shorten the messages of a session, and save its state."""
        chat = Chat(memory=self._make_memory(name), budget=self.budget, measure=measure)
        if session_row := self.sessions.load(name):
            chat.state, chat.digest = session_row
        try:
            short_messages = chat.shorten(messages, day=datetime.now(UTC).date().isoformat())
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="memory_budget") from error
        self.sessions.save(name, chat.digest, chat.state)
        return short_messages

    def _make_memory(self, name: str) -> Memory:
        return Memory(
            sizes=chat_sizes(self.budget, self.recent, self.measure),
            count=self.count,
            originals=self.sessions,
            refiller=self.refiller,
            counters=self.counters,
            on_block=lambda block: self.sessions.add(name, block),
        )

    async def view(self, name: str) -> dict[str, Any]:
        """Return the blocks in the context and the newest of those that are gone, with their originals.
        Raises ApiError 404 for an unknown session."""
        if (session_row := self.sessions.load(name)) is None:
            raise ApiError(
                f"there is no session {name!r} in this memory", status=404, code="session_not_found"
            )
        state, _ = session_row
        rows = [(block, True) for block in state.blocks] + [
            (block, False) for block in self.sessions.list_gone(name, state)
        ]
        keys = ("id", "turn", "speaker", "day", "level", "tokens", "whole", "pinned", "uses", "text")
        blocks = [
            {key: getattr(block, key) for key in keys}
            | {"here": is_present, "original": self.sessions.get(block.source)}
            for block, is_present in rows
        ]
        return {
            "session": name,
            "budget": self.budget,
            "turns": state.turns,
            "tokens": state.tokens,
            "blocks": blocks,
        }

    async def change(self, name: str, body: bytes) -> dict[str, Any]:
        """Pin, unpin or restore a block as ``body`` says, save the session and return its new view. Raises
        ApiError: 404 for an unknown session or block, 400 for another body or if there is no room for the
        block."""
        document = read_json(body)
        if (
            not isinstance(document, dict)
            or len(document) != 1
            or not {*document} <= {"pin", "unpin", "restore"}
        ):
            raise ApiError('the body is one of {"pin": id}, {"unpin": id} and {"restore": id}')
        ((action, id_),) = document.items()
        async with self._locks[name]:
            await self.view(name)
            state, digest = self.sessions.load(name) or (None, "")
            assert state is not None
            is_id = type(id_) is int and 0 <= id_ < 2**63  # the integers of SQLite
            block = (state.find_block(id_) or self.sessions.load_block(name, id_)) if is_id else None
            if block is None:
                raise ApiError(f"session {name!r} has no block {id_!r}", param=action, status=404)
            memory = self._make_memory(name)
            try:
                if action == "unpin":
                    state = memory.unpin(state, block.id)
                else:
                    state = memory.restore(state, replace(block, pinned=block.pinned or action == "pin"))
            except ValueError as error:
                raise ApiError(str(error), param=action, code="memory_budget") from error
            self.sessions.save(name, digest, state)
        return await self.view(name)
