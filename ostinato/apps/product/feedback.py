"""Feedback of a product's users on answers: POST /feedback and GET /feedback.js, and the record of answers.

A 200 is sent after the commit. Answers are recorded after the reply, and dropped if too many are waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.responses import Response

from ostinato.apps.product.actions import classify_answer
from ostinato.apps.product.events import Event, Exchange, parse_event
from ostinato.apps.product.intake import Full, Intake
from ostinato.apps.product.store import Outcome, open_store
from ostinato.apps.serve.calls import Answer, ApiError, Asker, Call
from ostinato.apps.serve.metrics import Metrics
from ostinato.apps.serve.service import Model, Service
from ostinato.database import Unavailable
from ostinato.inputs import parse_json
from ostinato.render import Renderer

SCRIPT = Path(__file__).parent / "feedback.js"
MAX_EVENTS = 1_000  # events of one request
T = TypeVar("T")


class Feedback:
    """The routes of a server for feedback, and its recording of answers and events."""

    def __init__(self, intake: Intake, metrics: Metrics, renderer: Renderer) -> None:
        self._intake, self._renderer = intake, renderer
        self._refusal_count, self._acknowledged = 0, Acknowledged()
        outcomes = (*Outcome, "turned_away", "refused")
        read = lambda name: self._refusal_count if name == "refused" else intake.counts[name]  # noqa: E731
        metrics.add_counts("feedback_events", "Events by outcome", outcomes, read)
        metrics.add_counts("exchanges", "Answers recorded, and dropped", ("written", "dropped"), read)
        metrics.add_counts("feedback_store_failures", "Of the store", ("failures",), read)
        metrics.add_counts(
            "feedback_waiting", "Not written yet", ("all",), lambda _: intake.waiting, is_gauge=True
        )

    # ---- events

    async def post(self, body: bytes) -> Any:
        """Store one event or a list of them, and return the counts by outcome and the refusals.

        Raises ApiError: 400 for a body that cannot be read or a single event that is invalid, 409 for a
        single event that conflicts, 413 for too long a list, 503 if the store does not accept events now.
        """
        documents, is_single = _parse_documents(body)
        events, refusals = self._read_events(documents, is_single)
        outcomes = await self._write_events([event for _, event in events])
        for (index, event), outcome in zip(events, outcomes, strict=True):
            if outcome is Outcome.CONFLICT:
                message = (
                    f"event_id {event.event_id!r} is known with another content; give a new event its own id"
                )
                if is_single:
                    raise ApiError(message, status=409, param="event_id", code="conflict")
                refusals.append(_describe_refusal(index, event.event_id, "conflict", message))
        counts = {
            outcome.value: outcomes.count(outcome) for outcome in Outcome if outcome is not Outcome.CONFLICT
        }
        return counts | {"refused": sorted(refusals, key=lambda row: row["index"])}

    def _read_events(
        self, documents: list[Any], is_single: bool
    ) -> tuple[list[tuple[int, Event]], list[Any]]:
        """Return (index, event) of the documents that are events, and the refusals of the others, which are
        counted. Raises ApiError if a single document (``is_single``) is refused."""
        events, refusals = [], []
        for index, document in enumerate(documents):
            try:
                if not isinstance(document, dict):
                    raise ValueError(f"an event is a {type(document).__name__}; send a JSON object")
                events.append((index, parse_event(document)))
            except ValueError as error:
                self._refusal_count += 1
                if is_single:
                    raise ApiError(str(error), param=str(error).split()[0], code="invalid_event") from error
                event_id = document.get("event_id") if isinstance(document, dict) else None
                refusals.append(_describe_refusal(index, event_id, "invalid_event", str(error)))
        return events, refusals

    async def _write_events(self, events: list[Event]) -> list[Outcome]:
        """Write events and await their outcomes. Raises ApiError 503 if the store does not take them."""
        try:
            return await self._acknowledged.of(self._intake.submit(events)) if events else []
        except (Full, Unavailable) as error:
            raise ApiError(
                f"{error}; send the same events again",
                status=503,
                kind="server_error",
                code="store_unavailable",
                retry_after=1,
            ) from error

    def script(self) -> Response:
        return Response(SCRIPT.read_text(encoding="utf-8"), media_type="text/javascript; charset=utf-8")

    # ---- answers

    def record(self, id_: str, model: Model, call: Call, answer: Answer, asker: Asker, index: int) -> None:
        """Queue the record of an answer, unless its asker refuses that. Its id is the one that the client
        sees; answer k > 0 has ``id.k``. The answer is dropped and counted if the queue is full."""
        if asker.record:
            key = f"{id_}.{index}" if index else id_
            self._intake.record(partial(self._build_exchange, key, model, call, answer, asker, time.time()))

    def _build_exchange(
        self, id_: str, model: Model, call: Call, answer: Answer, asker: Asker, now: float
    ) -> Exchange:
        """Build the exchange of an answer; a plain prompt becomes one user message."""
        completion = answer.completion
        messages = call.messages
        if messages is None:
            text = call.text if call.text is not None else self._renderer.decode(answer.prompt.tolist())
            messages = ({"role": "user", "content": text},)
        calls = [(tool_call.name, tool_call.arguments) for tool_call in answer.tool_calls]
        version = int(completion.versions[0]) if len(completion.versions) else 0
        names = ("temperature", "top_k", "top_p", "min_p", "stop", "tools", "tool_choice", "grammar")
        return Exchange(
            response_id=id_,
            ts=now,
            model=model.name,
            revision=f"{model.name}@{version}" if model.revision is None else model.revision,
            arm=model.arm,
            propensity=model.propensity,
            messages=messages,
            output=completion.text,
            action=classify_answer(answer.content, calls, call.tools),
            prompt_tokens=answer.prompt,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            experts=_join_routes(answer),
            sampling={name: getattr(call, name) for name in names} | {"stopped": completion.stop.value},
            user=asker.user,
            session=asker.session,
            tenant=asker.tenant,
        )


class Acknowledged:
    """Passes outcomes from the writer's thread to the event loop. The loop is woken once for all that arrive
    together; ``asyncio.wrap_future`` would wake it for each."""

    def __init__(self) -> None:
        self._deliveries: deque[tuple[asyncio.Future[Any], concurrent.futures.Future[Any]]] = deque()

    async def of(self, future: concurrent.futures.Future[T]) -> T:
        """Await the result of a future of another thread."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda future: self._enqueue(loop, waiter, future))
        return await waiter

    def _enqueue(self, loop: asyncio.AbstractEventLoop, waiter: Any, future: Any) -> None:
        is_idle = not self._deliveries
        self._deliveries.append((waiter, future))
        if is_idle:
            with suppress(RuntimeError):  # the loop has ended, and all its waiters
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._deliveries:
            waiter, future = self._deliveries[0]
            if not waiter.done():  # done if its client has hung up
                if (error := future.exception()) is None:
                    waiter.set_result(future.result())
                else:
                    waiter.set_exception(error)
            self._deliveries.popleft()


def _join_routes(answer: Answer) -> np.ndarray | None:
    """Join the routes of prompt and answer: expert ids [P + T, moe layers, top_k]. None unless both are known
    and those of the prompt are complete."""
    prompt, sampled = answer.completion.prompt_experts, answer.completion.experts
    if prompt is None or sampled is None or len(prompt) != len(answer.prompt):
        return None
    return np.concatenate([prompt, sampled])


def _parse_documents(body: bytes) -> tuple[list[Any], bool]:
    """Return the documents of a body, and whether the body is a single one. Raises ApiError for a body that
    is neither an object nor a list, and for too long a list."""
    try:
        tree = parse_json(body)
    except ValueError as error:
        raise ApiError(f"the body is no JSON ({error})") from error
    if isinstance(tree, dict):
        return [tree], True
    if not isinstance(tree, list):
        raise ApiError(f"the body is a {type(tree).__name__}; send one event or a list of events")
    if len(tree) > MAX_EVENTS:
        raise ApiError(f"the list has {len(tree)} events; send {MAX_EVENTS} at most", status=413)
    return tree, False


def _describe_refusal(index: int, event_id: Any, code: str, message: str) -> dict[str, Any]:
    return {"index": index, "event_id": event_id, "code": code, "message": message}


@contextmanager
def open_feedback(store_name: str, service: Service) -> Iterator[Feedback | None]:
    """Open feedback in the store at ``store_name``, a file or an address, and add its metrics to the service;
    None for "". At the end the rows that wait are written, for half a minute at most.

    Raises ValueError for a store that cannot be opened.
    """
    if not store_name:
        yield None
        return
    try:
        intake = Intake(partial(open_store, store_name))
    except Unavailable as error:
        raise ValueError(f"{error}; start it first") from error
    try:
        yield Feedback(intake, service.metrics, service.renderer)
    finally:
        intake.close()
