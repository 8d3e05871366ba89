"""The writer of ledger.jsonl: for one process, from when it starts or resumes a run until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ostinato.observe.ledger.rows import Event, Row, find_end, read
from ostinato.run import RunFolder

POOL = "local"  # of a run in one process: one pool that samples, grades and trains in turn
SAMPLERS = "samplers"  # the pool that evaluates, if there are several


class SteadyClock:
    """Unix time that never goes back within a process, even if the machine's clock is changed."""

    def __init__(self) -> None:
        self.started, self._zero = time.time(), time.perf_counter()

    def __call__(self) -> float:
        return self.started + time.perf_counter() - self._zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The devices that a process trains on, and their price."""

    devices: int = 1
    device: str = "cpu"  # its name
    pools: Mapping[str, int] = field(default_factory=dict)  # devices of each; empty: all in one pool
    price_per_device_hour: float = 0.0  # 0: not known
    currency: str = "USD"
    recipe: str = ""  # a hash of it

    @property
    def by_pool(self) -> Mapping[str, int]:
        return self.pools or {POOL: self.devices}


@dataclass(kw_only=True)
class Ledger:
    """Writes the rows of one process. ``with ledger.session(step):`` around all of its work.

    ``clock`` was started when the process began.
    """

    folder: RunFolder
    terms: Terms = Terms()
    clock: SteadyClock = field(default_factory=SteadyClock)
    why: str = "done"  # what the end row will say, unless an exception ends the session

    def __post_init__(self) -> None:
        self._session, self._step, self._last_row_at = 0, 0, self.clock.started
        self._part, self._lost_work = "train", dict[str, Any]()
        self._earlier_rows: frozenset[tuple[int, int]] = frozenset()

    @contextmanager
    def session(self, step: int) -> Iterator[None]:
        """Write a start row at finished step ``step`` before the block, and an end row after it. Inside
        another session it does nothing. If the block raises, the end row has the exception's ``why`` or its
        type, and the seconds since the last row as lost work.

        Raises ValueError for a ledger that cannot be read to its end."""
        if self._session:
            yield
            return
        self._append_start(step)
        try:
            yield
        except BaseException as error:
            failed = f"failed: {type(error.__cause__ or error).__name__}"
            with suppress(OSError):  # a full disk is the error itself
                self.lose()
                self._append_end(getattr(error, "why", failed))
            raise
        self._append_end(self.why)

    def lose(self) -> None:
        """Make the end row count the work since the last row as lost. Nothing is written yet."""
        self._lost_work = {"seconds": self.clock() - self._last_row_at, "part": self._part}

    @contextmanager
    def mark_evaluation(self) -> Iterator[None]:
        """Count work that an exception ends in this block as evaluation."""
        self._part = "eval"
        yield  # without finally: after an exception the end row needs this part
        self._part = "train"

    def step(
        self,
        step: int,
        seconds: float,
        busy: Mapping[str, float],
        work: Row,
        by_pool: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Record a step of ``seconds``, ``busy`` of them by part, or ``by_pool`` and part if there are
        several pools. ``work``: its tokens and FLOPs."""
        self._step = step
        row = {"step": step, "seconds": seconds, "ended_at": self.clock()}
        parts = {POOL: busy} if by_pool is None else by_pool
        self._append(Event.STEP, {**row, "pools": self._make_pools(seconds, parts), **work})

    def evaluation(self, step: int, set_name: str, seconds: float, work: Row) -> None:
        """Record an evaluation of the policy after ``step`` on the set ``set_name``."""
        row = {"step": step, "set": set_name, "seconds": seconds, "ended_at": self.clock()}
        busy = {SAMPLERS if self.terms.pools else POOL: {"eval": seconds}}
        self._append(Event.EVAL, {**row, "pools": self._make_pools(seconds, busy), **work})

    @property
    def next_row(self) -> tuple[int, int]:
        """(session, step) of the next step row, which pays for what is sampled now."""
        return self._session, self._step + 1

    def has(self, row: tuple[int, int]) -> bool:
        """Whether an earlier process has written this step row. ``row``: ``next_row`` of that process."""
        return row in self._earlier_rows

    def _append_start(self, step: int) -> None:
        """Begin a session at finished step ``step``, with a start row; the step rows of earlier ones are
        read."""
        rows, terms = read(self.folder), self.terms
        self._earlier_rows = frozenset(
            (row["session"], row["step"]) for row in rows if row["event"] == Event.STEP
        )
        start = {
            "at": self.clock(),
            "process_started": self.clock.started,
            "step": step,
            "recipe": terms.recipe,
            "pools": {
                name: {"devices": devices, "device": terms.device} for name, devices in terms.by_pool.items()
            },
            "price_per_device_hour": terms.price_per_device_hour,
            "currency": terms.currency,
        }
        clock_back_s = max(map(find_end, rows), default=0.0) - self.clock.started
        self._session = max((row["session"] for row in rows), default=0) + 1
        self._step = step
        self._append(Event.START, start | ({"clock_back": clock_back_s} if clock_back_s > 0 else {}))

    def _append_end(self, why: str) -> None:
        self._append(Event.END, {"at": self.clock(), "step": self._step, "why": why, **self._lost_work})

    def _make_pools(self, seconds: float, busy: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """The devices of each pool, and how many of ``seconds`` they were busy and idle."""
        parts = {name: dict(busy.get(name, {})) for name in self.terms.by_pool}
        return {
            name: {
                "devices": devices,
                "busy": parts[name],
                "idle": max(0.0, seconds - sum(parts[name].values())),
            }
            for name, devices in self.terms.by_pool.items()
        }

    def _append(self, event: Event, row: Row) -> None:
        self._last_row_at = self.clock()
        self.folder.ledger.append({"event": event, "session": self._session, **row})
