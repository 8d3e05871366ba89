"""The HTTP server of an application: its socket, its signals, and the drain at the end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ostinato.serve.calls import ApiError

BACKLOG = 2048
IDLE_S = 75  # keep-alive: longer than clients' pools keep a connection, else a request may hit its close
KEY = "OSTINATO_API_KEY"
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)
FIX = "send it as 'Authorization: Bearer KEY'"


def is_loopback(host: str) -> bool:
    """Is ``host`` a loopback address or "localhost"?"""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_for(host: str, name: str, given: str = "") -> str:
    """The API key that clients must send: ``given``, else $OSTINATO_API_KEY, else "". ``name``: the setting
    that ``host`` is from. Raises ValueError if other machines can reach ``host`` and there is no key."""
    if not (key := given or os.environ.get(KEY, "")) and not is_loopback(host):
        raise ValueError(
            f"{name} {host} can be reached by other machines; give a key: {KEY} in the environment, "
            "or --api-key where the command has it"
        )
    return key


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises ValueError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another port"
        ) from error


def address(listening: socket.socket) -> str:
    """http://host:port of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_key(request: Request, key: str, fix: str = FIX) -> None:
    """ApiError 401 if a request lacks ``key`` in OpenAI's or Anthropic's header; "": none is needed."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    given = given or request.headers.get("x-api-key", "")
    if key and not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(
            f"the API key is missing or wrong; {fix}",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


def guarded(handler: Handler, key: str, refusal: Callable[[ApiError], Response], fix: str = FIX) -> Handler:
    """``handler`` with the key checked, and every failure as a response: a refusal, 499 for a client that has
    left, 500 for the rest, which is logged."""

    async def guarded(request: Request) -> Response:
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

    return guarded


async def read_body(request: Request, most: int) -> bytes:
    """The body. Raises ApiError 413 as soon as more than ``most`` bytes have arrived."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise ApiError(f"the body has more than {most} bytes, this server's limit", status=413)
    return bytes(data)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; if the client hangs up first, it is cancelled and ClientDisconnect is raised.
    The body must have been read."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class HttpServer(uvicorn.Server):
    """Serves ``app`` on ``listening`` until SIGTERM or Ctrl-C: then it accepts no more connections, calls
    ``ending``, and gives running requests ``drain_s`` seconds to end."""

    def __init__(
        self,
        app: Starlette,
        listening: socket.socket,
        drain_s: float,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        options: dict[str, Any] = {"log_level": "warning", "timeout_keep_alive": IDLE_S}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=int(drain_s), **options))
        self._listening, self._ending = listening, ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)

    def serve_until_signal(self) -> None:
        with suppress(KeyboardInterrupt):  # which uvicorn raises again at the end
            self.run(sockets=[self._listening])
