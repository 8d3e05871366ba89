"""Heartbeats: what is known of a process that was killed, even before it had a row in the ledger.

    RUN/alive.json    process_started, at, part    of the running process, rewritten every second
                      killed                       last ones of killed processes that no ledger row counts yet

All times are by the clock of the process itself, so it does not matter when or where the folder is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json
from ostinato.observe.ledger.rows import Event, Row, end_of, is_number
from ostinato.run import BEAT_PART, to_json

BEAT_EVERY_S = 1.0  # up to this much of the work of a killed process is not recorded
LOADING = "load"  # the part of a process before its ledger begins


class Life:
    """A context manager that rewrites the file on entry and every ``every_s`` seconds. Its exit removes the
    file, unless heartbeats of killed processes are not counted in the ledger yet.

    ``started`` and ``clock`` are the process's; ``part`` returns what it is working on.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float], started: float, every_s: float = BEAT_EVERY_S
    ) -> None:
        self.part: Callable[[], str] = lambda: LOADING
        self.killed: Sequence[Row] = ()
        self._path, self._clock, self._started, self._every_s = path, clock, started, every_s
        self._stop, self._writing = threading.Event(), threading.Lock()

    def __enter__(self) -> Life:
        self.killed = _signs(self._path)
        self.beat()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.killed:
            self._write({"killed": self.killed})
        else:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def beat(self) -> None:
        sign = {"process_started": self._started, "at": self._clock(), "part": self.part()}
        self._write(sign | ({"killed": self.killed} if self.killed else {}))

    def _beat_on(self) -> None:
        while not self._stop.wait(self._every_s):
            self.beat()

    def _write(self, row: Mapping[str, Any]) -> None:
        part = self._path.with_name(BEAT_PART)
        with self._writing, suppress(OSError):  # a full disk is reported elsewhere
            part.write_text(to_json(row), encoding="utf-8")
            part.replace(self._path)


def _signs(path: Path) -> list[Row]:
    """The last heartbeats of killed processes, the oldest first; malformed ones are left out."""
    try:
        last = parse_json(path.read_bytes())
        return [sign for sign in (*last.get("killed", ()), last) if _is_sign(sign)]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def _is_sign(row: Any) -> bool:
    times = [row.get("process_started"), row.get("at")] if isinstance(row, dict) else [None]
    return all(map(is_number, times)) and isinstance(row.get("part"), str)


def rows_of_the_killed(rows: Sequence[Row], killed: Sequence[Row], start: Row, at: float) -> Iterator[Row]:
    """The rows missing from the ledger's ``rows``: the work of killed processes after their last row, and
    the processes without any row. Of the latter only the time is known; their terms are those of ``start``,
    the row of the process that resumes. ``at``: now."""
    ended = {row["session"] for row in rows if row["event"] in (Event.END, Event.LOST)}
    starts = {row["process_started"]: row["session"] for row in rows if row["event"] == Event.START}
    last = max(starts.values(), default=0)
    signs = {sign["process_started"]: sign for sign in killed}
    if last and last not in ended:
        began = next(started for started, session in starts.items() if session == last)
        yield _lost(last, end_of(rows[-1]), signs.get(began), at)
    for began, sign in signs.items():
        if began not in starts:
            last += 1
            yield {**start, "session": last, "process_started": began, "at": began}
            yield _lost(last, began, sign, at)


def _lost(session: int, since: float, sign: Row | None, at: float) -> Row:
    row = {"event": Event.LOST, "session": session, "at": at}
    if sign is None:
        return {**row, "seconds": 0.0}
    return {**row, "seconds": max(0.0, sign["at"] - since), "part": sign["part"]}
