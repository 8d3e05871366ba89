"""The board of a run over HTTP: one page, and the data it requests. Reads the run folder, writes nothing.

    GET /            the page          GET /charts?metric=..&revision=..
    GET /state       all that is small GET /timeline?seconds=..&revision=..
    GET /groups?step=..   groups of a step   GET /group?step=..&place=..   one with its answers

No path of the file system can be requested. The run is read on request, at most twice a second however many
browsers are connected; without requests the server is idle.
"""

from __future__ import annotations

import json
import math
import threading
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
from ostinato.inputs import escaped
from ostinato.observe.board.follow import Follower
from ostinato.observe.board.product import ProductBoard
from ostinato.observe.board.samples import Samples
from ostinato.observe.report.page import solved_at
from ostinato.observe.report.page.offline import FOLDER, render
from ostinato.render import Renderer
from ostinato.run import RunFolder

FOLDERS = (Path(__file__).parent / "page", FOLDER)
SCRIPTS = ("uplot.js", "charts.js", "gantt.js", "samples.js", "board.js")
PORT, TRIES = 7321, 20  # the first port to try, and how many
MOST_SECONDS = 900.0  # of the timeline
CONNECTIONS = 256  # at once; each has a thread
CHOSEN = 24  # metrics in a request, at most

Params = Mapping[str, list[str]]


class Board:
    """Replies to the page's requests; thread-safe. ``renderer``: with it, the tokenizer, answers are shown
    token by token."""

    def __init__(self, run: RunFolder, renderer: Renderer | None = None) -> None:
        self._follower = Follower(run)
        self._following = threading.Lock()
        self._follower.look()
        self._samples = Samples(run.trajectories.path, renderer)
        self._browsing = threading.Lock()
        self.routes: dict[str, Callable[[Params], dict[str, Any]]] = {
            "/state": self._state,
            "/charts": self._charts,
            "/timeline": self._timeline,
            "/groups": self._groups,
            "/group": self._group,
        }

    @cached_property
    def page(self) -> bytes:
        look = {"folders": FOLDERS, "styles": ("report.css", "board.css")}
        data = self._follower.data
        page = render("board.html.jinja", SCRIPTS, **look, name=data.name, solved_at=solved_at(data))
        return escaped(page).encode()

    def _state(self, params: Params) -> dict[str, Any]:
        with self._following:
            self._follower.look()
            return self._follower.state()

    def _charts(self, params: Params) -> dict[str, Any]:
        chosen = params.get("metric", [])[:CHOSEN]
        return self._changed("charts", params, lambda: {"charts": self._follower.charts(chosen)})

    def _timeline(self, params: Params) -> dict[str, Any]:
        seconds = min(MOST_SECONDS, max(1.0, _number(params, "seconds", 120.0)))
        return self._changed("timeline", params, lambda: {"picture": self._follower.timeline(seconds)})

    def _changed(self, what: str, params: Params, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The revision, and the content of ``make`` unless the page already has that revision."""
        with self._following:
            self._follower.look()
            now = self._follower.revisions[what]
            return {"revision": now} | ({} if _number(params, "revision", -1) == now else make())

    def _groups(self, params: Params) -> dict[str, Any]:
        with self._browsing:
            return self._samples.index(_whole(params, "step", -1))

    def _group(self, params: Params) -> dict[str, Any]:
        with self._browsing:
            return self._samples.group(_whole(params, "step", -1), _whole(params, "place", -1))


def _whole(params: Params, name: str, default: int) -> int:
    """Raises ValueError for anything but digits with a sign."""
    return int(params.get(name, [str(default)])[0])


def _number(params: Params, name: str, default: float) -> float:
    """Raises ValueError for a text that is not a number, or NaN."""
    text = params.get(name, [""])[0]
    value = float(text) if text else default
    if math.isnan(value):
        raise ValueError(f"{name} is not a number")
    return value


class Server(ThreadingHTTPServer):
    """Serves one board."""

    daemon_threads = True
    block_on_close = False

    request_queue_size = 128

    def __init__(self, board: Board | ProductBoard, host: str, port: int, access: Access) -> None:
        self.host, self.address_family = host, AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), Handler)
        self.board, self.access = board, access
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
        if refusal := self.server.access.refusal("GET", headers, local=is_loopback(self.server.host)):
            status, sentence = refusal
            self._send(HTTPStatus(status), escaped(f"{sentence}\n").encode(), "text/plain; charset=utf-8")
            return
        url = urlsplit(self.path)
        board = self.server.board
        if url.path == "/":
            self._send(HTTPStatus.OK, board.page, "text/html; charset=utf-8")
            return
        if url.path not in board.routes:
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n", "text/plain")
            return
        try:
            reply = board.routes[url.path](parse_qs(url.query, max_num_fields=64))
            text = json.dumps(reply, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, escaped(f"{error}\n").encode(), "text/plain; charset=utf-8")
            return
        self._send(HTTPStatus.OK, escaped(text).encode(), "application/json")

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


def open_server(board: Board | ProductBoard, host: str, port: int = 0, access: Access = STRICT) -> Server:
    """A server for the board; port 0: the first free one from ``PORT`` on.

    Raises ValueError for a port that is in use and a host that is not an address of this machine.
    """
    tried = [port] if port else range(PORT, PORT + TRIES)
    for one in tried:
        try:
            return Server(board, host, one, access)
        except OSError as error:
            why = error
    what = f"port {port}" if port else f"none of the ports {PORT} to {PORT + TRIES - 1}"
    raise ValueError(f"the board cannot listen on {what} of {host} ({why}); give --port or --host") from None
