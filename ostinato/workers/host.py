"""The worker's side of calls: an object, built here from a factory, whose methods are called remotely.

A factory is named "module:function" and takes plain arguments, so that nothing but names and values is sent.
Coroutines run in the event loop of the worker; other methods one after another in one thread, so that the
worker answers ``alive`` while it computes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ostinato.workers.remote import pack_answer, pack_refusal, unseal

BUILD = "build"  # the first call; no other begins before its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Process and host of a worker, with its versions."""

    pid: int
    host: str
    python: str
    ostinato: str


def own_place() -> Place:
    """The place of this process."""
    try:
        own_version = version("ostinato")
    except PackageNotFoundError:  # a checkout on the path
        own_version = "unknown"
    return Place(
        pid=os.getpid(), host=platform.node(), python=platform.python_version(), ostinato=own_version
    )


class Host:
    """Serves one object. ``nice``: increase of its nice value, as by the command of that name.

    Every call carries its number, and begins when all before it have begun: a Ray actor that serves
    several calls at once may start a small one before a large one that was sent first.
    """

    def __init__(self, name: str, nice: int = 0) -> None:
        if nice:
            give_way(nice)
        self._name = name
        self._object: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._next_number, self._early_calls = 0, dict[int, asyncio.Future[None]]()
        self._build_end: asyncio.Future[None] | None = None

    async def alive(self) -> float:
        """A heartbeat: the object's ``progress``, a number that grows while it advances; 0 if it has none."""
        return float(getattr(self._object, "progress", 0.0))

    async def call(self, number: int, method: str, payload: bytes) -> bytes:
        """The packed answer or refusal of ``method``, which begins after all calls with lower numbers have
        begun and the object is built. ``payload``: the sealed tuple of its arguments."""
        await self._wait_for_turn(number)
        try:
            if method == BUILD:
                return pack_answer(await self._build(*unseal(payload)))
            if self._build_end is not None:
                await asyncio.shield(self._build_end)
            return pack_answer(await self._run(getattr(self._object, method), unseal(payload)))
        except Exception as error:  # process boundary: the caller must be told
            return pack_refusal(error, self._name)

    async def _wait_for_turn(self, number: int) -> None:
        """Wait until all calls before ``number`` have begun, then let the next one begin."""
        if number != self._next_number:
            self._early_calls[number] = asyncio.get_running_loop().create_future()
            await self._early_calls[number]
            del self._early_calls[number]
        self._next_number += 1
        if (next_call := self._early_calls.get(self._next_number)) is not None:
            next_call.set_result(None)

    async def _build(self, factory: str, arguments: Mapping[str, Any], folder: str) -> Place:
        """Build the object, and return this place. If ``folder`` exists, it becomes the working directory.
        Calls that wait for the object go on even if building it fails."""
        self._build_end = asyncio.get_running_loop().create_future()
        try:
            if os.path.isdir(folder):
                os.chdir(folder)  # relative paths of a recipe keep their meaning
            self._object = await self._run(lambda: resolve_factory(factory)(**arguments), ())
        finally:
            self._build_end.set_result(None)
        return own_place()

    async def _run(self, function: Any, arguments: Sequence[Any]) -> Any:
        """The result of a coroutine function in the event loop, or of another function in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def resolve_factory(factory: str) -> Any:
    """The function that "module:function" names; its module is imported."""
    module, _, function = factory.partition(":")
    return getattr(importlib.import_module(module), function)


def give_way(nice: int) -> None:
    """Raise the nice value of all threads of this process, existing and future ones, by ``nice``."""
    tasks = "/proc/self/task"  # on Linux every thread has a priority of its own
    for thread_id in map(int, os.listdir(tasks)) if os.path.isdir(tasks) else (0,):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + nice)
