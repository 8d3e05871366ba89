"""Which requests are in flight together: a loss of the server affects all of them.

``Suspects`` decides which are sent together after a loss, and in the end which prompt breaks servers.
A pool has several workers for its cells; here the cells take turns on one server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from ostinato.workers.suspects import Key, Suspects, name

NAMED = 3  # prompts, in one sentence


class Company:
    """The requests to one server, by prompt; for one event loop."""

    def __init__(self) -> None:
        self.suspects = Suspects(0.0)  # there is no other server that could be lost for the same cause
        self._open = Counter[Key]()  # that have no answer yet
        self._waiting, self._asked = Counter[Key](), Counter[Key]()
        self._news = asyncio.Event()

    @property
    def quarantined(self) -> Mapping[Key, str]:
        """For each prompt that is not sent any more, what it did, in one sentence."""
        return self.suspects.quarantined

    def __str__(self) -> str:
        """The requests in flight."""
        keys = [*self._asked]
        more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        return ", ".join(map(name, keys[:NAMED])) + more

    @contextmanager
    def member(self, key: Key) -> Iterator[None]:
        """Around a request without an answer; after the last one its prompt is no longer suspected."""
        try:
            with _counted(self._open, key):
                yield
        finally:
            if key not in self._open:
                self.suspects.forget(key)

    @asynccontextmanager
    async def together(self, key: Key) -> AsyncIterator[None]:
        """Wait for a turn to be sent: only together with the same cell, and suspects before all others."""
        try:
            with _counted(self._waiting, key):
                while not self._may(key):
                    await self._news.wait()
            with _counted(self._asked, key):
                yield
        finally:
            if not self._asked:
                self._news.set()
                self._news = asyncio.Event()

    def _may(self, key: Key) -> bool:
        cells = self.suspects.cells
        if not cells:
            return True
        if {cells.get(one) for one in self._asked} - {cells.get(key)}:
            return False
        return key in cells or not any(one in cells for one in self._waiting)

    def blame(self, why: str) -> tuple[bool, list[Key]]:
        """The server was lost with all in flight: (are they all suspects, so that it was their doing; which
        are to blame from now on)."""
        now = time.monotonic()
        explained = self.suspects.blame(0, now, [*self._asked], why)
        return explained, self.suspects.judge(now)


@contextmanager
def _counted(counter: Counter[Key], key: Key) -> Iterator[None]:
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
