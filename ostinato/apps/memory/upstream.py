"""``ostinato memory serve``: a proxy in front of another server that keeps chats within a token budget.

POST /v1/chat/completions: the messages are shortened, the rest of the body and the answer stay as they are.
GET, POST /v1/memory/{session}: see ``memory.remembered``. Any other path is forwarded unchanged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ostinato.apps.memory.remembered import Remembered
from ostinato.apps.serve.calls import ApiError, read_json
from ostinato.apps.serve.server import read_body

FORWARDED_HEADERS = (
    "authorization",
    "content-type",
    "accept",
    "x-api-key",
    "openai-organization",
    "openai-project",
)
FILES = "multipart/form-data"  # content type of paths that are forwarded without reading them
SESSION_HEADER = "x-ostinato-session"  # header of a reply: the session that it belongs to


class Upstream:
    """The handlers of a proxy in front of ``url`` (".../v1"). ``key`` is sent if a client sends none. Raises
    ValueError for another kind of address."""

    def __init__(self, url: str, remembered: Remembered, key: str = "", timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'the address is {url!r}; give it as "http://host:8000/v1"')
        self._url, self._remembered, self._key = url.rstrip("/"), remembered, key
        self._client = httpx2.AsyncClient(timeout=timeout_s, trust_env=False)

    async def forward_chat(self, request: Request) -> Response:
        """Shorten the messages of a chat, save its session, and forward it. Raises ApiError for other
        bodies."""
        body = read_json(await read_body(request), surrogates=True)
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ApiError("messages is no list of messages with roles", param="messages")
        metadata = body.get("metadata")
        session = metadata.get("session_id") if isinstance(metadata, dict) else ""
        name, body["messages"] = await self._remembered.shorten(str(session or ""), messages)
        return await self._forward(
            request, "/chat/completions", json.dumps(body).encode(), {SESSION_HEADER: name}
        )

    async def forward_other(self, request: Request) -> Response:
        """Forward any other request."""
        path = request.url.path.removeprefix("/v1") + (f"?{request.url.query}" if request.url.query else "")
        return await self._forward(request, path, await read_body(request), {})

    async def _forward(
        self, request: Request, path: str, body: bytes, extra_headers: Mapping[str, str]
    ) -> Response:
        """Send a request on and stream the reply. Raises ApiError 502 where the address does not answer."""
        headers = {name: value for name, value in request.headers.items() if name in FORWARDED_HEADERS}
        if self._key and not {"authorization", "x-api-key"} & headers.keys():
            headers["authorization"] = f"Bearer {self._key}"
        upstream_request = self._client.build_request(
            request.method, self._url + path, content=body, headers=headers
        )
        try:
            reply = await self._client.send(upstream_request, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ApiError(
                f"{self._url} does not answer ({type(error).__name__}: {error})",
                status=502,
                kind="server_error",
            ) from error
        content_type = {"content-type": reply.headers.get("content-type", "application/json")}
        return StreamingResponse(
            _stream_bytes(reply), reply.status_code, headers={**content_type, **extra_headers}
        )

    async def handle_memory(self, request: Request) -> Response:
        """Return the view of a session, after a change if the request is one."""
        name = request.path_params["name"]
        if request.method == "POST":
            return JSONResponse(await self._remembered.change(name, await read_body(request)))
        return JSONResponse(await self._remembered.view(name))

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._client.aclose()

        async def answer_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return JSONResponse(error.make_body(), status_code=error.status)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.forward_chat, methods=["POST"]),
                Route("/v1/memory/{name:path}", self.handle_memory, methods=["GET", "POST"]),
                Route("/{path:path}", self.forward_other, methods=["GET", "POST", "DELETE"]),
            ],
            exception_handlers={ApiError: answer_error},
            lifespan=lifespan,
        )


async def _stream_bytes(reply: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for part in reply.aiter_bytes():
            yield part
    finally:
        await reply.aclose()


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
