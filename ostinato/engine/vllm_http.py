"""JSON over HTTP for a vLLM server: one call for a thread, one for an event loop.

A connection serves one request: an idle one can be closed by the server while the next request is sent, and
closing it is how a request is given up. To open one takes a millisecond where an answer takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx2

DIRECT: dict[str, Any] = {"trust_env": False, "verify": False}  # no proxy; the address is plain http


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
    """The answer, with at most ``timeout_s`` for each part of it; ``key`` is the server's. Raises
    Unreachable."""
    import httpx2  # of the extra "vllm"

    try:
        with httpx2.Client(timeout=timeout_s, **DIRECT) as client:
            return _reply(client.request(method, address + path, json=body, headers=_headers(key)))
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(f"{method} {path}: {type(error).__name__} {error}") from error


async def post(address: str, path: str, body: Any, *, key: str = "") -> Reply:
    """The answer, however long it takes; a cancelled call closes the connection. Raises Unreachable."""
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=None, **DIRECT) as client:
            return _reply(await client.post(address + path, json=body, headers=_headers(key)))
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(f"POST {path}: {type(error).__name__} {error}") from error


def _headers(key: str) -> dict[str, str]:
    return {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _reply(response: httpx2.Response) -> Reply:
    try:
        return Reply(status=response.status_code, body=response.json() if response.content else None)
    except ValueError:
        return Reply(status=response.status_code, body=response.text)


__all__ = ["Reply", "Unreachable", "call", "host_and_port", "post"]
