"""JSON over HTTP, as far as a vLLM server needs it: one call for a thread, one for an event loop.

A connection serves one request. To close it is how a request is given up, an idle one can be closed by the
server under the caller's hands, and to open one takes a tenth of a millisecond where an answer takes seconds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

HEAD_BYTES = 1 << 16


class Unreachable(ConnectionError):
    """No whole answer came: nobody listens, the connection broke, or time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    body: Any  # JSON; the text where it is none

    @property
    def error(self) -> str:
        """What vLLM says of a request that it refused, in one line."""
        told = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        message = told.get("message", told) if isinstance(told, dict) else told
        return f"{self.status}: {' '.join(str(message).split())[:400]}"


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError for what is no address of a server."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme != "http" or not host or parts.path not in ("", "/"):
        raise ValueError(f'engine.address is {address!r}; give it as "http://host:8000"')
    return host, port or 80


def call(address: str, method: str, path: str, body: Any = None, *, key: str = "", timeout_s: float) -> Reply:
    """Ask, and wait: ``timeout_s`` at most for each part of the answer; ``key`` is the server's. Raises
    Unreachable."""
    connection = http.client.HTTPConnection(*host_and_port(address), timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, _headers(key))
        response = connection.getresponse()
        return _reply(response.status, response.read())
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{method} {path}: {type(error).__name__} {error}") from error
    finally:
        connection.close()


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


async def post(address: str, path: str, body: Any, *, key: str = "") -> Reply:
    """Ask, and wait as long as it takes; a cancelled call closes the connection. Raises Unreachable."""
    host, port = host_and_port(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES)
        try:
            payload = json.dumps(body).encode()
            lines = (
                f"POST {path} HTTP/1.1",
                f"Host: {host}:{port}",
                *(f"{name}: {value}" for name, value in _headers(key).items()),
                f"Content-Length: {len(payload)}",
                "Connection: close",
            )
            writer.write("\r\n".join((*lines, "", "")).encode() + payload)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            return _reply(int(head.split(None, 2)[1]), await reader.readexactly(_length(head)))
        finally:
            writer.close()
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise Unreachable(f"POST {path}: {type(error).__name__} {error}") from error


def _length(head: str) -> int:
    """vLLM tells it of everything that is not a stream."""
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(value)
    raise ValueError("an answer without Content-Length")


def _reply(status: int, raw: bytes) -> Reply:
    try:
        return Reply(status=status, body=json.loads(raw) if raw else None)
    except ValueError:
        return Reply(status=status, body=raw.decode(errors="replace"))


__all__ = ["Reply", "Unreachable", "call", "host_and_port", "post"]
