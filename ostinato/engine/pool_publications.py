"""What a pool has published, and which of its workers have proved that they serve it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.types import HistoryEntry, Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy that all workers of its time serve."""

    version: int
    bytes: int  # sent, to all workers together
    seconds: float  # from ``publish`` until the last of those that were serving then had proved it
    workers: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Unproved:
    publication: Publication
    begun: float
    missing: set[int]  # workers
    proved: int = 0


class Publications:
    """``new`` makes what is sent of a policy; ``current`` is what every worker is to serve."""

    def __init__(self, new: Callable[[Any, int], Publication]) -> None:
        self.current = Publication(version=0, fingerprint="", payload=b"")
        self._new = new
        self._answers: tuple[tuple[str, int, tuple[HistoryEntry, ...]], ...] = ()
        self._unproved: deque[_Unproved] = deque()  # the oldest first
        self._proved: list[Published] = []

    def remember(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        """Answers that go with the next publication."""
        self._answers += ((uid, step, tuple(answers)),)

    def publish(self, adapters: Any, version: int, workers: Collection[int]) -> Publication:
        """What is to be sent to every worker; ``workers`` have to prove it, others when they start. Raises
        what ``new`` raises, and nothing has changed."""
        begun = time.time()
        self.current = self._new(adapters, version)
        sent, self._answers = replace(self.current, answers=self._answers), ()
        if workers:
            self._unproved.append(_Unproved(publication=self.current, begun=begun, missing={*workers}))
        return sent

    def proved(self, worker: int, version: int) -> None:
        """It serves ``version``, and so was never sent what is older."""
        for one in self._unproved:
            if one.publication.version <= version and worker in one.missing:
                one.missing.discard(worker)
                one.proved += one.publication.version == version
        self._settle()

    def lost(self, worker: int) -> None:
        """Nothing more is awaited from it."""
        for one in self._unproved:
            one.missing.discard(worker)
        self._settle()

    def _settle(self) -> None:
        while self._unproved and not self._unproved[0].missing:
            one = self._unproved.popleft()
            version, size = one.publication.version, len(one.publication.payload) * one.proved
            seconds = time.time() - one.begun
            self._proved.append(Published(version=version, bytes=size, seconds=seconds, workers=one.proved))

    def forget(self) -> None:
        """All workers are gone."""
        self._unproved.clear()

    def take(self) -> list[Published]:
        """Those that every worker has proved since the last call."""
        proved, self._proved = self._proved, []
        return proved


__all__ = ["Publications", "Published"]
