"""An event loop whose clock jumps to whatever comes next: minutes of silence are tested in milliseconds."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc]  # a class that differs by platform
    """Waits for nothing: the clock jumps instead. To wait for ever is an error."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is going to happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on the jumping clock."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


def hold_up(seconds: float) -> None:
    """Do something else in the event loop's thread for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.jumping.now += seconds


def jumping(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test on the jumping clock."""

    @functools.wraps(test)
    def on_the_clock(**given: Any) -> None:
        run(test(**given))

    return on_the_clock
