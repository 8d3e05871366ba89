"""Steps an engine in the event loop of its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Driver:
    """Runs a task that calls ``step`` while ``has_work``. ``fail`` receives the error of a step.
    ``drop_all`` ends the work that a closed event loop has left."""

    def __init__(
        self,
        step: Callable[[], None],
        has_work: Callable[[], bool],
        fail: Callable[[BaseException], None],
        drop_all: Callable[[], None],
    ) -> None:
        self._step, self._has_work, self._fail, self._drop_all = step, has_work, fail, drop_all
        self._task: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """Prepare for work that is added next: end the work that a closed event loop has left.

        Raises RuntimeError if another event loop is at work.
        """
        if self._task is None or self._task.done():
            return
        loop = self._task.get_loop()
        if loop.is_closed():
            self._drop_all()
            self._task = None
        elif loop is not asyncio.get_running_loop():
            raise RuntimeError("the engine is at work in another event loop; make one engine for each loop")

    @contextmanager
    def working(self, add: Callable[[], None], drop: Callable[[], None]) -> Iterator[None]:
        """Call ``enter`` and ``add``, and start a task that steps until there is no work, unless it runs
        already. At the exit ``drop`` ends the work that is left. Raises RuntimeError as ``enter`` does."""
        self.enter()
        add()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drive())
        try:
            yield
        finally:
            drop()

    def advance(self) -> None:
        """Step once within other work of this thread, if there is work; an error reaches ``fail`` alone."""
        try:
            if self._has_work():
                self._step()
        except Exception as error:
            self._fail(error)

    async def _drive(self) -> None:
        try:
            while self._has_work():
                await asyncio.sleep(0)  # callers submit and consume between steps
                self._step()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise  # a cancelled loop or Ctrl-C must go on; any other error has reached the callers
