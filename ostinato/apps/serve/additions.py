"""What other applications add to a server: a store of feedback, a judge, and a memory of sessions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response

from ostinato.apps.serve.calls import Answer, Asker, Call, Message
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.served import Served
from ostinato.apps.serve.service import Model

Judged = Callable[[list[dict[str, Any]], list[str]], Coroutine[Any, Any, dict[str, Any]]]  # chat, answers


class Feedback(Protocol):
    """POST /feedback, GET /feedback.js, and the record of answers."""

    async def post(self, body: bytes) -> Any: ...

    def script(self) -> Response: ...

    def record(
        self, id_: str, model: Model, call: Call, answer: Answer, asker: Asker, index: int
    ) -> None: ...


class SessionMemory(Protocol):
    """Keeps the messages of a session within a budget; GET and POST /v1/memory/{session}."""

    def show(self, metrics: Metrics) -> None: ...

    async def shortened(
        self, session: str, messages: Sequence[Message], measure: Callable[[Sequence[Message]], int] | None
    ) -> tuple[str, list[Message]]: ...

    async def view(self, name: str) -> dict[str, Any]: ...

    async def change(self, name: str, body: bytes) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """None: the server has no such routes."""

    feedback: Feedback | None = None
    judge: Judged | None = None
    memory: SessionMemory | None = None


NO_ADDITIONS = Additions()

# (the model that is served, the server's own address, its key) -> what is added while the server runs
OpenAdditions = Callable[[Served, str, str], AbstractContextManager[Additions]]
