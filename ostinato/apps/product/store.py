"""The store of events and exchanges: one SQL text on SQLite (a file, WAL) or PostgreSQL (by URL).

An event is in it once, whatever is sent again and in whatever order; it is joined to its exchange by
``response_id`` when it is read, so it may come before the exchange or long after. Rows are numbered in the
order of their commits: all that was in the store at a watermark is read again later by that number.

One ``Store`` is one connection, for one thread at a time; several of them, in several processes, may be open.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ostinato.apps.product.events import Action, Event, Exchange

log = logging.getLogger(__name__)
T = TypeVar("T")
PAGE = 256  # rows that are read at a time
FOREVER = float("inf")

# {key}, {real}, {blob}: types of the dialect. held: bit 1 no consent, bit 2 personal data.
SCHEMA = (
    "CREATE TABLE marks (name {key} PRIMARY KEY, value {real} NOT NULL)",
    "CREATE TABLE events (event_id {key} PRIMARY KEY, response_id {key} NOT NULL, "
    "seq BIGINT NOT NULL, ts {real} NOT NULL, user_id {key} NOT NULL, tenant {key} NOT NULL, "
    "held INTEGER NOT NULL, body TEXT NOT NULL)",
    "CREATE INDEX events_response ON events (response_id)",
    "CREATE INDEX events_ts ON events (ts, event_id)",
    "CREATE INDEX events_user ON events (user_id, tenant)",
    "CREATE TABLE exchanges (response_id {key} PRIMARY KEY, seq BIGINT NOT NULL, "
    "ts {real} NOT NULL, user_id {key} NOT NULL, tenant {key} NOT NULL, body TEXT NOT NULL, "
    "prompt_tokens {blob} NOT NULL, tokens {blob} NOT NULL, logprobs {blob} NOT NULL, experts {blob})",
    "CREATE INDEX exchanges_ts ON exchanges (ts, response_id)",
    "CREATE INDEX exchanges_user ON exchanges (user_id, tenant)",
    "CREATE TABLE gone (id {key} PRIMARY KEY)",
    "INSERT INTO marks VALUES ('schema', 1), ('seq', 0), ('floor', 0)",
)
NO_CONSENT, PERSONAL = 1, 2


class Unavailable(ConnectionError):
    """The database does not answer now; the same call may be made again on a new connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Where the two databases differ."""

    key: str
    real: str
    blob: str
    begin: str
    mark: str  # of a parameter
    lock: str  # so that only one process makes the tables; "": ``begin`` does it
    made: str  # gives a row where there are tables
    down: tuple[type[Exception], ...]


class Outcome(StrEnum):
    """What became of an event. All but a conflict are acknowledged."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"  # in the store already, with the same content
    CONFLICT = "conflict"  # in the store already, with another content, which stays
    EXPIRED = "expired"  # of a user or answer that was deleted, or older than what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An answer and what its user did with it, by time."""

    exchange: Exchange
    events: tuple[Event, ...] = field(default=())


class Store:
    """See ``open_store``. Every method raises Unavailable where the database does not answer."""

    def __init__(self, db: Any, dialect: Dialect) -> None:
        self._db, self._dialect = db, dialect
        with self._transaction():
            if dialect.lock:
                self._run(dialect.lock)
            types = {"key": dialect.key, "real": dialect.real, "blob": dialect.blob}
            made = self._run(dialect.made).fetchone()
            for statement in (
                () if made else SCHEMA
            ):  # what exists is not made again: it would lock its tables
                self._run(statement.format(**types))
            ((version,),) = self._run("SELECT value FROM marks WHERE name = 'schema'").fetchall()
        if version != 1:
            raise ValueError(
                f"the store has schema {version:g} and this program reads 1; use the newer program"
            )

    # ---- writing

    def append(self, events: Sequence[Event]) -> list[Outcome]:
        """Add events, each once in effect; on return they are committed. Their outcomes, in their order."""
        return self.write(events, ())

    def record(self, exchanges: Sequence[Exchange]) -> int:
        """Add exchanges; how many were new."""
        before = self.watermark()
        self.write((), exchanges)
        return self._count("exchanges", "seq > ?", before)

    def write(self, events: Sequence[Event], exchanges: Sequence[Exchange]) -> list[Outcome]:
        """Both in one transaction. An exchange whose id is known is left as it is."""
        outcomes: list[Outcome] = []
        with self._transaction():
            seq = self._take(len(events) + len(exchanges))
            floor = self._mark("floor")
            ids = {id_ for event in events for id_ in (event.event_id, event.response_id)}
            gone = self._gone([*ids, *(exchange.response_id for exchange in exchanges)])
            known = self._known("events", "event_id, body", [event.event_id for event in events])
            rows: list[tuple[Any, ...]] = []
            for event in events:
                body = event.model_dump_json(exclude_defaults=True)
                if event.ts < floor or gone & {_hash(event.event_id), _hash(event.response_id)}:
                    outcomes.append(Outcome.EXPIRED)
                elif event.event_id in known:
                    same = known[event.event_id] == body
                    outcomes.append(Outcome.REPEATED if same else Outcome.CONFLICT)
                else:
                    outcomes.append(Outcome.ACCEPTED)
                    known[event.event_id] = body
                    held = NO_CONSENT * (not event.consent) | PERSONAL * event.personal
                    key = (event.event_id, event.response_id, seq + len(rows), event.ts)
                    rows.append((*key, event.user, event.tenant, held, body))
            self._insert("events", rows)
            seq += len(rows)
            stored = self._known("exchanges", "response_id, 1", [x.response_id for x in exchanges])
            fresh = {x.response_id: x for x in reversed(exchanges) if x.response_id not in stored}
            kept = [x for x in fresh.values() if _hash(x.response_id) not in gone and x.ts >= floor]
            self._insert("exchanges", [_exchange_row(x, seq + k) for k, x in enumerate(kept)])
        return outcomes

    def prune(self, before: float) -> tuple[int, int]:
        """Remove what is older than ``before`` (seconds since 1970), and what belongs to an answer that is;
        (events, exchanges) that went. What is older is not accepted any more."""
        with self._transaction():
            self._take(0)  # writers wait
            self._run("UPDATE marks SET value = ? WHERE name = 'floor' AND value < ?", before, before)
            old = "SELECT response_id FROM exchanges WHERE ts < ?"
            events = self._run(f"DELETE FROM events WHERE ts < ? OR response_id IN ({old})", before, before)
            exchanges = self._run("DELETE FROM exchanges WHERE ts < ?", before)
        self._wipe()
        return events.rowcount, exchanges.rowcount

    def delete_user(self, user: str, tenant: str = "") -> tuple[int, int]:
        """Remove a user's answers, the events on them and the user's events elsewhere; (events, exchanges)
        that went. Their hashes stay, so that none comes back by being sent again."""
        if not user:
            raise ValueError("user is empty; name the pseudonym whose events are to be deleted")
        mine = "SELECT response_id FROM exchanges WHERE user_id = ? AND tenant = ?"
        where, who = f"(user_id = ? AND tenant = ?) OR response_id IN ({mine})", (user, tenant)
        with self._transaction():
            self._take(0)  # writers wait
            ids = [id_ for (id_,) in self._run(f"SELECT event_id FROM events WHERE {where}", *who, *who)]
            answers = [id_ for (id_,) in self._run(mine, *who)]
            self._insert("gone", [(_hash(id_),) for id_ in {*ids, *answers}], "ON CONFLICT DO NOTHING")
            self._run(f"DELETE FROM events WHERE {where}", *who, *who)
            self._run("DELETE FROM exchanges WHERE user_id = ? AND tenant = ?", *who)
        self._wipe()
        return len(ids), len(answers)

    # ---- reading

    def watermark(self) -> int:
        """The number of the last row that is committed: what ``upto`` takes to read the same again."""
        return int(self._mark("seq"))

    def joined(
        self,
        since: float = 0.0,
        until: float = FOREVER,
        *,
        upto: int | None = None,
        horizon_s: float = FOREVER,
        training: bool = True,
    ) -> Iterator[Joined]:
        """Answers with ``ts`` in [since, until) by time, and their events of the first ``horizon_s``.

        ``upto``: rows behind that watermark are left out. ``training``: so is an answer on which any event
        is without consent, whole.
        """
        upto = self.watermark() if upto is None else upto
        columns = "body, response_id, ts, user_id, tenant, prompt_tokens, tokens, logprobs, experts"
        for rows in self._pages("exchanges", "response_id", columns, since, until, upto):
            events: dict[str, list[Event]] = {}
            refused: set[str] = set()
            for held, body in self._of([row[1] for row in rows], upto):
                event = Event.model_validate_json(body)
                events.setdefault(event.response_id, []).append(event)
                refused |= {event.response_id} if held & NO_CONSENT else set()
            for row in rows:
                if training and row[1] in refused:
                    continue
                mine = [e for e in events.get(row[1], ()) if e.ts < row[2] + horizon_s]
                mine.sort(key=lambda event: (event.ts, event.event_id))
                yield Joined(exchange=_exchange(*row), events=tuple(mine))

    def events(
        self, since: float = 0.0, until: float = FOREVER, *, upto: int | None = None
    ) -> Iterator[Event]:
        """All events with ``ts`` in [since, until) by time, those of unknown answers too."""
        upto = self.watermark() if upto is None else upto
        for rows in self._pages("events", "event_id", "body, event_id, ts", since, until, upto):
            yield from (Event.model_validate_json(body) for body, *_ in rows)

    def exchange(self, response_id: str) -> Exchange | None:
        """One answer by its id."""
        columns = "body, response_id, ts, user_id, tenant, prompt_tokens, tokens, logprobs, experts"
        row = self._run(f"SELECT {columns} FROM exchanges WHERE response_id = ?", response_id).fetchone()
        return None if row is None else _exchange(*row)

    def counts(self) -> dict[str, int]:
        """Rows by kind. ``unmatched``: events whose answer is not here (yet)."""
        known = "SELECT response_id FROM exchanges"
        return {
            "events": self._count("events"),
            "exchanges": self._count("exchanges"),
            "unmatched": self._count("events", f"response_id NOT IN ({known})"),
            "without_consent": self._count("events", "held IN (1, 3)"),
            "personal": self._count("events", "held >= 2"),
        }

    def close(self) -> None:
        with suppress(*self._dialect.down):  # a connection that is gone
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- SQL

    def _run(self, sql: str, *values: Any) -> Any:
        try:
            return self._db.execute(sql.replace("?", self._dialect.mark), values)
        except self._dialect.down as error:
            raise _unavailable(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run(self._dialect.begin)
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            with suppress(Unavailable):  # with a connection its transaction is gone
                self._run("ROLLBACK")
            raise

    def _take(self, count: int) -> int:
        """The first of ``count`` numbers. The row stays locked until the commit, so numbers come in its
        order, and between a look for an id and its insertion no one else writes."""
        found = self._run("UPDATE marks SET value = value + ? WHERE name = 'seq' RETURNING value", count)
        ((last,),) = found.fetchall()
        return int(last) - count + 1

    def _mark(self, name: str) -> float:
        ((value,),) = self._run("SELECT value FROM marks WHERE name = ?", name).fetchall()
        return value

    def _count(self, table: str, where: str = "1 = 1", *values: Any) -> int:
        ((count,),) = self._run(f"SELECT COUNT(*) FROM {table} WHERE {where}", *values).fetchall()
        return count

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]], more: str = "") -> None:
        if not rows:
            return
        marks = ", ".join([self._dialect.mark] * len(rows[0]))
        try:
            self._db.cursor().executemany(f"INSERT INTO {table} VALUES ({marks}) {more}", rows)
        except self._dialect.down as error:
            raise _unavailable(error) from error

    def _among(self, select: str, ids: Sequence[str], *values: Any) -> Iterator[tuple[Any, ...]]:
        for first in range(0, len(ids), PAGE):
            some = ids[first : first + PAGE]
            yield from self._run(f"{select} IN ({', '.join('?' * len(some))})", *values, *some)

    def _known(self, table: str, columns: str, ids: Sequence[str]) -> dict[str, Any]:
        key = columns.partition(",")[0]
        return {row[0]: row[1] for row in self._among(f"SELECT {columns} FROM {table} WHERE {key}", ids)}

    def _gone(self, ids: Sequence[str]) -> set[str]:
        hashes = [_hash(id_) for id_ in ids]
        return {id_ for (id_,) in self._among("SELECT id FROM gone WHERE id", hashes)}

    def _of(self, answers: Sequence[str], upto: int) -> Iterator[tuple[Any, ...]]:
        return self._among("SELECT held, body FROM events WHERE seq <= ? AND response_id", answers, upto)

    def _pages(
        self, table: str, key: str, columns: str, since: float, until: float, upto: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Pages of rows by (ts, key); the second and third column are key and ts."""
        at: tuple[float, str] = (since, "")
        select = f"SELECT {columns} FROM {table} WHERE (ts, {key}) > (?, ?) AND ts < ? AND seq <= ?"
        while True:
            order = f"ORDER BY ts, {key} LIMIT {PAGE}"
            rows = self._run(f"{select} {order}", *at, until, upto).fetchall()
            if rows:
                yield rows
                at = (rows[-1][2], rows[-1][1])
            if len(rows) < PAGE:
                return

    def _wipe(self) -> None:
        """What was deleted is not left in SQLite's log either."""
        if isinstance(self._db, sqlite3.Connection):
            self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


class Patient:
    """What a loop that outlives its database reads: each call is made again, on a new connection and every
    ``again_s`` seconds, until the store answers. The first is opened at once, and its errors are raised."""

    def __init__(self, reach: Callable[[], Store], again_s: float = 2.0) -> None:
        self._reach, self._again_s = reach, again_s
        self._store: Store | None = reach()

    def watermark(self) -> int:
        return self._read(lambda store: store.watermark())

    def joined(
        self,
        since: float = 0.0,
        until: float = FOREVER,
        *,
        upto: int | None = None,
        horizon_s: float = FOREVER,
    ) -> list[Joined]:
        """As ``Store.joined``, whole."""
        return self._read(lambda store: [*store.joined(since, until, upto=upto, horizon_s=horizon_s)])

    def _read(self, call: Callable[[Store], T]) -> T:
        logged = False
        while True:
            try:
                if self._store is None:
                    self._store = self._reach()
                return call(self._store)
            except Unavailable as error:
                if not logged:
                    log.warning("%s; tried again every %g s", error, self._again_s)
                logged = True
                self.close()
                time.sleep(self._again_s)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


def open_store(where: str | Path) -> Store:
    """The store in a file (made where there is none, with its folder), or at ``postgresql://...``.

    Raises ValueError for a file that is no store or cannot be made, a wrong address, or without psycopg;
    Unavailable for a database that does not answer.
    """
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        return _postgres(text)
    if "://" in text:
        raise ValueError(f"the store {text!r} is neither a file nor postgresql://...")
    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(text, timeout=30.0, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            db.execute(f"PRAGMA {pragma}").fetchall()
        dialect = Dialect(
            key="TEXT",
            real="REAL",
            blob="BLOB",
            begin="BEGIN IMMEDIATE",
            mark="?",
            lock="",
            made="SELECT 1 FROM sqlite_master WHERE name = 'marks'",
            down=(sqlite3.OperationalError,),
        )
        return _made(db, dialect)
    except (sqlite3.Error, OSError) as error:
        raise ValueError(f"the store {text} cannot be opened ({error}); give another file") from error


def _postgres(address: str) -> Store:
    try:
        import psycopg
    except ModuleNotFoundError:
        raise ValueError('a store at postgresql:// needs psycopg; pip install "ostinato[postgres]"') from None
    down = (psycopg.OperationalError, psycopg.InterfaceError)
    try:
        db = psycopg.connect(address, autocommit=True, connect_timeout=10)
    except down as error:
        raise _unavailable(error) from error
    except psycopg.ProgrammingError as error:
        raise ValueError(f"the store's address cannot be read ({error})") from error
    return _made(
        db,
        Dialect(
            key='TEXT COLLATE "C"',
            real="DOUBLE PRECISION",
            blob="BYTEA",
            begin="BEGIN",
            mark="%s",
            lock="SELECT pg_advisory_xact_lock(7304)",
            made="SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'marks'",
            down=down,
        ),
    )


def _made(db: Any, dialect: Dialect) -> Store:
    try:
        return Store(db, dialect)
    except BaseException:
        db.close()
        raise


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"the store does not answer ({type(error).__name__}: {error})")


def _hash(id_: str) -> str:
    return hashlib.sha256(id_.encode()).hexdigest()


# ---- exchanges as rows

_PLAIN = ("model", "revision", "messages", "output", "action", "sampling", "session", "arm", "propensity")


def _exchange_row(exchange: Exchange, seq: int) -> tuple[Any, ...]:
    body = {name: getattr(exchange, name) for name in _PLAIN}
    experts = exchange.experts
    if experts is not None:
        body["experts"] = [experts.dtype.str, *experts.shape]
    return (
        exchange.response_id,
        seq,
        exchange.ts,
        exchange.user,
        exchange.tenant,
        json.dumps(body),
        exchange.prompt_tokens.astype("<i4").tobytes(),
        exchange.tokens.astype("<i4").tobytes(),
        exchange.logprobs.astype("<f4").tobytes(),
        None if experts is None else experts.tobytes(),
    )


def _exchange(
    text: str, response_id: str, ts: float, user: str, tenant: str, *arrays: bytes | None
) -> Exchange:
    body = json.loads(text)
    dtype, *shape = body.pop("experts", [""])
    prompt, tokens, logprobs, experts = arrays
    return Exchange(
        response_id=response_id,
        ts=ts,
        user=user,
        tenant=tenant,
        prompt_tokens=_array(prompt, "<i4"),
        tokens=_array(tokens, "<i4"),
        logprobs=_array(logprobs, "<f4"),
        experts=None if experts is None else _array(experts, dtype).reshape(shape),
        **body | {"messages": tuple(body["messages"]), "action": Action(body["action"])},
    )


def _array(data: bytes | None, dtype: str) -> np.ndarray:
    return np.frombuffer(data or b"", dtype)


__all__ = ["Dialect", "Joined", "Outcome", "Patient", "Store", "Unavailable", "open_store"]
