"""Tools of MCP servers (extra ``mcp``): ``task.tools = ["mcp:python server.py", "mcp:https://example.org/mcp"]``.

A server is started, or asked at its address, once for all episodes of a run: what it keeps between calls is
common to them. Its names, descriptions and JSON schemas are what the chat template is given.
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
CALL_S = 60.0  # after which a call ends that its episode no longer waits for


class ToolLost(Exception):
    """What answers calls is gone: a fault of the episode, not a reply that a policy could learn from."""


@dataclass(frozen=True)
class McpTool:
    """A tool of ``server``, to be called by keywords. ``schema``: a function of OpenAI's API."""

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
    """A session with the server that ``spec`` names, held by an event loop in a thread of its own.

    It ends when the last of its tools is gone, or with this process. One that is lost is opened again, and
    calls meanwhile raise ToolLost. Raises ValueError where the library or the server is not there.
    """

    def __init__(self, spec: str) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(f"task.tools has {spec!r}, which needs mcp; install the extra mcp")
        self._spec = spec
        self._errors = cast(TextIO, tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115  its stderr
        weakref.finalize(self, self._errors.close)
        self._loop, self._lock = asyncio.new_event_loop(), threading.Lock()
        threading.Thread(target=_run, args=(self._loop,), name=spec, daemon=True).start()
        weakref.finalize(self, _end, self._loop)
        self._opening = self._open()
        try:
            tools = self._opening.result(START_S).tools
        except Exception as error:  # of anybody's server
            self._errors.seek(0)
            *_, last = ["", *self._errors.read().split("\n")[:-1]]
            raise ValueError(
                f"task.tools has {spec!r}, which gave no list of tools: {_reason(error)}"
                + (f"; the last that it wrote is {last!r}" if last else "")
            ) from error
        if not tools:
            raise ValueError(f"task.tools has {spec!r}, a server without tools; name another")
        self.tools = {tool.name: McpTool(self, tool.name, _schema(tool)) for tool in tools}

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of the reply. Raises RuntimeError with the server's words where it says that the call has
        failed, and ToolLost where there is no server."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        opening = self._opening
        if not opening.done():
            raise ToolLost(f"{self._spec} is being started again")
        try:
            client = opening.result().client
            calling = client.call_tool(name, dict(arguments), read_timeout_seconds=CALL_S)
            result = asyncio.run_coroutine_threadsafe(calling, self._loop).result()
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                raise RuntimeError(error.error.message) from error
            raise self._reopen(opening, error) from error
        except Exception as error:  # of its transport
            raise self._reopen(opening, error) from error
        text = "\n".join(getattr(part, "text", f"[{part.type} that is not read]") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _reopen(self, opening: Future[_Session], error: Exception) -> ToolLost:
        """What a call raises that ``opening``'s session has failed with ``error``."""
        with self._lock:
            if self._opening is opening:
                self._opening = self._open()
        return ToolLost(f"{self._spec}: {_reason(error)}")

    def _open(self) -> Future[_Session]:
        opening = Future[_Session]()
        holding = _hold(self._spec.removeprefix(PREFIX), self._errors, opening)
        asyncio.run_coroutine_threadsafe(holding, self._loop)
        return opening


async def _hold(where: str, errors: TextIO, opening: Future[_Session]) -> None:
    """Open a session, give it to ``opening``, and keep it open in this task, as the library asks.

    ``where`` is an address, or the command of a process that speaks over its standard input and output.
    """
    try:
        from mcp import Client, StdioServerParameters, stdio_client

        target: Any = where
        if not where.startswith(("http://", "https://")):
            command, *arguments = shlex.split(where)
            target = stdio_client(StdioServerParameters(command=command, args=arguments), errors)
        async with Client(target, read_timeout_seconds=CALL_S) as client:
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools = [*tools, *page.tools]
            opening.set_result(_Session(client, tuple(tools)))
            await asyncio.Event().wait()
    except BaseException as error:
        if not opening.done():
            opening.set_exception(error)
        raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """End the sessions of ``loop``, then the loop."""

    async def end() -> None:
        sessions = asyncio.all_tasks() - {asyncio.current_task()}
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


def _schema(tool: Any) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _reason(error: BaseException) -> str:
    """The innermost failure: task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")
