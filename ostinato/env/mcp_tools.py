"""Tools of MCP servers (extra ``mcp``): ``task.tools = ["mcp:python server.py",
"mcp:https://example.org/mcp"]``.

A server is started, or connected to at its address, once for all episodes of a run: they share the state that
it keeps between calls. The chat template is given the server's names, descriptions and JSON schemas.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
import tempfile
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TextIO, cast

PREFIX = "mcp:"
START_S = 60.0  # for a server to come up and to list its tools; it may have to be installed first
CALL_S = 60.0  # limit of a call, also when its episode has stopped waiting for it


class ToolLost(Exception):
    """The server of a tool is gone. This is a fault of the episode, not a reply that a policy could learn
    from."""


@dataclass(frozen=True)
class McpTool:
    """A tool of ``server``, called with keywords. ``schema``: a function of OpenAI's API."""

    server: McpServer
    name: str
    schema: Mapping[str, Any]

    def __call__(self, **arguments: Any) -> str:
        return self.server.call(self.name, arguments)


@dataclass(frozen=True)
class _Session:
    client: Any  # mcp.Client
    tools: tuple[Any, ...]  # mcp.types.Tool


class McpServer:
    """A session with the server that ``spec`` names, kept open by an event loop in a thread of its own.

    The session ends when the last of its tools is gone, or with this process. A lost session is opened again,
    and until then calls raise ToolLost. Raises ValueError where the library is missing, and where the server
    does not start in time or has no tools.
    """

    def __init__(self, spec: str) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(f"task.tools has {spec!r}, which needs mcp; install the extra mcp")
        self._spec = spec
        self._stderr = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115  closed by the finalizer
        weakref.finalize(self, self._stderr.close)
        self._loop, self._lock = asyncio.new_event_loop(), threading.Lock()
        threading.Thread(target=_run_loop, args=(self._loop,), name=spec, daemon=True).start()
        weakref.finalize(self, _end_loop, self._loop)
        self._session_future = self._open_session()
        try:
            tools = self._session_future.result(START_S).tools
        except Exception as error:  # a server may fail in any way
            self._stderr.seek(0)
            *_, last_line = ["", *self._stderr.read().split("\n")[:-1]]
            raise ValueError(
                f"task.tools has {spec!r}, which gave no list of tools: {_find_reason(error)}"
                + (f"; the last that it wrote is {last_line!r}" if last_line else "")
            ) from error
        if not tools:
            raise ValueError(f"task.tools has {spec!r}, a server without tools; name another")
        self.tools = {tool.name: McpTool(self, tool.name, _make_schema(tool)) for tool in tools}

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the text of its reply. Raises RuntimeError with the server's message for a
        call that failed. Raises ToolLost where there is no server, and then starts to open the session
        again."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        session_future = self._session_future
        if not session_future.done():
            raise ToolLost(f"{self._spec} is being started again")
        try:
            client = session_future.result().client
            request = client.call_tool(name, dict(arguments), read_timeout_seconds=CALL_S)
            result = asyncio.run_coroutine_threadsafe(request, self._loop).result()
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                raise RuntimeError(error.error.message) from error
            raise self._reopen_session(session_future, error) from error
        except Exception as error:  # the transport may fail in any way
            raise self._reopen_session(session_future, error) from error
        text = "\n".join(getattr(part, "text", f"[{part.type} that is not read]") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _reopen_session(self, session_future: Future[_Session], error: Exception) -> ToolLost:
        """Start to open the session again, unless another call has done so. Return the exception for a call
        that failed with ``error`` in the session of ``session_future``."""
        with self._lock:
            if self._session_future is session_future:
                self._session_future = self._open_session()
        return ToolLost(f"{self._spec}: {_find_reason(error)}")

    def _open_session(self) -> Future[_Session]:
        """Start to open a session in the event loop; return its future."""
        session_future = Future[_Session]()
        session_task = _hold_session(self._spec.removeprefix(PREFIX), self._stderr, session_future)
        asyncio.run_coroutine_threadsafe(session_task, self._loop)
        return session_future


async def _hold_session(address: str, stderr: TextIO, session_future: Future[_Session]) -> None:
    """Open a session, set it as the result of ``session_future``, and keep it open until this task is
    cancelled: the library requires that one task opens and closes it. An error before that is set in
    ``session_future`` and raised.

    ``address`` is a URL, or the command of a process that is served over its standard input and output.
    """
    try:
        from mcp import Client, StdioServerParameters, stdio_client

        target: Any = address
        if not address.startswith(("http://", "https://")):
            command, *arguments = shlex.split(address)
            target = stdio_client(StdioServerParameters(command=command, args=arguments), stderr)
        async with Client(target, read_timeout_seconds=CALL_S) as client:
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools = [*tools, *page.tools]
            session_future.set_result(_Session(client, tuple(tools)))
            await asyncio.Event().wait()
    except BaseException as error:
        if not session_future.done():
            session_future.set_exception(error)
        raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Make the event loop end its sessions and then itself; do not wait for that."""

    async def end_sessions() -> None:
        sessions = asyncio.all_tasks() - {asyncio.current_task()}
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        loop.stop()

    asyncio.run_coroutine_threadsafe(end_sessions(), loop)


def _make_schema(tool: Any) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _find_reason(error: BaseException) -> str:
    """Describe the innermost exception, since task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")
