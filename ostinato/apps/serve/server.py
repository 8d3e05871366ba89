"""The HTTP server of an application: its socket, its signals, and the drain at the end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.access import READ_HEADERS, Access, is_loopback
from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.connections import Connection, close_expired, raise_connection_limit

BACKLOG = 2048
BODY_BYTES = 64 << 20  # unless a server has another limit
IDLE_S = 75  # keep-alive: longer than in clients' pools, else the server may close as a request comes
KEY_VARIABLE = "OSTINATO_API_KEY"
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)
HEADER_NAMES = {name.encode(): name for name in READ_HEADERS}
KEY_FIX = "send it as 'Authorization: Bearer KEY'"


def choose_key(host: str, name: str, given: str = "") -> str:
    """Return the API key that clients must send: ``given``, else $OSTINATO_API_KEY, else "". ``name``: the
    setting of ``host``. Raises ValueError if other machines can reach ``host`` and there is no key."""
    if not (key := given or os.environ.get(KEY_VARIABLE, "")) and not is_loopback(host):
        raise ValueError(
            f"{name} {host} can be reached by other machines; give a key: {KEY_VARIABLE} in the environment, "
            "or --api-key where the command has it"
        )
    return key


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0: any free port. Raises ValueError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another port"
        ) from error


def format_address(listening: socket.socket) -> str:
    """Return http://host:port of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_key(request: Request) -> str:
    """Return the key in OpenAI's or Anthropic's header; "" without one."""
    sent_key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return sent_key or request.headers.get("x-api-key", "")


def check_key(request: Request, key: str, fix: str = KEY_FIX) -> None:
    """Raise ApiError 401 if a request lacks ``key`` in OpenAI's or Anthropic's header; "": none is needed."""
    sent_key = read_key(request)
    if key and not hmac.compare_digest(sent_key.encode(), key.encode()):
        raise ApiError(
            f"the API key is missing or wrong; {fix}",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


def guard(handler: Handler, key: str, refusal: Callable[[ApiError], Response], fix: str = KEY_FIX) -> Handler:
    """Wrap ``handler``: check the key, and return each failure as a response: a refusal, 499 for a client
    that has hung up, 500 for all others, which are logged."""

    async def handle(request: Request) -> Response:
        try:
            check_key(request, key, fix)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except ApiError as error:
            return refusal(error)
        except Exception as error:
            log.exception("a request failed")
            return refusal(ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error"))

    return handle


async def read_body(request: Request, max_bytes: int = BODY_BYTES) -> bytes:
    """Read the body. Raises ApiError 413 as soon as more than ``max_bytes`` bytes have arrived."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise ApiError(f"the body has more than {max_bytes} bytes, this server's limit", status=413)
    return bytes(data)


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client hangs up first, the work is cancelled and ClientDisconnect
    is raised. The body must have been read."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work_task, disconnect_task = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


class Entrance:
    """``app`` behind the rules of ``access``. ``is_local``: the server listens on a loopback address."""

    def __init__(self, app: ASGIApp, access: Access, *, is_local: bool) -> None:
        permissions: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        origins = [*access.origins]
        self._app = CORSMiddleware(app, allow_origins=origins, **permissions) if origins else app
        self._access, self._is_local = access, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {
                HEADER_NAMES[name]: value.decode("latin-1")
                for name, value in scope["headers"]
                if name in HEADER_NAMES
            }
            if refusal := self._access.find_refusal(scope["method"], headers, local=self._is_local):
                status, sentence = refusal
                error = ApiError(sentence, status=status)
                await JSONResponse(error.make_body(), status_code=status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HttpServer(uvicorn.Server):
    """Serves ``app`` on ``listening``, within the rules of ``access``, until SIGTERM or Ctrl-C. Then it
    accepts no more connections, calls ``end_waits``, and gives running requests ``drain_s`` seconds to end. A
    connection is closed where a head has not arrived after ``head_s``, its body after ``body_s`` more, or the
    next request after ``idle_s``."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        access: Access,
        *,
        drain_s: float = 30.0,
        end_waits: Callable[[], None] = lambda: None,
        idle_s: int = IDLE_S,
        head_s: float = 30.0,
        body_s: float = 300.0,
        **options: Any,
    ) -> None:
        self._waiting: dict[Connection, float] = {}
        is_local = is_loopback(listening.getsockname()[0])
        limits = {"limit": raise_connection_limit(), "head_s": head_s, "body_s": body_s}
        config = uvicorn.Config(
            Entrance(app, access, is_local=is_local),
            http=partial(Connection, waiting=self._waiting, **limits),  # type: ignore[arg-type]
            ws="none",
            timeout_graceful_shutdown=int(drain_s),
            timeout_keep_alive=idle_s,
            backlog=1,  # asyncio accepts this many in a row, and after a failure tries all of them again
            **{"log_level": "warning", **options},
        )
        super().__init__(config)
        self._listening, self._end_waits = listening, end_waits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            close_expired(self._waiting, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_waits()
        await super().shutdown(sockets)

    def serve_until_signal(self) -> None:
        with suppress(KeyboardInterrupt):  # uvicorn raises it again at the end
            self.run(sockets=[self._listening])
