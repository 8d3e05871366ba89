"""The intake of a store: bounded queues and one thread that writes, so that no answer waits for the store.

Events are acknowledged behind the commit of their batch. Exchanges are written when there is time; those that
find the queue full are dropped and counted. A store that does not answer is opened again.
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
# Seconds from the first event of a batch to its commit: short for few senders; for many, batches are larger.
GATHER_S, BUSY_S, BUSY = 0.02, 0.1, 3  # BUSY: senders in the last batch from which on BUSY_S holds
AGAIN_S = 0.5  # between attempts to reach a store


class Full(Exception):
    """Too many events wait for the store: no more are taken for now."""


class Waiting(NamedTuple):
    """Events that were submitted together, and the future of their outcomes."""

    events: Sequence[Event]
    future: Future[list[Outcome]]


class Intake:
    """Queues of events and exchanges, which one thread writes into a store.

    ``reach`` opens a store, which is used in the writer's thread alone. The first store is opened at once,
    and its errors are raised here.
    """

    def __init__(
        self, reach: Callable[[], Store], *, most_events: int = 20_000, most_exchanges: int = 2_000
    ) -> None:
        # events by outcome, and "turned_away"; exchanges "written" and "dropped"; "failures" of the store
        self.counts: Counter[str] = Counter()
        self._reach, self._most_events, self._most_exchanges = reach, most_events, most_exchanges
        self._events: deque[Waiting] = deque()
        self._exchanges: deque[Callable[[], Exchange]] = deque()
        self._pending: list[Exchange] = []  # taken off the queue, not written yet
        self._waiting, self._closing, self._senders = 0, False, 0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._store: Store | None = reach()
        self._thread = threading.Thread(target=self._write, name="feedback", daemon=True)
        self._thread.start()

    def submit(self, events: Sequence[Event]) -> Future[list[Outcome]]:
        """Return a future of the outcomes of ``events``, which is done once they are committed, or fails with
        Unavailable. Raises Full at once where too many events wait."""
        future: Future[list[Outcome]] = Future()
        future.set_running_or_notify_cancel()  # events of a client that hangs up are written too
        with self._lock:
            if self._closing or self._waiting + len(events) > self._most_events:
                self.counts["turned_away"] += len(events)
                raise Full(f"{self._waiting} events wait for the store; try again later")
            self._waiting += len(events)
            self._events.append(Waiting(events, future))
        self._wake.set()
        return future

    def record(self, make: Callable[[], Exchange]) -> bool:
        """Queue an exchange, which is made in the writer's thread; False where it was dropped. Never
        waits."""
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
        return self._waiting + len(self._exchanges) + len(self._pending)

    def close(self, limit_s: float = 30.0) -> None:
        """Write what waits, for ``limit_s`` at most, and close the store. What is left then is counted as
        dropped."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join(limit_s)
        remaining = len(self._exchanges) + len(self._pending)
        if remaining or self._thread.is_alive():
            log.warning("the store did not answer: %d answers are not recorded", remaining)
            self.counts["dropped"] += remaining

    # ---- the writer's thread

    def _write(self) -> None:
        """Write batches until the intake is closed and the queues are empty, or the store does not answer;
        then refuse the rest."""
        is_available = True
        while not self._closing or (is_available and self.waiting):
            self._wake.wait()
            if not self._closing:
                gather = BUSY_S if self._senders >= BUSY else GATHER_S
                time.sleep(gather if is_available else AGAIN_S)
                self._wake.clear()
            is_available = True
            while is_available and self.waiting:
                is_available = self._write_batch()
            if not is_available:
                self._wake.set()
        with self._lock:
            submissions = [*self._events]
            self._events.clear()
        self._refuse(submissions, Unavailable("the server ends"))
        if self._store is not None:
            self._store.close()

    def _write_batch(self) -> bool:
        """Write the oldest events and exchanges; return whether the store took them. Events that it did not
        take are refused, and their senders send them again later; exchanges stay in the queue."""
        submissions: list[Waiting] = []
        with self._lock:
            while self._events and sum(len(submission.events) for submission in submissions) < BATCH:
                submissions.append(self._events.popleft())
        self._senders = len(submissions)
        self._make_exchanges()
        try:
            if self._store is None:
                self._store = self._reach()
            outcomes = self._store.write(
                [event for submission in submissions for event in submission.events], self._pending
            )
        except Exception as error:  # the senders get any error of a database, and the thread must not end
            self._handle_failure(error)
            is_unavailable = isinstance(error, Unavailable)
            self._refuse(
                submissions, error if is_unavailable else Unavailable(f"the store does not answer ({error})")
            )
            return False
        with self._lock:
            self._waiting -= len(outcomes)
            self.counts.update(outcome.value for outcome in outcomes)
            self.counts["written"] += len(self._pending)
            self._pending = []
        for submission in submissions:
            submission.future.set_result(outcomes[: len(submission.events)])
            outcomes = outcomes[len(submission.events) :]
        return True

    def _make_exchanges(self) -> None:
        """Make exchanges from the queue. An exchange that cannot be made is dropped."""
        while self._exchanges and len(self._pending) < BATCH:
            try:
                self._pending.append(self._exchanges.popleft()())
            except Exception:
                log.exception("an answer cannot be recorded")
                with self._lock:
                    self.counts["dropped"] += 1

    def _handle_failure(self, error: Exception) -> None:
        """Close the store, so that the next batch opens it again. Exchanges that it refused are dropped, as
        it would refuse them again."""
        log.warning("the store of feedback failed: %s: %s", type(error).__name__, error)
        with self._lock:
            self.counts["failures"] += 1
            if not isinstance(error, Unavailable):
                self.counts["dropped"] += len(self._pending)
                self._pending = []
        store, self._store = self._store, None
        if store is not None:
            try:
                store.close()
            except Exception:  # the senders get the first error, not this one
                log.exception("the store of feedback could not be closed")

    def _refuse(self, submissions: Sequence[Waiting], error: Exception) -> None:
        with self._lock:
            for submission in submissions:
                self.counts["turned_away"] += len(submission.events)
                self._waiting -= len(submission.events)
        for submission in submissions:
            submission.future.set_exception(error)
