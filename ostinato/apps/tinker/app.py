"""The HTTP side of the Tinker server: its routes, keys, long polls, and errors in Tinker's format."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ostinato.apps.serve.calls import read_json
from ostinato.apps.serve.server import Handler, guard, read_body
from ostinato.apps.tinker.futures import SAMPLE, Futures
from ostinato.apps.tinker.listings import Listings
from ostinato.apps.tinker.models import MODEL, CreateBody, LoadBody
from ostinato.apps.tinker.registry import FAILED, PENDING, Registry, UserError
from ostinato.apps.tinker.wire import (
    MAX_BODY_BYTES,
    Body,
    SampleBody,
    Seq,
    parse_body,
    parse_training_request,
    unpack_body,
)
from ostinato.apps.tinker.work import SAMPLER, Work

POLL_S = 30.0  # of a long poll; the SDK's timeout is 45
MAX_INLINE_BYTES = 1 << 20  # a larger result is announced first, if the client supports that
MAX_SAMPLES = 8192  # requests in progress; more are answered with 429, and the SDK waits
PURGE_S = 60.0
SILENCE_S = 900.0  # without a heartbeat of the SDK, which has one every 10 s: its session is over
FETCHED_SAMPLE_S, RESULT_S = (
    600.0,
    7 * 24 * 3600.0,
)  # how long results are kept after the fetch, and otherwise
SESSION = "session"
log = logging.getLogger(__name__)


class SeqBody(Body):
    model_id: str
    seq_id: Seq


class SamplerBody(Body):
    session_id: str
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class SessionBody(Body):
    session_id: str


class ModelBody(Body):
    model_id: str


class FutureBody(Body):
    request_id: str
    allow_metadata_only: bool = False


class Handlers:
    """The handlers of one server."""

    def __init__(self, work: Work, registry: Registry, futures: Futures, key: str = "") -> None:
        self._work, self._registry, self._futures, self._key = work, registry, futures, key
        sessions = (id for id, _, session in registry.list_all(SESSION) if not session.get("finished"))
        self._heartbeats = dict.fromkeys(sessions, time.monotonic())  # of sessions whose clients may be there

    # ---- the handshake

    async def get_client_config(self, request: Request) -> Response:
        return JSONResponse({"sample_no_retries": False, "parallel_fwdbwd_chunks": True})

    async def get_dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def create_session(self, request: Request) -> Response:
        """Create a session. Retries have the same idempotency key, and get the same session."""
        body = await _read_json(request)
        request_key = request.headers.get("x-idempotency-key", "")
        id = hashlib.sha256(request_key.encode()).hexdigest()[:16] if request_key else secrets.token_hex(8)
        if self._registry.get(SESSION, id) is None:
            names = ("tags", "user_metadata", "sdk_version", "project_id", "display_name")
            self._registry.put(SESSION, id, {name: body.get(name) for name in names})
        self._heartbeats[id] = time.monotonic()
        return JSONResponse({"session_id": id, "type": "create_session"})

    async def record_heartbeat(self, request: Request) -> Response:
        body = parse_body(SessionBody, await _read_body(request))
        if self._registry.require(SESSION, body.session_id).get("finished"):
            return _make_refusal("this session has finished", 410)
        self._heartbeats[body.session_id] = time.monotonic()
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        id = request.path_params["session"]
        self._registry.put(
            SESSION, id, {**self._registry.require(SESSION, id), "finished": await _read_json(request)}
        )
        self._heartbeats.pop(id, None)
        await self._work.finish_session(id)
        return Response(status_code=204)

    async def clean_up_repeatedly(self) -> None:
        """Clean up now and then, until cancelled."""
        while True:
            await asyncio.sleep(PURGE_S)
            try:
                await self.clean_up()
            except Exception:  # a full disk, say: the next time it may go
                log.exception("cleaning up failed")

    async def clean_up(self, silence_s: float = SILENCE_S) -> None:
        """Drop old results, expired checkpoints, and the samplers of clients that have gone without a word. A
        client that comes back goes on with its models."""
        self._registry.purge(FETCHED_SAMPLE_S, RESULT_S)
        self._work.delete_expired()
        for id, at in list(self._heartbeats.items()):
            if time.monotonic() - at >= silence_s:
                del self._heartbeats[id]
                if num_deleted := await self._work.finish_session(id):
                    log.info("session %s has no client: %d samplers without a name deleted", id, num_deleted)

    async def discard_telemetry(self, request: Request) -> Response:
        await _read_body(request)
        return JSONResponse({"status": "accepted"})

    async def report_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def list_capabilities(self, request: Request) -> Response:
        base = self._work.base
        model = {"model_name": base.name, "max_context_length": base.context_limit}
        return JSONResponse({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    # ---- promises

    async def create_model(self, request: Request) -> Response:
        data = await _read_body(request)
        body = parse_body(CreateBody, data)
        self._registry.require(SESSION, body.session_id)
        return self._submit(f"{body.session_id}:train:{body.model_seq_id}", 0, "create_model", data)

    async def load_weights(self, request: Request) -> Response:
        data = await _read_body(request)
        body = parse_body(LoadBody, data)
        if body.session_id is not None and body.model_seq_id is not None:
            self._registry.require(SESSION, body.session_id)
            return self._submit(f"{body.session_id}:train:{body.model_seq_id}", 0, "load_weights", data)
        if body.model_id is None or body.seq_id is None:
            raise UserError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        return self._submit_for_model(body.model_id, body.seq_id, "load_weights", data)

    async def forward_backward(self, request: Request) -> Response:
        data = unpack_body(await _read_body(request), request.headers.get("content-encoding", ""))
        message = parse_training_request(data)
        return self._submit_for_model(message.model_id, message.seq_id, "forward_backward", data)

    def make_model_handler(self, kind: str) -> Handler:
        """Return the handler of a model's requests of ``kind``, whose body is JSON."""

        async def handler(request: Request) -> Response:
            data = await _read_body(request)
            body = parse_body(SeqBody, data)
            return self._submit_for_model(body.model_id, body.seq_id, kind, data)

        return handler

    def _submit_for_model(self, model: str, seq: int, kind: str, data: bytes) -> Response:
        self._registry.require(MODEL, model)
        if seq < 1:
            raise UserError(f"seq_id is {seq}; the requests of a model count from 1")
        return self._submit(model, seq, kind, data)

    def _submit(self, model: str, seq: int, kind: str, data: bytes) -> Response:
        id = f"{model}:{seq}"
        self._futures.submit(id, model, seq, kind, data)
        return JSONResponse({"request_id": id, "model_id": model})

    async def submit_sample(self, request: Request) -> Response:
        data = await _read_body(request)
        body = parse_body(SampleBody, data)
        if self._futures.num_samples >= MAX_SAMPLES:
            return _make_refusal(f"{MAX_SAMPLES} samples are under way; try again later", 429)
        if body.sampling_session_id is not None:
            if body.seq_id is None:
                raise UserError("seq_id is missing; requests of a sampling session are numbered")
            self._registry.require(SAMPLER, body.sampling_session_id)
            id, owner = f"{body.sampling_session_id}:{body.seq_id}", body.sampling_session_id
        else:
            id, owner = f"sample:{secrets.token_hex(8)}", ""
        self._futures.submit(id, owner, body.seq_id or 0, SAMPLE, data)
        sequence_ids = [f"{id}:{k}" for k in range(min(body.num_samples, 1024))]
        return JSONResponse({"request_id": id, "sample_sequence_ids": sequence_ids})

    async def retrieve_result(self, request: Request) -> Response:
        """The result; 408 while it is pending, 410 if the request is unknown or its result was dropped."""
        body = parse_body(FutureBody, await _read_body(request))
        stored = await self._futures.wait_for_result(body.request_id, POLL_S)
        if stored is None or (stored.state != PENDING and stored.result is None):
            return _make_refusal(f"the request {body.request_id} is not known here; submit it again", 410)
        if stored.state == PENDING:
            retry = {"type": "try_again", "request_id": stored.id, "queue_state": "active"}
            return JSONResponse(retry, status_code=408)
        assert stored.result is not None
        if stored.state != FAILED and body.allow_metadata_only and len(stored.result) > MAX_INLINE_BYTES:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(stored.result)})
        return Response(stored.result, media_type=stored.media)

    async def cancel_sample(self, request: Request) -> Response:
        self._futures.cancel(parse_body(FutureBody, await _read_body(request)).request_id)
        return Response(status_code=204)

    # ---- models and samplers

    async def get_model_info(self, request: Request) -> Response:
        id = parse_body(ModelBody, await _read_body(request)).model_id
        base, rank = self._work.base, self._work.models.get_spec(id).rank
        data = {"arch": base.decoder.config.model_type, "model_name": base.name, "tokenizer_id": base.path}
        lora = {"is_lora": True, "lora_rank": rank}
        return JSONResponse(
            {"type": "get_info", "model_data": data, "model_id": id, "model_name": base.name, **lora}
        )

    async def unload_model(self, request: Request) -> Response:
        id = parse_body(ModelBody, await _read_body(request)).model_id
        await self._work.models.release(id)
        return JSONResponse({"request_id": id, "model_id": id, "type": "unload_model"})

    async def create_sampler(self, request: Request) -> Response:
        body = parse_body(SamplerBody, await _read_body(request))
        self._registry.require(SESSION, body.session_id)
        if body.model_path is None:
            self._work.models.check_base(body.base_model or "")
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self._work.register_sampler(id, body.session_id, body.model_path)
        return JSONResponse({"sampling_session_id": id, "type": "create_sampling_session"})

    async def get_sampler(self, request: Request) -> Response:
        id = request.path_params["sampler"]
        path = self._registry.require(SAMPLER, id)["path"]
        return JSONResponse({"sampler_id": id, "base_model": self._work.base.name, "model_path": path})

    def guard(self, handler: Handler) -> Handler:
        """Wrap ``handler``: check the key, and write errors in Tinker's format."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except UserError as error:
                return _make_refusal(str(error), error.status)

        return guard(
            handle,
            self._key,
            lambda error: _make_refusal(str(error), error.status),
            "set TINKER_API_KEY",
        )


def _make_refusal(sentence: str, status: int) -> Response:
    log.info("refused with %d: %s", status, sentence)
    category = "user" if status < 500 else "server"
    return JSONResponse({"error": sentence, "category": category}, status_code=status)


async def _read_body(request: Request) -> bytes:
    return await read_body(request, MAX_BODY_BYTES)


async def _read_json(request: Request) -> dict[str, Any]:
    body = read_json(await _read_body(request) or b"{}")
    if not isinstance(body, dict):
        raise UserError("the body is no JSON object")
    return body


def make_app(work: Work, registry: Registry, *, key: str = "") -> Starlette:
    """Make the application. ``key``: the API key of clients; "": none. The application resumes pending
    requests at its start, and saves all models at its end. ``state.end_waits()`` ends long polls."""
    futures = Futures(registry, work.run)
    handlers, listings = Handlers(work, registry, futures, key), Listings(work, registry)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        futures.resume()
        cleaning = asyncio.create_task(handlers.clean_up_repeatedly())
        try:
            yield
        finally:
            cleaning.cancel()
            await futures.close()
            await work.models.close()
            log.info("ended, models saved; %d requests run at the next start", len(registry.list_pending()))

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(f"/api/v1{path}", handlers.guard(handler), methods=methods or ("POST",))

    async def handle_failure(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        sentence = f"this server does not offer {what}; docs/tinker.md says what it offers"
        return _make_refusal(sentence, error.status_code)

    kinds = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
    app = Starlette(
        routes=[
            route("/client/config", handlers.get_client_config),
            route("/client/dynamic_config", handlers.get_dynamic_config),
            route("/create_session", handlers.create_session),
            route("/session_heartbeat", handlers.record_heartbeat),
            route("/sessions/{session}/finish", handlers.finish_session),
            route("/telemetry", handlers.discard_telemetry),
            route("/healthz", handlers.report_health, "GET"),
            route("/get_server_capabilities", handlers.list_capabilities, "GET"),
            route("/create_model", handlers.create_model),
            route("/load_weights", handlers.load_weights),
            route("/forward_backward", handlers.forward_backward),
            *(route(f"/{kind}", handlers.make_model_handler(kind)) for kind in kinds),
            route("/asample", handlers.submit_sample),
            route("/retrieve_future", handlers.retrieve_result),
            route("/cancel_future", handlers.cancel_sample),
            route("/get_info", handlers.get_model_info),
            route("/unload_model", handlers.unload_model),
            route("/create_sampling_session", handlers.create_sampler),
            route("/samplers/{sampler}", handlers.get_sampler, "GET"),
            *(route(path, handler, method) for path, method, handler in listings.list_routes()),
        ],
        exception_handlers={HTTPException: handle_failure},
        lifespan=lifespan,
    )
    app.state.end_waits = futures.end_waits
    return app
