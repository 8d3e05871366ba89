"""Between a server and its store: bounded queues and one thread that writes, so that no answer waits.

Events are acknowledged behind the commit of their batch. Exchanges are written when there is time; those
that find the queue full are dropped and counted. A store that does not answer is opened again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ostinato.apps.product.events import Event, Exchange
from ostinato.apps.product.store import Outcome, Store
from ostinato.database import Unavailable

log = logging.getLogger(__name__)
BATCH = 512  # events, and exchanges, of one commit
# From the first of a batch to its commit: a sender alone waits little, of many each commit has more.
GATHER_S, BUSY_S, BUSY = 0.02, 0.1, 3  # BUSY: who was in the last batch
AGAIN_S = 0.5  # between attempts to reach a store


class Full(Exception):
    """So many events wait for the store that no more are taken now."""


class Waiting(NamedTuple):
    """Events that were submitted together, and where their outcomes are awaited."""

    events: Sequence[Event]
    future: Future[list[Outcome]]


class Intake:
    """``reach`` gives a store, used in the writer's thread alone. The first is opened at once, and its errors
    are raised here."""

    def __init__(
        self, reach: Callable[[], Store], *, most_events: int = 20_000, most_exchanges: int = 2_000
    ) -> None:
        # events by outcome, and "turned_away"; exchanges "written" and "dropped"; "failures" of the store
        self.counts: Counter[str] = Counter()
        self._reach, self._most_events, self._most_exchanges = reach, most_events, most_exchanges
        self._events: deque[Waiting] = deque()
        self._exchanges: deque[Callable[[], Exchange]] = deque()
        self._made: list[Exchange] = []  # in the writer's hands
        self._waiting, self._closing, self._senders = 0, False, 0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._store: Store | None = reach()
        self._thread = threading.Thread(target=self._write, name="feedback", daemon=True)
        self._thread.start()

    def submit(self, events: Sequence[Event]) -> Future[list[Outcome]]:
        """The outcomes of ``events``, once they are committed; Unavailable there, or Full at once."""
        future: Future[list[Outcome]] = Future()
        future.set_running_or_notify_cancel()  # by a client that hangs up: its events are written
        with self._lock:
            if self._closing or self._waiting + len(events) > self._most_events:
                self.counts["turned_away"] += len(events)
                raise Full(f"{self._waiting} events wait for the store; try again later")
            self._waiting += len(events)
            self._events.append(Waiting(events, future))
        self._wake.set()
        return future

    def record(self, make: Callable[[], Exchange]) -> bool:
        """Have an exchange written, made in the writer's thread; False where it was dropped. Never waits."""
        with self._lock:
            if self._closing or len(self._exchanges) >= self._most_exchanges:
                self.counts["dropped"] += 1
                return False
            self._exchanges.append(make)
        self._wake.set()
        return True

    @property
    def waiting(self) -> int:
        """Events and exchanges that are not written yet."""
        return self._waiting + len(self._exchanges) + len(self._made)

    def close(self, limit_s: float = 30.0) -> None:
        """Write what waits, for ``limit_s`` at most, and close the store. What is left then is counted."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join(limit_s)
        left = len(self._exchanges) + len(self._made)
        if left or self._thread.is_alive():
            log.warning("the store did not answer: %d answers are not recorded", left)
            self.counts["dropped"] += left

    # ---- the writer's thread

    def _write(self) -> None:
        answered = True
        while not self._closing or (answered and self.waiting):
            self._wake.wait()
            if not self._closing:
                gather = BUSY_S if self._senders >= BUSY else GATHER_S
                time.sleep(gather if answered else AGAIN_S)
                self._wake.clear()
            answered = True
            while answered and self.waiting:
                answered = self._batch()
            if not answered:
                self._wake.set()
        with self._lock:
            left = [*self._events]
            self._events.clear()
        self._refuse(left, Unavailable("the server ends"))
        if self._store is not None:
            self._store.close()

    def _batch(self) -> bool:
        """Write the oldest; whether the store took it. Events that it did not take are their senders' again,
        who send them later; exchanges stay."""
        batch: list[Waiting] = []
        with self._lock:
            while self._events and sum(len(each.events) for each in batch) < BATCH:
                batch.append(self._events.popleft())
        self._senders = len(batch)
        self._make()
        try:
            if self._store is None:
                self._store = self._reach()
            outcomes = self._store.write([event for each in batch for event in each.events], self._made)
        except Exception as error:  # whatever a database says: the senders hear of it, and the thread lives
            self._failed(error)
            down = isinstance(error, Unavailable)
            self._refuse(batch, error if down else Unavailable(f"the store does not answer ({error})"))
            return False
        with self._lock:
            self._waiting -= len(outcomes)
            self.counts.update(outcome.value for outcome in outcomes)
            self.counts["written"] += len(self._made)
            self._made = []
        for each in batch:
            each.future.set_result(outcomes[: len(each.events)])
            outcomes = outcomes[len(each.events) :]
        return True

    def _make(self) -> None:
        """Take exchanges off the queue. One that cannot be made is dropped."""
        while self._exchanges and len(self._made) < BATCH:
            try:
                self._made.append(self._exchanges.popleft()())
            except Exception:
                log.exception("an answer cannot be recorded")
                with self._lock:
                    self.counts["dropped"] += 1

    def _failed(self, error: Exception) -> None:
        """The next batch opens the store again. What it refused is dropped: it would refuse it again."""
        log.warning("the store of feedback failed: %s: %s", type(error).__name__, error)
        with self._lock:
            self.counts["failures"] += 1
            if not isinstance(error, Unavailable):
                self.counts["dropped"] += len(self._made)
                self._made = []
        store, self._store = self._store, None
        if store is not None:
            try:
                store.close()
            except Exception:  # as above: senders hear of what failed first
                log.exception("the store of feedback could not be closed")

    def _refuse(self, batch: Sequence[Waiting], error: Exception) -> None:
        with self._lock:
            for each in batch:
                self.counts["turned_away"] += len(each.events)
                self._waiting -= len(each.events)
        for each in batch:
            each.future.set_exception(error)
