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

    ``reach`` opens a store for the writer's thread. The first store is opened at once, so its errors are
    raised here, and then the thread is started.
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
        self._waiting_count, self._is_closing, self._sender_count = 0, False, 0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._store: Store | None = reach()
        self._thread = threading.Thread(target=self._write_until_closed, name="feedback", daemon=True)
        self._thread.start()

    def submit(self, events: Sequence[Event]) -> Future[list[Outcome]]:
        """Queue ``events`` and return a future of their outcomes. It is done once they are committed, or
        fails with Unavailable. Raises Full at once, and counts them as turned away, if too many events wait
        or the intake is closed."""
        future: Future[list[Outcome]] = Future()
        future.set_running_or_notify_cancel()  # events of a client that hangs up are written too
        with self._lock:
            if self._is_closing or self._waiting_count + len(events) > self._most_events:
                self.counts["turned_away"] += len(events)
                raise Full(f"{self._waiting_count} events wait for the store; try again later")
            self._waiting_count += len(events)
            self._events.append(Waiting(events, future))
        self._wake.set()
        return future

    def record(self, make: Callable[[], Exchange]) -> bool:
        """Queue an exchange, which the writer's thread makes. Return False, and count it as dropped, if the
        queue is full or the intake is closed. Never waits for the store."""
        with self._lock:
            if self._is_closing or len(self._exchanges) >= self._most_exchanges:
                self.counts["dropped"] += 1
                return False
            self._exchanges.append(make)
        self._wake.set()
        return True

    @property
    def waiting(self) -> int:
        """Events and exchanges that are not written yet."""
        return self._waiting_count + len(self._exchanges) + len(self._pending)

    def close(self, limit_s: float = 30.0) -> None:
        """Write the rows that wait, for ``limit_s`` at most, and end the thread, which closes the store.
        Exchanges that are left then are counted as dropped. Later events and exchanges are refused."""
        with self._lock:
            self._is_closing = True
        self._wake.set()
        self._thread.join(limit_s)
        remaining = len(self._exchanges) + len(self._pending)
        if remaining or self._thread.is_alive():
            log.warning("the store did not answer: %d answers are not recorded", remaining)
            self.counts["dropped"] += remaining

    # ---- the writer's thread

    def _write_until_closed(self) -> None:
        """Write batches until the intake is closed, and then until the queues are empty or the store does not
        answer. Refuse the events that are left, and close the store."""
        is_available = True
        while not self._is_closing or (is_available and self.waiting):
            self._wake.wait()
            if not self._is_closing:
                gather = BUSY_S if self._sender_count >= BUSY else GATHER_S
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
        self._refuse_events(submissions, Unavailable("the server ends"))
        if self._store is not None:
            self._store.close()

    def _write_batch(self) -> bool:
        """Write the oldest events and exchanges, opening the store if it is closed. Return whether the store
        took them. Events that it did not take are refused, and their senders send them again later. Exchanges
        stay pending, unless ``_handle_failure`` drops them."""
        submissions: list[Waiting] = []
        with self._lock:
            while self._events and sum(len(submission.events) for submission in submissions) < BATCH:
                submissions.append(self._events.popleft())
        self._sender_count = len(submissions)
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
            self._refuse_events(
                submissions, error if is_unavailable else Unavailable(f"the store does not answer ({error})")
            )
            return False
        with self._lock:
            self._waiting_count -= len(outcomes)
            self.counts.update(outcome.value for outcome in outcomes)
            self.counts["written"] += len(self._pending)
            self._pending = []
        for submission in submissions:
            submission.future.set_result(outcomes[: len(submission.events)])
            outcomes = outcomes[len(submission.events) :]
        return True

    def _make_exchanges(self) -> None:
        """Make exchanges from the queue, until a batch is full. One that cannot be made is dropped and
        counted."""
        while self._exchanges and len(self._pending) < BATCH:
            try:
                self._pending.append(self._exchanges.popleft()())
            except Exception:
                log.exception("an answer cannot be recorded")
                with self._lock:
                    self.counts["dropped"] += 1

    def _handle_failure(self, error: Exception) -> None:
        """Count the failure and close the store, so that the next batch opens it again. Pending exchanges are
        dropped unless the store was unavailable, since it would refuse them again."""
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

    def _refuse_events(self, submissions: Sequence[Waiting], error: Exception) -> None:
        with self._lock:
            for submission in submissions:
                self.counts["turned_away"] += len(submission.events)
                self._waiting_count -= len(submission.events)
        for submission in submissions:
            submission.future.set_exception(error)
