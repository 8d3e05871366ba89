"""The connections of a server, with limits on the size of a head, the time in which a request arrives, and
the number of connections. The limits hold before a key is checked.
"""

from __future__ import annotations

import math
import resource
import socket
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10  # of a request line with all headers; a larger head is refused with 431
HEADER_BYTES = 32  # added to the letters of each header, as in HTTP/2
UNREAD_S = 120.0  # for a client to read a response
MAX_CONNECTIONS = 16_384  # connections at once
MAC_FILES = 10_240  # OPEN_MAX of macOS
_TOO_LARGE = b"a request line and its headers have %d bytes at most here" % HEAD_BYTES


def raise_connection_limit() -> int:
    """Return how many connections this process can hold. It raises the limit of descriptors as far as the
    system allows, and keeps a quarter of them for files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, max(soft, MAC_FILES)):  # macOS reports more than it grants
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
            break
    return (
        MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft - max(16, soft // 4))
    )


class Connection(HttpToolsProtocol):
    """A connection. ``waiting``: the connections of the server that wait for their client, longest first, and
    until when, in seconds of the event loop. ``limit``: connections at once; where there are more, the
    connection that has waited longest is closed. ``head_s``, ``body_s``: the time for a head to arrive, and
    then for the body."""

    def __init__(
        self,
        *given: Any,
        waiting: dict[Connection, float],
        limit: int,
        head_s: float,
        body_s: float,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._waiting, self._limit = waiting, limit
        self._head_s, self._body_s = head_s, body_s
        self._head_bytes = self._unparsed_bytes = 0  # of the present head; since the last parsed part

    def _start_wait(self, seconds: float) -> None:
        self._waiting.pop(self, None)
        self._waiting[self] = self.loop.time() + seconds

    # ---- events of the socket

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio sets it only where a socket names its protocol, and sockets of ``create_server`` do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_wait(self._head_s)
        if len(self.connections) > self._limit:
            next(iter(self._waiting)).end()

    def end(self) -> None:
        """Close the connection now, whether or not the client has read all."""
        del self._waiting[self]
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_wait(UNREAD_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._waiting.pop(self, None)

    # ---- events of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self.cycle is None or self.cycle.response_complete:
            self._start_wait(self._head_s)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + HEADER_BYTES)
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("a head is too large")  # ends the parser, which calls ``send_400_response``

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_headers_complete()
        self._start_wait(self._body_s)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._waiting.pop(self, None)
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._start_wait(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self not in self._waiting and self.cycle.response_complete:
            self._start_wait(self.timeout_keep_alive)

    # ---- refusals

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
        kind = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n" % len(_TOO_LARGE)
        self.transport.write(head + kind + _TOO_LARGE)
        self.transport.close()


def close_expired(waiting: dict[Connection, float], now: float) -> None:
    """Close the connections whose client is late."""
    if min(waiting.values(), default=math.inf) > now:
        return
    for connection in [connection for connection, end in waiting.items() if end <= now]:
        connection.end()
