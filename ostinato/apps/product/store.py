"""The store of events and exchanges: a file of SQLite, or PostgreSQL (``ostinato.database``).

An event is stored once, however often and in whatever order it is sent. It is joined to its exchange by
``response_id`` when it is read, so it may come before the exchange or long after. Rows are numbered in the
order of their commits: all that was in the store at a watermark can be read again later by that number.

One ``Store`` is one connection; several of them, in several processes, may be open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.product.events import Action, Event, Exchange
from ostinato.database import KEY, Database, open_database, sa

PAGE = 256  # rows that are read at a time
FOREVER = float("inf")
NO_CONSENT, PERSONAL = 1, 2  # bits of ``held``
TABLES = sa.MetaData()


def _make_required_column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


MARKS = sa.Table(
    "marks", TABLES, sa.Column("name", KEY, primary_key=True), _make_required_column("value", sa.Double)
)
GONE = sa.Table("gone", TABLES, sa.Column("id", KEY, primary_key=True))  # hashes of deleted ids
EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("event_id", KEY, primary_key=True),
    *map(_make_required_column, ("response_id", "seq", "ts"), (KEY, sa.BigInteger, sa.Double)),
    *map(_make_required_column, ("user_id", "tenant", "held", "body"), (KEY, KEY, sa.Integer, sa.Text)),
    sa.Index("events_response", "response_id"),
    sa.Index("events_ts", "ts", "event_id"),
    sa.Index("events_user", "user_id", "tenant"),
)
EXCHANGES = sa.Table(
    "exchanges",
    TABLES,
    sa.Column("response_id", KEY, primary_key=True),
    *map(_make_required_column, ("seq", "ts", "user_id", "tenant"), (sa.BigInteger, sa.Double, KEY, KEY)),
    _make_required_column("body", sa.Text),
    *map(_make_required_column, ("prompt_tokens", "tokens", "logprobs"), (sa.LargeBinary,) * 3),
    sa.Column("experts", sa.LargeBinary),
    sa.Index("exchanges_ts", "ts", "response_id"),
    sa.Index("exchanges_user", "user_id", "tenant"),
)
E, X = EVENTS.c, EXCHANGES.c


class Outcome(StrEnum):
    """The outcome of storing an event. All but a conflict are acknowledged."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"  # in the store already, with the same content
    CONFLICT = "conflict"  # in the store already, with another content, which stays
    EXPIRED = "expired"  # of a user or answer that was deleted, or older than what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An answer and the events of its user on it, by time."""

    exchange: Exchange
    events: tuple[Event, ...] = field(default=())


class Store:
    """A connection to a store, see ``open_store``. Every method raises Unavailable if the database does not
    answer."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # ---- writing

    def append(self, events: Sequence[Event]) -> list[Outcome]:
        """Add events, each stored once, and commit them. Return their outcomes, in their order."""
        return self.write(events, ())

    def record(self, exchanges: Sequence[Exchange]) -> int:
        """Add exchanges and commit them. Return how many were added; known, deleted and expired ones are
        not."""
        before = self.watermark()
        self.write((), exchanges)
        return self._count(EXCHANGES, X.seq > before)

    def write(self, events: Sequence[Event], exchanges: Sequence[Exchange]) -> list[Outcome]:
        """Add events and exchanges in one transaction, and return the outcomes of the events. An exchange is
        ignored if its id is known, or if it was deleted or is older than the store keeps."""
        outcomes: list[Outcome] = []
        with self._db.transaction():
            seq = self._reserve_numbers(len(events) + len(exchanges))
            floor = self._read_mark("floor")
            ids = {id_ for event in events for id_ in (event.event_id, event.response_id)}
            ids |= {exchange.response_id for exchange in exchanges}
            deleted_hashes = {
                id_ for (id_,) in self._select_among(sa.select(GONE.c.id), GONE.c.id, [*map(_hash, ids)])
            }
            bodies = sa.select(E.event_id, E.body)
            body_of: dict[str, str] = dict(
                self._select_among(bodies, E.event_id, [e.event_id for e in events])
            )
            rows: list[dict[str, Any]] = []
            for event in events:
                body = event.model_dump_json(exclude_defaults=True)
                if event.ts < floor or deleted_hashes & {_hash(event.event_id), _hash(event.response_id)}:
                    outcomes.append(Outcome.EXPIRED)
                elif event.event_id in body_of:
                    is_same = body_of[event.event_id] == body
                    outcomes.append(Outcome.REPEATED if is_same else Outcome.CONFLICT)
                else:
                    outcomes.append(Outcome.ACCEPTED)
                    body_of[event.event_id] = body
                    rows.append(_build_event_row(event, seq + len(rows), body))
            self._db.insert(EVENTS, rows)
            seq += len(rows)
            known_rows = self._select_among(
                sa.select(X.response_id), X.response_id, [x.response_id for x in exchanges]
            )
            stored_ids = {id_ for (id_,) in known_rows}
            new_exchanges = {x.response_id: x for x in reversed(exchanges) if x.response_id not in stored_ids}
            storable_exchanges = [
                x
                for x in new_exchanges.values()
                if _hash(x.response_id) not in deleted_hashes and x.ts >= floor
            ]
            self._db.insert(
                EXCHANGES, [_build_exchange_row(x, seq + k) for k, x in enumerate(storable_exchanges)]
            )
        return outcomes

    def prune(self, before: float) -> tuple[int, int]:
        """Delete what is older than ``before`` (seconds since 1970), and events on answers that are older.
        Return the numbers of deleted (events, exchanges). From then on, what is older than ``before`` is not
        accepted."""
        with self._db.transaction():
            self._reserve_numbers(0)  # locks out other writers
            floor = sa.and_(MARKS.c.name == "floor", MARKS.c.value < before)
            self._db.change(MARKS.update().where(floor).values(value=before))
            has_old_answer = E.response_id.in_(sa.select(X.response_id).where(X.ts < before))
            events = self._db.change(EVENTS.delete().where(sa.or_(E.ts < before, has_old_answer)))
            exchanges = self._db.change(EXCHANGES.delete().where(X.ts < before))
        self._truncate_log()
        return events, exchanges

    def delete_user(self, user: str, tenant: str = "") -> tuple[int, int]:
        """Delete a user's answers, the events on them and the user's events elsewhere. Return the numbers of
        deleted (events, exchanges). Hashes of their ids stay, so that sending them again does not restore
        them. Raises ValueError without a user."""
        if not user:
            raise ValueError("user is empty; name the pseudonym whose events are to be deleted")
        answers = sa.select(X.response_id).where(X.user_id == user, X.tenant == tenant)
        is_own = sa.or_(sa.and_(E.user_id == user, E.tenant == tenant), E.response_id.in_(answers))
        with self._db.transaction():
            self._reserve_numbers(0)  # locks out other writers
            ids = {id_ for (id_,) in self._db.rows(sa.select(E.event_id).where(is_own).union_all(answers))}
            hashes = [*map(_hash, ids)]
            stored_hashes = {id_ for (id_,) in self._select_among(sa.select(GONE.c.id), GONE.c.id, hashes)}
            self._db.insert(GONE, [{"id": id_} for id_ in hashes if id_ not in stored_hashes])
            events = self._db.change(EVENTS.delete().where(is_own))
            exchanges = self._db.change(EXCHANGES.delete().where(X.user_id == user, X.tenant == tenant))
        self._truncate_log()
        return events, exchanges

    # ---- reading

    def watermark(self) -> int:
        """Return the number of the last committed row. As ``upto`` it makes a later read return the same
        rows."""
        return int(self._read_mark("seq"))

    def joined(
        self,
        since: float = 0.0,
        until: float = FOREVER,
        *,
        upto: int | None = None,
        horizon_s: float = FOREVER,
        training: bool = True,
    ) -> Iterator[Joined]:
        """Yield answers with ``ts`` in [since, until) by time, and their events of the first ``horizon_s``.

        Rows after the watermark ``upto`` are left out. With ``training``, an answer is left out entirely if
        any event on it is without consent, even a late one.
        """
        upto = self.watermark() if upto is None else upto
        for rows in self._read_pages(EXCHANGES, X.response_id, since, until, upto):
            events: dict[str, list[Event]] = {}
            refused_ids: set[str] = set()
            select = sa.select(E.held, E.body).where(E.seq <= upto)
            for flags, body in self._select_among(select, E.response_id, [row.response_id for row in rows]):
                event = Event.model_validate_json(body)
                events.setdefault(event.response_id, []).append(event)
                refused_ids |= {event.response_id} if flags & NO_CONSENT else set()
            for row in rows:
                if training and row.response_id in refused_ids:
                    continue
                own_events = [e for e in events.get(row.response_id, ()) if e.ts < row.ts + horizon_s]
                own_events.sort(key=lambda event: (event.ts, event.event_id))
                yield Joined(exchange=_parse_exchange(row), events=tuple(own_events))

    def events(
        self, since: float = 0.0, until: float = FOREVER, *, upto: int | None = None
    ) -> Iterator[Event]:
        """Yield all events with ``ts`` in [since, until) by time, those of unknown answers too."""
        upto = self.watermark() if upto is None else upto
        for rows in self._read_pages(EVENTS, E.event_id, since, until, upto):
            yield from (Event.model_validate_json(row.body) for row in rows)

    def exchange(self, response_id: str) -> Exchange | None:
        """Return the answer of an id, None where there is none."""
        rows = self._db.rows(sa.select(EXCHANGES).where(X.response_id == response_id))
        return _parse_exchange(rows[0]) if rows else None

    def counts(self) -> dict[str, int]:
        """Count rows by kind. ``unmatched``: events whose answer is not in the store (yet)."""
        return {
            "events": self._count(EVENTS),
            "exchanges": self._count(EXCHANGES),
            "unmatched": self._count(EVENTS, E.response_id.not_in(sa.select(X.response_id))),
            "without_consent": self._count(EVENTS, E.held.in_((1, 3))),
            "personal": self._count(EVENTS, E.held >= PERSONAL),
        }

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- statements

    def _reserve_numbers(self, count: int) -> int:
        """Reserve ``count`` numbers and return the first. The row stays locked until the commit, so numbers
        have the order of commits, and no other writer adds an id between the search for it and its
        insertion."""
        seq = MARKS.update().where(MARKS.c.name == "seq").values(value=MARKS.c.value + count)
        return int(self._db.scalar(seq.returning(MARKS.c.value))) - count + 1

    def _read_mark(self, name: str) -> float:
        return self._db.scalar(sa.select(MARKS.c.value).where(MARKS.c.name == name))

    def _count(self, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
        return self._db.scalar(sa.select(sa.func.count()).select_from(table).where(*where))

    def _select_among(self, select: Any, key: sa.Column[Any], ids: Sequence[str]) -> Iterator[Any]:
        """Yield the rows whose ``key`` is among ``ids``, with a statement for each ``PAGE`` of them."""
        for start in range(0, len(ids), PAGE):
            yield from self._db.rows(select.where(key.in_(ids[start : start + PAGE])))

    def _read_pages(
        self, table: sa.Table, key: sa.Column[Any], since: float, until: float, upto: int
    ) -> Iterator[Sequence[Any]]:
        """Yield pages of rows by (ts, key)."""
        ts, position = table.c.ts, (since, "")
        select = sa.select(table).where(ts < until, table.c.seq <= upto).order_by(ts, key).limit(PAGE)
        while True:
            rows = self._db.rows(select.where(sa.tuple_(ts, key) > sa.tuple_(*map(sa.literal, position))))
            if rows:
                yield rows
                position = (rows[-1].ts, rows[-1]._mapping[key])
            if len(rows) < PAGE:
                return

    def _truncate_log(self) -> None:
        """Truncate SQLite's log, in which the deleted rows would stay. PostgreSQL has no such file."""
        if self._db.in_file:
            self._db.command("PRAGMA wal_checkpoint(TRUNCATE)")


def open_store(where: str | Path) -> Store:
    """Open the store in a file, or at ``postgresql://...``. A missing file is made with its folder, and
    missing tables are made too.

    Raises ValueError for a file that is no store or cannot be made, for a wrong address, for a store of a
    newer program, and without psycopg; Unavailable for a database that does not answer.
    """
    first = {MARKS: [{"name": name, "value": float(name == "schema")} for name in ("schema", "seq", "floor")]}
    database = open_database(where, TABLES, "a store of feedback", first_rows=first, durable=True)
    version = database.scalar(sa.select(MARKS.c.value).where(MARKS.c.name == "schema"))
    if version != 1:
        database.close()
        raise ValueError(f"the store has schema {version} and this program reads 1; use the newer program")
    return Store(database)


def _hash(id_: str) -> str:
    return hashlib.sha256(id_.encode()).hexdigest()


# ---- exchanges as rows

_FIELDS = ("model", "revision", "messages", "output", "action", "sampling", "session", "arm", "propensity")


def _build_event_row(event: Event, seq: int, body: str) -> dict[str, Any]:
    return {
        "event_id": event.event_id,
        "response_id": event.response_id,
        "seq": seq,
        "ts": event.ts,
        "user_id": event.user,
        "tenant": event.tenant,
        "held": NO_CONSENT * (not event.consent) | PERSONAL * event.personal,
        "body": body,
    }


def _build_exchange_row(exchange: Exchange, seq: int) -> dict[str, Any]:
    body = {name: getattr(exchange, name) for name in _FIELDS}
    experts = exchange.experts
    if experts is not None:
        body["experts"] = [experts.dtype.str, *experts.shape]
    return {
        "response_id": exchange.response_id,
        "seq": seq,
        "ts": exchange.ts,
        "user_id": exchange.user,
        "tenant": exchange.tenant,
        "body": json.dumps(body),
        "prompt_tokens": exchange.prompt_tokens.astype("<i4").tobytes(),
        "tokens": exchange.tokens.astype("<i4").tobytes(),
        "logprobs": exchange.logprobs.astype("<f4").tobytes(),
        "experts": None if experts is None else experts.tobytes(),
    }


def _parse_exchange(row: Any) -> Exchange:
    """Return the exchange of a row, the inverse of ``_build_exchange_row``."""
    body = json.loads(row.body)
    dtype, *shape = body.pop("experts", [""])
    return Exchange(
        response_id=row.response_id,
        ts=row.ts,
        user=row.user_id,
        tenant=row.tenant,
        prompt_tokens=_parse_array(row.prompt_tokens, "<i4"),
        tokens=_parse_array(row.tokens, "<i4"),
        logprobs=_parse_array(row.logprobs, "<f4"),
        experts=None if row.experts is None else _parse_array(row.experts, dtype).reshape(shape),
        **body | {"messages": tuple(body["messages"]), "action": Action(body["action"])},
    )


def _parse_array(data: bytes | None, dtype: str) -> np.ndarray:
    return np.frombuffer(data or b"", dtype)
