"""The page over HTTP, of a run that goes on: it fetches what is new. Reads the run folder, writes nothing.

    GET /                                   the page
    GET /rows?epoch=..&from=..&state=..     rows behind the offset ``from``; the state, if it is another one
    GET /groups?step=..                     groups of a step
    GET /group?step=..&place=..             one of them, with its answers

A reply names the epoch and the offset to ask with next; of another epoch, as a log was replaced, it begins at
0. No path of the file system can be requested. The folder is read on request, at most twice a second however
many browsers are connected; without requests the server is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ostinato.access import STRICT, Access, is_loopback
from ostinato.inputs import escape_surrogates
from ostinato.observe.page import html, now, state
from ostinato.observe.rows import RunRows
from ostinato.observe.samples import Samples
from ostinato.render import Renderer
from ostinato.run import Jsonl, RunFolder, to_json

PORT, TRIES = 7321, 20  # the first port to try, and how many
CONNECTIONS = 256  # at once; each has a thread
AGAIN_S = 0.5  # between two reads of the folder, for all pages together
ROWS = 4000  # in a reply, at most
REST = 20  # a state that took t seconds is not made again within REST x t
JOURNAL = "decisions.jsonl"  # of a product's loop

Params = Mapping[str, list[str]]


class LivePage:
    """Replies to the page's requests; thread-safe. ``renderer``: with it, the tokenizer, answers are shown
    token by token."""

    def __init__(self, run: RunFolder, renderer: Renderer | None = None) -> None:
        self._data = RunRows(run, follow=True)
        self._samples = Samples(run.trajectories.path, renderer)
        self._looked = self._due = float("-inf")
        self._state: dict[str, Any] = {}
        self._of = (-1, -1, -1)  # what the state was made of
        self._revision = 0
        self._lock = threading.Lock()
        self.routes: dict[str, Callable[[Params], dict[str, Any]]] = {
            "/rows": self._rows,
            "/groups": self._groups,
            "/group": self._group,
        }

    @cached_property
    def page(self) -> bytes:
        return html({"live": True, "name": self._data.name}).encode()

    def _look(self) -> None:
        """Read what is new, unless that was done just now, and make the state of it."""
        data, clock = self._data, time.monotonic
        if clock() - self._looked >= AGAIN_S:
            data.look()
            self._looked = clock()
        of = (data.epoch, len(data.arrived), sum(map(len, data.logs.values())))
        if of != self._of and clock() >= self._due:
            started = clock()
            self._state, self._of = state(data, self._samples), of
            self._revision += 1
            self._due = clock() + REST * (clock() - started)

    def _rows(self, params: Params) -> dict[str, Any]:
        with self._lock:
            self._look()
            data = self._data
            epoch, first = _whole(params, "epoch", -1), max(0, _whole(params, "from", 0))
            first = first if epoch == data.epoch else 0
            new = data.arrived[first : first + ROWS]
            rows = {log: [row for name, row in new if name == log] for log in ("metrics", "timeline")}
            same = _whole(params, "state", -1) == self._revision
            reply = {**now(data), "epoch": data.epoch, "from": first, "next": first + len(new)}
            reply |= {"more": reply["next"] < len(data.arrived), "revision": self._revision, "rows": rows}
            return reply | ({} if same else {"state": self._state})

    def _groups(self, params: Params) -> dict[str, Any]:
        with self._lock:
            return self._samples.index(_whole(params, "step", -1))

    def _group(self, params: Params) -> dict[str, Any]:
        with self._lock:
            return self._samples.group(_whole(params, "step", -1), _whole(params, "place", -1))


class LiveJournal:
    """The page of a product's loop: the decisions in its journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.routes: dict[str, Callable[[Params], dict[str, Any]]] = {"/rows": self._rows}

    @cached_property
    def page(self) -> bytes:
        return html({"live": True, "name": self._folder.resolve().name, "journal": []}).encode()

    def _rows(self, params: Params) -> dict[str, Any]:
        first = max(0, _whole(params, "from", 0))
        rows = list(Jsonl(self._folder / JOURNAL).rows())
        return {"from": first, "next": len(rows), "journal": rows[first:]}


def open_page(path: Path, renderer: Callable[[RunFolder], Renderer | None]) -> LivePage | LiveJournal:
    """Of the run, or of the product's loop, in ``path``. Raises ValueError where there is none."""
    if (path / JOURNAL).is_file():
        return LiveJournal(path)
    run = RunFolder.open(path)
    return LivePage(run, renderer(run))


def _whole(params: Params, name: str, default: int) -> int:
    """Raises ValueError for anything but digits with a sign."""
    return int(params.get(name, [str(default)])[0])


class Server(ThreadingHTTPServer):
    """Serves one page."""

    daemon_threads = True
    block_on_close = False

    request_queue_size = 128

    def __init__(self, shown: LivePage | LiveJournal, host: str, port: int, access: Access) -> None:
        self.host, self.address_family = host, AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), Handler)
        self.shown, self.access = shown, access
        self._room = threading.BoundedSemaphore(CONNECTIONS)

    def server_bind(self) -> None:
        """Bind without the reverse look-up of the host name, which can take long and is not needed."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    @property
    def address(self) -> str:
        name = "localhost" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive connections
    timeout = 60  # seconds without a request on one
    server: Server

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        if refusal := self.server.access.find_refusal("GET", headers, local=is_loopback(self.server.host)):
            status, sentence = refusal
            self._send(
                HTTPStatus(status), escape_surrogates(f"{sentence}\n").encode(), "text/plain; charset=utf-8"
            )
            return
        url = urlsplit(self.path)
        shown = self.server.shown
        if url.path == "/":
            self._send(HTTPStatus.OK, shown.page, "text/html; charset=utf-8")
            return
        if url.path not in shown.routes:
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n", "text/plain")
            return
        try:
            reply = shown.routes[url.path](parse_qs(url.query, max_num_fields=64))
            text = to_json(reply)
        except ValueError as error:
            self._send(
                HTTPStatus.BAD_REQUEST, escape_surrogates(f"{error}\n").encode(), "text/plain; charset=utf-8"
            )
            return
        self._send(HTTPStatus.OK, escape_surrogates(text).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a page sends a request every second."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser has disconnected


def open_server(shown: LivePage | LiveJournal, host: str, port: int = 0, access: Access = STRICT) -> Server:
    """A server for the page; port 0: the first free one from ``PORT`` on.

    Raises ValueError for a port that is in use and a host that is not an address of this machine.
    """
    tried = [port] if port else range(PORT, PORT + TRIES)
    for number in tried:
        try:
            return Server(shown, host, number, access)
        except OSError as error:
            why = error
    what = f"port {port}" if port else f"none of the ports {PORT} to {PORT + TRIES - 1}"
    raise ValueError(
        f"the page cannot be served on {what} of {host} ({why}); give --port or --host"
    ) from None
