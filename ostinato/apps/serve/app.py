"""The HTTP side: routes, keys, limits, errors in the dialect of the request, and clients that hang up.

POST /v1/chat/completions  /v1/completions  /v1/responses  /v1/messages  /v1/messages/count_tokens
POST /inference/v1/generate  /tokenize  /detokenize  /feedback  /v1/memory/{session}
GET  /v1/models  /v1/models/{name}  /v1/memory/{session}  /health  /metrics  /feedback.js  /
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import anyio
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.apps.serve import anthropic_messages, openai_responses
from ostinato.apps.serve.bodies import (
    MOST_MESSAGES,
    ChatBody,
    CompletionBody,
    Id,
    Lenient,
    Sampled,
    check_body,
    parsed,
)
from ostinato.apps.serve.calls import Answer, ApiError, Asker, Call, Piece, Usage
from ostinato.apps.serve.openai_chat import GenerateBody, Shape, generation, sse
from ostinato.apps.serve.served import NO_ADDITIONS, Additions
from ostinato.apps.serve.server import Handler, guarded, read_body, unless_gone
from ostinato.apps.serve.service import Model, Service

Parts = AsyncGenerator[tuple[int, Piece | Answer], None]
PAGE = Path(__file__).parent / "page.html"
SCRIPT = '<script src="feedback.js"></script>'


class Door:
    """The handlers of one service. ``key``: the API key that clients must send; empty: none."""

    def __init__(self, service: Service, key: str = "", added: Additions = NO_ADDITIONS) -> None:
        self._service, self._key = service, key
        self._feedback, self._memory = added.feedback, added.memory

    # ---- dialects

    async def chat(self, request: Request) -> Response:
        body = parsed(ChatBody, await self._body(request))
        return await self._openai(request, body, [body.to_call()], chat=True)

    async def completions(self, request: Request) -> Response:
        body = parsed(CompletionBody, await self._body(request))
        self._service.check_room(body.num_answers)
        return await self._openai(request, body, body.to_calls(), chat=False)

    async def _openai(self, request: Request, body: Sampled, calls: list[Call], *, chat: bool) -> Response:
        calls = [await self._assigned(call, body) for call in calls]
        model = self._service.model(calls[0].model)  # once: its name may be another policy's in a moment
        id_ = _id("chatcmpl" if chat else "cmpl")
        shape = Shape(
            id=id_,
            model=model.name,
            fingerprint=model.fingerprint,
            renderer=self._service.renderer,
            call=calls[0],
            body=body,
            chat=chat,
        )
        parts = await self._parts(calls, model, id_, body)
        if body.stream:
            return await _stream(parts, shape.events)
        answers = await _collect(request, parts)
        scored = [(await self._service.prompt_scores(call, model), call.n) for call in calls]
        scores = [each for each, n in scored for _ in range(n)]
        ordered = [answers[index] for index in sorted(answers)]
        return JSONResponse(shape.whole(ordered, _usage(calls, answers), scores))

    async def responses(self, request: Request) -> Response:
        body = parsed(openai_responses.ResponsesBody, await self._body(request))
        call, id_ = await self._assigned(body.to_call(), body), _id("resp")
        model, renderer = self._service.model(call.model), self._service.renderer
        shape = openai_responses.ResponseShape(
            id=id_, model=model.name, renderer=renderer, call=call, body=body
        )
        parts = await self._parts([call], model, id_, body)
        if body.stream:
            return await _stream(parts, shape.events)
        answers = await _collect(request, parts)
        return JSONResponse(shape.whole([answers[0]]))

    async def generate(self, request: Request) -> Response:
        """vLLM's: token ids in, token ids and log-probabilities out."""
        body = parsed(GenerateBody, await self._body(request))
        call, id_ = await self._assigned(body.to_call(), body), _id("gen")
        parts = await self._parts([call], self._service.model(call.model), id_, body)
        answers = await _collect(request, parts)
        return JSONResponse(generation(id_, call, [answers[index] for index in sorted(answers)]))

    async def messages(self, request: Request) -> Response:
        body = parsed(anthropic_messages.MessagesBody, await self._body(request))
        call, id_ = await self._assigned(body.to_call(), body), secrets.token_hex(12)
        model = self._service.model(call.model)
        parts = await self._parts([call], model, f"msg_{id_}", body)
        if body.stream:
            return await _stream(parts, lambda parts: anthropic_messages.events(id_, model.name, parts))
        answers = await _collect(request, parts)
        return JSONResponse(anthropic_messages.message(id_, model.name, [answers[0]]))

    async def count_tokens(self, request: Request) -> Response:
        body = parsed(anthropic_messages.MessagesBody, await self._body(request))
        return JSONResponse({"input_tokens": len(await self._service.tokens(body.to_call()))})

    async def _assigned(self, call: Call, body: Lenient) -> Call:
        """The call with the model assigned to its user, and a session's messages shortened by its memory."""
        asker = Asker.of(body.model_extra or {})
        if self._memory is not None and asker.session and call.messages:
            tools = () if call.tool_choice == "none" else call.tools
            measure = partial(self._service.measure, tools=tools)
            _, messages = await self._memory.shortened(asker.session, call.messages, measure)
            call = replace(call, messages=tuple(messages))
        return self._service.assigned(replace(call, salt=asker.salt), asker.user)

    async def memory(self, request: Request) -> Response:
        assert self._memory is not None
        name = request.path_params["name"]
        if request.method == "POST":
            return JSONResponse(await self._memory.change(name, await self._body(request)))
        return JSONResponse(await self._memory.view(name))

    async def _parts(self, calls: list[Call], model: Model, id_: str, body: Lenient) -> Parts:
        """The answers of ``model`` to all calls, concurrently, numbered consecutively across calls and
        recorded under ``id_``. Errors of the requests are raised here."""
        requests = []
        for call in calls:
            requests.append(await self._service.requests(call, model))
            await asyncio.sleep(0)  # other requests come in between
        asker = Asker.of(body.model_extra or {})

        async def one(call: Call, mine: list[Any], first: int) -> Parts:
            async with aclosing(self._service.answer(call, mine)) as parts:
                async for part in parts:
                    if self._feedback is not None and isinstance(part, Answer):
                        self._feedback.record(id_, model, call, part, asker, first + part.index)
                    yield first + part.index, part

        if len(calls) == 1:
            return one(calls[0], requests[0], 0)
        firsts = accumulate(map(len, requests[:-1]), initial=0)
        return _merge_events([one(*each) for each in zip(calls, requests, firsts, strict=True)])

    # ---- the rest

    async def models(self, request: Request) -> Response:
        listed = [self._listed(model) for model in self._service.models.values()]
        return JSONResponse({"object": "list", "data": listed, "has_more": False})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._listed(self._service.model(request.path_params["name"])))

    def _listed(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "ostinato",
            "parent": model.parent or None,
            "version": model.version,
            "max_model_len": self._service.limits.context,
        }

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: a text, or messages through the chat template."""
        body = parsed(_Tokenize, await self._body(request))
        if body.messages is not None:
            chat = {"messages": body.messages, **(body.model_extra or {})}
            tokens = await self._service.tokens(check_body(ChatBody, chat).to_call())
        else:
            tokens = await self._service.encoded(body.prompt)
        limit = self._service.limits.context
        return JSONResponse({"tokens": tokens.tolist(), "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body = parsed(_Detokenize, await self._body(request))
        top = self._service.limits.vocab_size
        if any(not 0 <= token < top for token in body.tokens):
            raise ApiError(f"tokens holds an id outside 0 to {top - 1}", param="tokens")
        return JSONResponse({"prompt": await self._service.decoded(body.tokens)})

    async def feedback(self, request: Request) -> Response:
        assert self._feedback is not None
        return JSONResponse(await self._feedback.post(await self._body(request)))

    async def script(self, request: Request) -> Response:
        assert self._feedback is not None
        return self._feedback.script()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "under_way": self._service.under_way})

    async def metrics(self, request: Request) -> Response:
        text = self._service.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, request: Request) -> Response:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'self' 'unsafe-inline'; img-src data:"
        )
        more = "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": f"{policy}; {more}"}
        text = PAGE.read_text(encoding="utf-8")
        warmth = f'step="0.1" value="{self._service.defaults.temperature:g}"'
        text = text.replace('step="0.1" value="1"', warmth)
        if self._feedback is not None:
            text = text.replace("<!-- feedback -->", SCRIPT)
        if self._memory is not None:
            text = text.replace("const REMEMBERS = false", "const REMEMBERS = true")
        return HTMLResponse(text, headers=headers)

    # ---- around all of them

    def guarded(self, handler: Handler, path: str, dialect: str = "openai") -> Handler:
        """``handler`` with the key checked, errors in the dialect's format, and the request counted."""
        answer, metrics = (
            guarded(handler, self._key, partial(_refusal, dialect=dialect)),
            self._service.metrics,
        )

        async def counted(request: Request) -> Response:
            response = await answer(request)
            metrics.left.inc(response.status_code == 499)
            metrics.requests.labels(path, response.status_code).inc()
            return response

        return counted

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._service.limits.body_bytes)


class _Tokenize(Lenient):
    prompt: str = ""
    messages: Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)] | None = None


class _Detokenize(Lenient):
    tokens: list[Id]


def _id(kind: str) -> str:
    """A new response id, unique across servers and restarts."""
    return f"{kind}-{secrets.token_hex(12)}"


def _usage(calls: list[Call], answers: dict[int, Answer]) -> Usage:
    """Each prompt counts once, whatever its number of answers."""
    parts, first = [], 0
    for call in calls:
        parts.append(Usage.of([answers[first + k] for k in range(call.n)]))
        first += call.n
    return Usage(
        prompt=sum(p.prompt for p in parts),
        cached=sum(p.cached for p in parts),
        sampled=sum(p.sampled for p in parts),
    )


def _refusal(error: ApiError, dialect: str) -> Response:
    body = anthropic_messages.error_body(error) if dialect == "anthropic" else error.body()
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _stream(parts: Parts, events: Callable[[Parts], AsyncIterator[str]]) -> Response:
    """Server-sent events. An error before the first part has its own HTTP status; a later one is the last
    event. Starlette cancels the stream of a client that hangs up, which frees what its answer holds."""
    first = await anext(parts)

    async def lines() -> AsyncIterator[str]:
        async with aclosing(parts):
            try:
                async for line in events(_after(first, parts)):
                    yield line
            except ApiError as error:
                yield sse(error.body(), "error")

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _after(first: tuple[int, Piece | Answer], parts: Parts) -> Parts:
    yield first
    async for part in parts:
        yield part


async def _collect(request: Request, parts: Parts) -> dict[int, Answer]:
    """The answers by number. If the client hangs up, all stops and ClientDisconnect is raised."""

    async def collect() -> dict[int, Answer]:
        async with aclosing(parts):
            return {index: part async for index, part in parts if isinstance(part, Answer)}

    return await unless_gone(request, collect())


async def _merge_events(streams: list[Parts]) -> Parts:
    """The parts of all streams, as they arrive."""
    send, receive = anyio.create_memory_object_stream[tuple[int, Piece | Answer] | BaseException](1024)

    async def forward(stream: Parts) -> None:
        try:
            async with aclosing(stream):
                async for part in stream:
                    await send.send(part)
        except Exception as error:
            await send.send(error)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    ended = asyncio.gather(*tasks)
    ended.add_done_callback(lambda _: send.close())
    try:
        async for part in receive:
            if isinstance(part, BaseException):
                raise part
            yield part
    finally:
        ended.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        receive.close()


class Direct:
    """Answers POST at ``path`` without routing, which is half of the cost of many small requests."""

    def __init__(self, app: ASGIApp, path: str, handler: Handler) -> None:
        self._app, self._path, self._handler = app, path, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST":
            response = await self._handler(Request(scope, receive, send))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def new_app(
    service: Service,
    *,
    key: str = "",
    added: Additions = NO_ADDITIONS,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """The application. ``key``: the API key that clients must send; ``lifespan``: what runs alongside it in
    its event loop."""
    door, feedback, memory = Door(service, key, added), added.feedback, added.memory
    if memory is not None:
        memory.show(service.metrics)

    def route(path: str, handler: Handler, method: str = "POST", dialect: str = "openai") -> Route:
        return Route(path, door.guarded(handler, path, dialect), methods=[method])

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}: {error.detail}"
        return _refusal(ApiError(what, status=error.status_code), "openai")

    kept = [route("/feedback", door.feedback), Route("/feedback.js", door.script)]
    events = door.guarded(door.feedback, "/feedback")
    return Starlette(
        routes=[
            *(kept if feedback is not None else ()),
            route("/v1/chat/completions", door.chat),
            route("/v1/completions", door.completions),
            route("/v1/responses", door.responses),
            route("/v1/messages", door.messages, dialect="anthropic"),
            route("/v1/messages/count_tokens", door.count_tokens, dialect="anthropic"),
            route("/v1/models", door.models, "GET"),
            route("/v1/models/{name:path}", door.model, "GET"),
            route("/inference/v1/generate", door.generate),
            route("/tokenize", door.tokenize),
            route("/detokenize", door.detokenize),
            *([route("/v1/memory/{name:path}", door.memory, m) for m in ("GET", "POST")] if memory else []),
            Route("/metrics", door.metrics),
            Route("/health", door.health),
            Route("/", door.page),
        ],
        exception_handlers={HTTPException: failed},
        lifespan=lifespan,
        middleware=[Middleware(Direct, path="/feedback", handler=events)] if feedback is not None else [],
    )
