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
    MAX_MESSAGES,
    ChatBody,
    CompletionBody,
    LenientBody,
    SamplingBody,
    TokenId,
    check_body,
    parse_body,
)
from ostinato.apps.serve.calls import Answer, ApiError, Asker, Call, Piece, Usage
from ostinato.apps.serve.openai_chat import GenerateBody, Shape, format_event, format_generation
from ostinato.apps.serve.served import NO_ADDITIONS, Additions
from ostinato.apps.serve.server import Handler, guard, read_body, read_key, run_while_connected
from ostinato.apps.serve.service import Model, Service

Parts = AsyncGenerator[tuple[int, Piece | Answer], None]
PAGE = Path(__file__).parent / "page.html"
SCRIPT = '<script src="feedback.js"></script>'


class Handlers:
    """The handlers of one service. ``key``: the API key that clients must send; empty: none."""

    def __init__(self, service: Service, key: str = "", added: Additions = NO_ADDITIONS) -> None:
        self._service, self._key = service, key
        self._feedback, self._memory = added.feedback, added.memory

    # ---- dialects

    async def answer_chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self._read_body(request))
        return await self._answer_openai(request, body, [body.to_call()], is_chat=True)

    async def answer_completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await self._read_body(request))
        self._service.check_room(body.num_answers, _owner_of(request))
        return await self._answer_openai(request, body, body.to_calls(), is_chat=False)

    async def _answer_openai(
        self, request: Request, body: SamplingBody, calls: list[Call], *, is_chat: bool
    ) -> Response:
        """Answer chat or text completions, whole or as a stream."""
        calls = [await self._assign_model(request, call, body) for call in calls]
        model = self._find_model(request, calls[0])  # once, as the name may get another policy
        id_ = _make_id("chatcmpl" if is_chat else "cmpl")
        shape = Shape(
            id=id_,
            model=model.name,
            fingerprint=model.fingerprint,
            renderer=self._service.renderer,
            call=calls[0],
            body=body,
            is_chat=is_chat,
        )
        parts = await self._run_calls(calls, model, id_, body)
        if body.stream:
            return await _stream(parts, shape.stream_events)
        answers = await _collect(request, parts)
        prompt_scores = [(await self._service.score_prompt(call, model), call.n) for call in calls]
        scores = [scores_of_prompt for scores_of_prompt, n in prompt_scores for _ in range(n)]
        sorted_answers = [answers[index] for index in sorted(answers)]
        return JSONResponse(shape.make_response(sorted_answers, _sum_usage(calls, answers), scores))

    async def answer_responses(self, request: Request) -> Response:
        body = parse_body(openai_responses.ResponsesBody, await self._read_body(request))
        call, id_ = await self._assign_model(request, body.to_call(), body), _make_id("resp")
        model, renderer = self._find_model(request, call), self._service.renderer
        shape = openai_responses.ResponseShape(
            id=id_, model=model.name, renderer=renderer, call=call, body=body
        )
        parts = await self._run_calls([call], model, id_, body)
        if body.stream:
            return await _stream(parts, shape.stream_events)
        answers = await _collect(request, parts)
        return JSONResponse(shape.make_response([answers[0]]))

    async def generate(self, request: Request) -> Response:
        """Answer vLLM's request: token ids in, token ids and log-probabilities out."""
        body = parse_body(GenerateBody, await self._read_body(request))
        call, id_ = await self._assign_model(request, body.to_call(), body), _make_id("gen")
        parts = await self._run_calls([call], self._find_model(request, call), id_, body)
        answers = await _collect(request, parts)
        return JSONResponse(format_generation(id_, call, [answers[index] for index in sorted(answers)]))

    async def answer_messages(self, request: Request) -> Response:
        body = parse_body(anthropic_messages.MessagesBody, await self._read_body(request))
        call, id_ = await self._assign_model(request, body.to_call(), body), secrets.token_hex(12)
        model = self._find_model(request, call)
        parts = await self._run_calls([call], model, f"msg_{id_}", body)
        if body.stream:
            return await _stream(
                parts, lambda parts: anthropic_messages.stream_events(id_, model.name, parts)
            )
        answers = await _collect(request, parts)
        return JSONResponse(anthropic_messages.make_response(id_, model.name, [answers[0]]))

    async def count_tokens(self, request: Request) -> Response:
        body = parse_body(anthropic_messages.MessagesBody, await self._read_body(request))
        return JSONResponse({"input_tokens": len(await self._service.make_prompt_aside(body.to_call()))})

    def _find_model(self, request: Request, call: Call) -> Model:
        return self._service.find_model(call.model, _owner_of(request))

    async def _assign_model(self, request: Request, call: Call, body: LenientBody) -> Call:
        """The call with the model of its user, and with a session's messages shortened by its memory. Equal
        prefixes are shared within one owner at most."""
        asker = Asker.read(body.model_extra or {})
        if self._memory is not None and asker.session and call.messages:
            tools = () if call.tool_choice == "none" else call.tools
            measure = partial(self._service.count_tokens, tools=tools)
            _, messages = await self._memory.shorten(asker.session, call.messages, measure)
            call = replace(call, messages=tuple(messages))
        owner = _owner_of(request)
        salt = f"{owner}:{asker.salt}" if owner else asker.salt
        return self._service.assign_model(replace(call, salt=salt), asker.user)

    async def handle_memory(self, request: Request) -> Response:
        assert self._memory is not None
        name = request.path_params["name"]
        if request.method == "POST":
            return JSONResponse(await self._memory.change(name, await self._read_body(request)))
        return JSONResponse(await self._memory.view(name))

    async def _run_calls(self, calls: list[Call], model: Model, id_: str, body: LenientBody) -> Parts:
        """Return the answers of ``model`` to all calls, which run concurrently. They are numbered
        consecutively across calls and recorded under ``id_``. Errors of the requests are raised here."""
        requests = []
        for call in calls:
            requests.append(await self._service.make_requests(call, model))
            await asyncio.sleep(0)  # lets other requests run
        asker = Asker.read(body.model_extra or {})

        async def answer_call(call: Call, call_requests: list[Any], offset: int) -> Parts:
            async with aclosing(self._service.answer_call(call, call_requests, model)) as parts:
                async for part in parts:
                    if self._feedback is not None and isinstance(part, Answer):
                        self._feedback.record(id_, model, call, part, asker, offset + part.index)
                    yield offset + part.index, part

        if len(calls) == 1:
            return answer_call(calls[0], requests[0], 0)
        offsets = accumulate(map(len, requests[:-1]), initial=0)
        return _merge_events(
            [answer_call(*arguments) for arguments in zip(calls, requests, offsets, strict=True)]
        )

    # ---- other routes

    async def list_models(self, request: Request) -> Response:
        rows = [self._describe_model(model) for model in self._service.list_models(_owner_of(request))]
        return JSONResponse({"object": "list", "data": rows, "has_more": False})

    async def get_model(self, request: Request) -> Response:
        model = self._service.find_model(request.path_params["name"], _owner_of(request))
        return JSONResponse(self._describe_model(model))

    def _describe_model(self, model: Model) -> dict[str, Any]:
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
        """Answer vLLM's request: tokenize a text, or messages with the chat template."""
        body = parse_body(_Tokenize, await self._read_body(request))
        if body.messages is not None:
            chat = {"messages": body.messages, **(body.model_extra or {})}
            tokens = await self._service.make_prompt_aside(check_body(ChatBody, chat).to_call())
        else:
            tokens = await self._service.encode(body.prompt)
        limit = self._service.limits.context
        return JSONResponse({"tokens": tokens.tolist(), "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(_Detokenize, await self._read_body(request))
        top = self._service.limits.vocab_size
        if any(not 0 <= token < top for token in body.tokens):
            raise ApiError(f"tokens holds an id outside 0 to {top - 1}", param="tokens")
        return JSONResponse({"prompt": await self._service.decode(body.tokens)})

    async def record_feedback(self, request: Request) -> Response:
        assert self._feedback is not None
        return JSONResponse(await self._feedback.post(await self._read_body(request)))

    async def get_script(self, request: Request) -> Response:
        assert self._feedback is not None
        return self._feedback.script()

    async def report_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "under_way": self._service.num_sequences})

    async def report_metrics(self, request: Request) -> Response:
        text = self._service.metrics.format_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_page(self, request: Request) -> Response:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'self' 'unsafe-inline'; img-src data:"
        )
        frame_policy = "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": f"{policy}; {frame_policy}"}
        text = PAGE.read_text(encoding="utf-8")
        temperature_field = f'step="0.1" value="{self._service.defaults.temperature:g}"'
        text = text.replace('step="0.1" value="1"', temperature_field)
        if self._feedback is not None:
            text = text.replace("<!-- feedback -->", SCRIPT)
        if self._memory is not None:
            text = text.replace("const REMEMBERS = false", "const REMEMBERS = true")
        return HTMLResponse(text, headers=headers)

    # ---- helpers of all routes

    def guard(self, handler: Handler, path: str, dialect: str = "openai") -> Handler:
        """Wrap ``handler``: check the key, write errors in the dialect's format, and count the request."""
        policies, refusal = self._service.policies, partial(_make_refusal, dialect=dialect)

        async def handle_owned(request: Request) -> Response:
            if policies is not None:
                if policies.catalog.has_owners and (self._memory is not None or self._feedback is not None):
                    raise ApiError(  # keys that were made while it runs
                        "--feedback and --memory do not keep keys of the catalog apart; restart without them",
                        status=403,
                        kind="permission_error",
                    )
                request.state.owner = policies.authenticate(read_key(request), self._key)
            return await handler(request)

        guarded_handler = guard(handle_owned, "" if policies is not None else self._key, refusal)
        metrics = self._service.metrics

        async def handle_and_count(request: Request) -> Response:
            response = await guarded_handler(request)
            metrics.hangups.inc(response.status_code == 499)
            metrics.requests.labels(path, response.status_code).inc()
            return response

        return handle_and_count

    async def _read_body(self, request: Request) -> bytes:
        return await read_body(request, self._service.limits.body_bytes)


class _Tokenize(LenientBody):
    prompt: str = ""
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None


class _Detokenize(LenientBody):
    tokens: list[TokenId]


def _owner_of(request: Request) -> str:
    """The owner of the key of a request; "" where there is none."""
    return getattr(request.state, "owner", "")


def _make_id(kind: str) -> str:
    """Return a new response id, unique across servers and restarts."""
    return f"{kind}-{secrets.token_hex(12)}"


def _sum_usage(calls: list[Call], answers: dict[int, Answer]) -> Usage:
    """Sum the usage of all calls. Each prompt counts once, whatever its number of answers."""
    parts, offset = [], 0
    for call in calls:
        parts.append(Usage.count([answers[offset + k] for k in range(call.n)]))
        offset += call.n
    return Usage(
        prompt=sum(part.prompt for part in parts),
        cached=sum(part.cached for part in parts),
        sampled=sum(part.sampled for part in parts),
    )


def _make_refusal(error: ApiError, dialect: str) -> Response:
    body = anthropic_messages.make_error_body(error) if dialect == "anthropic" else error.make_body()
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _stream(parts: Parts, events: Callable[[Parts], AsyncIterator[str]]) -> Response:
    """Return server-sent events. An error before the first part has its own HTTP status; a later error is the
    last event. Starlette cancels the stream of a client that hangs up, which frees the memory of its
    answer."""
    first_part = await anext(parts)

    async def write_lines() -> AsyncIterator[str]:
        async with aclosing(parts):
            try:
                async for line in events(_prepend_part(first_part, parts)):
                    yield line
            except ApiError as error:
                yield format_event(error.make_body(), "error")

    return StreamingResponse(
        write_lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _prepend_part(first_part: tuple[int, Piece | Answer], parts: Parts) -> Parts:
    yield first_part
    async for part in parts:
        yield part


async def _collect(request: Request, parts: Parts) -> dict[int, Answer]:
    """Return the answers by number. If the client hangs up, all calls stop and ClientDisconnect is raised."""

    async def collect() -> dict[int, Answer]:
        async with aclosing(parts):
            return {index: part async for index, part in parts if isinstance(part, Answer)}

    return await run_while_connected(request, collect())


async def _merge_events(streams: list[Parts]) -> Parts:
    """Yield the parts of all streams as they arrive."""
    send, receive = anyio.create_memory_object_stream[tuple[int, Piece | Answer] | BaseException](1024)

    async def forward(stream: Parts) -> None:
        try:
            async with aclosing(stream):
                async for part in stream:
                    await send.send(part)
        except Exception as error:
            await send.send(error)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    forwarding = asyncio.gather(*tasks)
    forwarding.add_done_callback(lambda _: send.close())
    try:
        async for part in receive:
            if isinstance(part, BaseException):
                raise part
            yield part
    finally:
        forwarding.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        receive.close()


class Direct:
    """Answers POST at ``path`` without routing, which would be half of the cost of many small requests."""

    def __init__(self, app: ASGIApp, path: str, handler: Handler) -> None:
        self._app, self._path, self._handler = app, path, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST":
            response = await self._handler(Request(scope, receive, send))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def make_app(
    service: Service,
    *,
    key: str = "",
    added: Additions = NO_ADDITIONS,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """Make the application. ``key``: the API key that clients must send; ``lifespan``: a context that is open
    while the application runs, in its event loop."""
    handlers, feedback, memory = Handlers(service, key, added), added.feedback, added.memory
    if memory is not None:
        memory.show(service.metrics)

    def route(path: str, handler: Handler, method: str = "POST", dialect: str = "openai") -> Route:
        return Route(path, handlers.guard(handler, path, dialect), methods=[method])

    async def handle_failure(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = f"{request.method} {request.url.path}: {error.detail}"
        return _make_refusal(ApiError(sentence, status=error.status_code), "openai")

    feedback_routes = [
        route("/feedback", handlers.record_feedback),
        Route("/feedback.js", handlers.get_script),
    ]
    events = handlers.guard(handlers.record_feedback, "/feedback")
    return Starlette(
        routes=[
            *(feedback_routes if feedback is not None else ()),
            route("/v1/chat/completions", handlers.answer_chat),
            route("/v1/completions", handlers.answer_completions),
            route("/v1/responses", handlers.answer_responses),
            route("/v1/messages", handlers.answer_messages, dialect="anthropic"),
            route("/v1/messages/count_tokens", handlers.count_tokens, dialect="anthropic"),
            route("/v1/models", handlers.list_models, "GET"),
            route("/v1/models/{name:path}", handlers.get_model, "GET"),
            route("/inference/v1/generate", handlers.generate),
            route("/tokenize", handlers.tokenize),
            route("/detokenize", handlers.detokenize),
            *(
                [route("/v1/memory/{name:path}", handlers.handle_memory, m) for m in ("GET", "POST")]
                if memory
                else []
            ),
            Route("/metrics", handlers.report_metrics),
            Route("/health", handlers.report_health),
            Route("/", handlers.show_page),
        ],
        exception_handlers={HTTPException: handle_failure},
        lifespan=lifespan,
        middleware=[Middleware(Direct, path="/feedback", handler=events)] if feedback is not None else [],
    )
