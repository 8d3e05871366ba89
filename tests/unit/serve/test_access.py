"""Who is let in: Host, Origin and Content-Type, heads and connections, at every server of the package."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from typer.main import get_command

from ostinato.access import STRICT, Access, is_loopback
from ostinato.apps.memory.command import app as memory
from ostinato.apps.product.judge_command import app as judge
from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.connections import HEAD_BYTES, Connection
from ostinato.apps.serve.elsewhere import Place
from ostinato.apps.serve.server import HttpServer, format_address, open_socket, read_body
from ostinato.cli.app import app as commands
from ostinato.model.named import find_model_folder
from ostinato.observe.page.serve import LivePage, open_server
from ostinato.render import Renderer
from ostinato.run import RunFolder

PACKAGE = Path(__file__).parents[3] / "ostinato"
LISTENING = {"serve", "proxy", "tinker", "memory serve", "report"}
FOREIGN = "https://page.example"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that takes everything."""
    if scope["type"] == "http":
        body = await Request(scope, receive).body()
        await JSONResponse({"bytes": len(body)})(scope, receive, send)


@contextmanager
def uvicorn_server(access: Access, tmp_path: Path, **times: float) -> Iterator[str]:
    with open_socket("127.0.0.1", 0) as listening:
        server = HttpServer(echo, listening, access, lifespan="off", **times)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_until_signal)
        thread.start()
        try:
            yield format_address(listening)
        finally:
            server.should_exit = True
            thread.join(20)


@contextmanager
def agents(access: Access, tmp_path: Path) -> Iterator[str]:
    with closing(AgentServer(Renderer(find_model_folder("asset:seed-moe")), Place(access=access))) as server:
        yield server.address


@contextmanager
def report(access: Access, tmp_path: Path) -> Iterator[str]:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.write_text('name = "r"\n')
    with open_server(LivePage(run), "127.0.0.1", access=access) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join(20)


SERVERS = {"uvicorn": uvicorn_server, "agents": agents, "report": report}


def ask(url: str, method: str = "GET", body: bytes | None = None, /, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    with closing(connection):
        connection.request(method, "/", body, {name.replace("_", "-"): one for name, one in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read()


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        yield from _commands(command, f"{before}{name} ") if inner else [(before + name, command)]


def test_every_command_that_listens_has_the_door() -> None:
    """Only the board looked at Host. A command that is added with --host needs --allowed-host as well."""
    found = dict(_commands(get_command(commands)))
    for name, app in {"judge ": judge, "memory ": memory}.items():
        found |= dict(_commands(get_command(app), name))
    options = {name: {one for p in command.params for one in p.opts} for name, command in found.items()}
    assert {name for name, given in options.items() if "--host" in given} == LISTENING
    assert {name for name, given in options.items() if "--allowed-host" in given} == LISTENING


def test_no_server_is_made_beside_those_that_have_it() -> None:
    """A server of a library that is begun anywhere else would have no door."""
    maker = re.compile(r"uvicorn\.(Server|Config|run)|HTTPServer\b|asyncio\.start_server|loop\.create_server")
    files = (file for file in PACKAGE.rglob("*.py") if maker.search(file.read_text(encoding="utf-8")))
    assert {str(file.relative_to(PACKAGE)) for file in files} == {
        "apps/serve/server.py",
        "observe/page/serve.py",
    }


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_a_rebound_name_and_a_foreign_page_are_refused(server: Callable, tmp_path: Path) -> None:
    """A page whose name was rebound to 127.0.0.1 read chats and memories, and sent events for training."""
    allowed = Access(hosts=frozenset({"policy.example"}))
    with server(allowed, tmp_path) as url:
        own = url.removeprefix("http://")
        welcome = ask(url)[0]
        assert welcome in (200, 404)
        for name in ("localhost", "127.9.9.9", "[::1]:80", "policy.example", own):
            assert ask(url, Host=name)[0] == welcome, name
        for name in ("page.example", "page.example:8000", "localhost.page.example", "2130706433", "[", ""):
            assert ask(url, Host=name)[0] == 403, name
        assert ask(url, Origin=url)[0] == welcome
        for origin in (FOREIGN, "null", "http://127.0.0.1:1"):
            assert ask(url, Origin=origin)[0] == 403, origin


@pytest.mark.parametrize("server", [uvicorn_server, agents])
def test_a_body_that_needs_no_preflight_is_refused(server: Callable, tmp_path: Path) -> None:
    """A text/plain POST of any page was carried out: chats, pins in a memory, requests of Tinker."""
    with server(STRICT.permit_types("application/x-protobuf"), tmp_path) as url:
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/x-protobuf"):
            assert ask(url, "POST", b"{}", Content_Type=kind)[0] in (200, 404)
        assert ask(url, "POST", b"")[0] in (200, 404)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            assert ask(url, "POST", b"{}", Content_Type=kind)[0] == 415
        assert ask(url, "POST", b"{}")[0] == 415


def test_a_page_that_is_named_may_call(tmp_path: Path) -> None:
    with uvicorn_server(Access(origins=frozenset({FOREIGN})), tmp_path) as url:
        preflight = {"Access_Control_Request_Method": "POST", "Origin": FOREIGN}
        assert ask(url, "OPTIONS", **preflight)[0] == 200
        assert ask(url, "POST", b"{}", Origin=FOREIGN, Content_Type="application/json")[0] == 200
        assert ask(url, "OPTIONS", **{**preflight, "Origin": "https://other.example"})[0] == 403


def test_other_machines_may_call_by_any_name() -> None:
    """A server that listens beyond the loopback has a key, which a page does not know."""
    for host in ("192.0.2.7:8000", "gpu.example"):
        assert STRICT.find_refusal("GET", {"host": host}, local=False) is None
        named = Access(hosts=frozenset({"gpu.example"})).find_refusal("GET", {"host": host}, local=False)
        assert (named is None) == (host == "gpu.example")
    assert is_loopback("::1") and not is_loopback("0.0.0.0")


# ---- heads and connections


def sent(url: str, data: bytes) -> bytes:
    """The first line of what comes back."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        return connection.recv(65536).partition(b"\r\n")[0]


HEADS = {
    "many headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * HEAD_BYTES + b"\r\n\r\n",
    "a long line": b"GET /?" + b"y" * HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_beyond_64_kb_is_refused(head: bytes, tmp_path: Path) -> None:
    """20 million headers of one connection took 2 GB, before a key was looked at; one of 216 MB held the
    server for 40 s."""
    with uvicorn_server(STRICT, tmp_path) as url:
        assert sent(url, head).split()[1] == b"431"
        cookies = b"".join(b"c%d: %s\r\n" % (k, b"y" * 1000) for k in range(40))
        usual = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = b"Content-Length: 300000\r\n\r\n" + b"1" * 300_000
        assert sent(url, usual + cookies + body).split()[1] == b"200"


def test_a_body_of_an_agent_has_an_end() -> None:
    """The servers of agents and of memories read bodies of any length."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * (1 << 20), "more_body": True}

    async def read() -> None:
        with pytest.raises(ApiError) as refused:
            await read_body(Request({"type": "http", "headers": []}, receive), 4 << 20)
        assert refused.value.status == 413

    asyncio.run(read())
    files = (PACKAGE / "apps").rglob("*.py")
    assert not [file.name for file in files if "request.body()" in file.read_text()]


def test_a_header_without_end_is_not_kept(tmp_path: Path) -> None:
    """The parser keeps a header until its end: what it does not take counts too, in heads and trailers."""
    with uvicorn_server(STRICT, tmp_path) as url:
        host, port = url.removeprefix("http://").split(":")
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for start in (head + b"x: ", head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(start)
                with pytest.raises((ConnectionError, BrokenPipeError)):
                    for _ in range(1000):
                        connection.sendall(b"y" * 65536)


IDLE = """
    import json, resource, socket, sys, threading, urllib.request
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 120))
    from ostinato.access import STRICT
    from ostinato.apps.serve.server import HttpServer, format_address, open_socket
    from tests.unit.serve.test_access import echo
    listening = open_socket("127.0.0.1", 0)
    print(format_address(listening), resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    HttpServer(echo, listening, STRICT, lifespan="off").serve_until_signal()
"""


@pytest.mark.slow
def test_idle_connections_do_not_make_a_server_deaf(tmp_path: Path) -> None:
    """1,100 idle connections at a limit of 1,024 descriptors: /health timed out for as long as they stayed,
    with a core in use and 10 MB/s of tracebacks. The longest-waiting ones give way now."""
    errors = tmp_path / "errors"
    script = textwrap.dedent(IDLE)
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=PACKAGE.parent,
            text=True,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        host, port = url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
        for connection in idle[::2]:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(3):
            assert json.loads(ask(url)[1]) == {"bytes": 0}
        assert idle[0].recv(1) == b""  # closed
        for connection in idle:
            connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert errors.stat().st_size < 20_000, errors.read_text()[-2000:]


def test_a_request_that_does_not_arrive_ends(tmp_path: Path) -> None:
    """Half a head and half a body were kept for ever."""
    with uvicorn_server(STRICT, tmp_path, head_s=0.5, body_s=0.5) as url:
        host, port = url.removeprefix("http://").split(":")
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for half in (b"", head, head + b"Content-Length: 10\r\n\r\n{"):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(half)
                assert connection.recv(1) == b""


def test_what_is_written_is_sent_at_once() -> None:
    """Head and body are two writes, and Nagle's algorithm kept the second one back until the client's delayed
    acknowledgement: 40 ms for each request of a connection after its first."""

    async def without_delay() -> int:
        connections: list[Connection] = []

        class Recorded(Connection):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                connections.append(self)

        with open_socket("127.0.0.1", 0) as listening:
            server = HttpServer(echo, listening, STRICT, lifespan="off")
            server.config.load()
            make = server.config.http_protocol_class
            named = {**make.keywords, "config": server.config, "server_state": server.server_state}  # type: ignore[attr-defined]
            loop = asyncio.get_running_loop()
            serving = await loop.create_server(lambda: Recorded(app_state={}, **named), sock=listening)
            _, writer = await asyncio.open_connection(*listening.getsockname())
            while not connections:
                await asyncio.sleep(0)
            accepted = connections[0].transport.get_extra_info("socket")
            option = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            serving.close()
            return option

    assert asyncio.run(without_delay())
