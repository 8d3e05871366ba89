"""The store of events and exchanges: a file of SQLite, or PostgreSQL (``ostinato.database``).

An event is in it once, whatever is sent again and in whatever order; it is joined to its exchange by
``response_id`` when it is read, so it may come before the exchange or long after. Rows are numbered in the
order of their commits: all that was in the store at a watermark is read again later by that number.

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


def _required(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


MARKS = sa.Table("marks", TABLES, sa.Column("name", KEY, primary_key=True), _required("value", sa.Double))
GONE = sa.Table("gone", TABLES, sa.Column("id", KEY, primary_key=True))  # hashes of deleted ids
EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("event_id", KEY, primary_key=True),
    *map(_required, ("response_id", "seq", "ts"), (KEY, sa.BigInteger, sa.Double)),
    *map(_required, ("user_id", "tenant", "held", "body"), (KEY, KEY, sa.Integer, sa.Text)),
    sa.Index("events_response", "response_id"),
    sa.Index("events_ts", "ts", "event_id"),
    sa.Index("events_user", "user_id", "tenant"),
)
EXCHANGES = sa.Table(
    "exchanges",
    TABLES,
    sa.Column("response_id", KEY, primary_key=True),
    *map(_required, ("seq", "ts", "user_id", "tenant"), (sa.BigInteger, sa.Double, KEY, KEY)),
    _required("body", sa.Text),
    *map(_required, ("prompt_tokens", "tokens", "logprobs"), (sa.LargeBinary,) * 3),
    sa.Column("experts", sa.LargeBinary),
    sa.Index("exchanges_ts", "ts", "response_id"),
    sa.Index("exchanges_user", "user_id", "tenant"),
)
E, X = EVENTS.c, EXCHANGES.c


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

    def __init__(self, database: Database) -> None:
        self._db = database

    # ---- writing

    def append(self, events: Sequence[Event]) -> list[Outcome]:
        """Add events, each once in effect; on return they are committed. Their outcomes, in their order."""
        return self.write(events, ())

    def record(self, exchanges: Sequence[Exchange]) -> int:
        """Add exchanges; how many were new."""
        before = self.watermark()
        self.write((), exchanges)
        return self._count(EXCHANGES, X.seq > before)

    def write(self, events: Sequence[Event], exchanges: Sequence[Exchange]) -> list[Outcome]:
        """Both in one transaction. An exchange whose id is known is left as it is."""
        outcomes: list[Outcome] = []
        with self._db.transaction():
            seq = self._take(len(events) + len(exchanges))
            floor = self._mark("floor")
            ids = {id_ for event in events for id_ in (event.event_id, event.response_id)}
            ids |= {exchange.response_id for exchange in exchanges}
            gone = {id_ for (id_,) in self._among(sa.select(GONE.c.id), GONE.c.id, [*map(_hash, ids)])}
            bodies = sa.select(E.event_id, E.body)
            known: dict[str, str] = dict(self._among(bodies, E.event_id, [e.event_id for e in events]))
            rows: list[dict[str, Any]] = []
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
                    rows.append(_event_row(event, seq + len(rows), body))
            self._db.insert(EVENTS, rows)
            seq += len(rows)
            stored = self._among(sa.select(X.response_id), X.response_id, [x.response_id for x in exchanges])
            there = {id_ for (id_,) in stored}
            fresh = {x.response_id: x for x in reversed(exchanges) if x.response_id not in there}
            kept = [x for x in fresh.values() if _hash(x.response_id) not in gone and x.ts >= floor]
            self._db.insert(EXCHANGES, [_exchange_row(x, seq + k) for k, x in enumerate(kept)])
        return outcomes

    def prune(self, before: float) -> tuple[int, int]:
        """Remove what is older than ``before`` (seconds since 1970), and what belongs to an answer that is;
        (events, exchanges) that went. What is older is not accepted any more."""
        with self._db.transaction():
            self._take(0)  # writers wait
            floor = sa.and_(MARKS.c.name == "floor", MARKS.c.value < before)
            self._db.change(MARKS.update().where(floor).values(value=before))
            of_old = E.response_id.in_(sa.select(X.response_id).where(X.ts < before))
            events = self._db.change(EVENTS.delete().where(sa.or_(E.ts < before, of_old)))
            exchanges = self._db.change(EXCHANGES.delete().where(X.ts < before))
        self._wipe()
        return events, exchanges

    def delete_user(self, user: str, tenant: str = "") -> tuple[int, int]:
        """Remove a user's answers, the events on them and the user's events elsewhere; (events, exchanges)
        that went. Their hashes stay, so that none comes back by being sent again."""
        if not user:
            raise ValueError("user is empty; name the pseudonym whose events are to be deleted")
        answers = sa.select(X.response_id).where(X.user_id == user, X.tenant == tenant)
        own = sa.or_(sa.and_(E.user_id == user, E.tenant == tenant), E.response_id.in_(answers))
        with self._db.transaction():
            self._take(0)  # writers wait
            ids = {id_ for (id_,) in self._db.rows(sa.select(E.event_id).where(own).union_all(answers))}
            hashes = [*map(_hash, ids)]
            there = {id_ for (id_,) in self._among(sa.select(GONE.c.id), GONE.c.id, hashes)}
            self._db.insert(GONE, [{"id": id_} for id_ in hashes if id_ not in there])
            events = self._db.change(EVENTS.delete().where(own))
            exchanges = self._db.change(EXCHANGES.delete().where(X.user_id == user, X.tenant == tenant))
        self._wipe()
        return events, exchanges

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
        for rows in self._pages(EXCHANGES, X.response_id, since, until, upto):
            events: dict[str, list[Event]] = {}
            refused: set[str] = set()
            select = sa.select(E.held, E.body).where(E.seq <= upto)
            for held, body in self._among(select, E.response_id, [row.response_id for row in rows]):
                event = Event.model_validate_json(body)
                events.setdefault(event.response_id, []).append(event)
                refused |= {event.response_id} if held & NO_CONSENT else set()
            for row in rows:
                if training and row.response_id in refused:
                    continue
                own = [e for e in events.get(row.response_id, ()) if e.ts < row.ts + horizon_s]
                own.sort(key=lambda event: (event.ts, event.event_id))
                yield Joined(exchange=_exchange(row), events=tuple(own))

    def events(
        self, since: float = 0.0, until: float = FOREVER, *, upto: int | None = None
    ) -> Iterator[Event]:
        """All events with ``ts`` in [since, until) by time, those of unknown answers too."""
        upto = self.watermark() if upto is None else upto
        for rows in self._pages(EVENTS, E.event_id, since, until, upto):
            yield from (Event.model_validate_json(row.body) for row in rows)

    def exchange(self, response_id: str) -> Exchange | None:
        """One answer by its id."""
        rows = self._db.rows(sa.select(EXCHANGES).where(X.response_id == response_id))
        return _exchange(rows[0]) if rows else None

    def counts(self) -> dict[str, int]:
        """Rows by kind. ``unmatched``: events whose answer is not here (yet)."""
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

    def _take(self, count: int) -> int:
        """The first of ``count`` numbers. The row stays locked until the commit, so numbers come in its
        order, and between a look for an id and its insertion no one else writes."""
        seq = MARKS.update().where(MARKS.c.name == "seq").values(value=MARKS.c.value + count)
        return int(self._db.scalar(seq.returning(MARKS.c.value))) - count + 1

    def _mark(self, name: str) -> float:
        return self._db.scalar(sa.select(MARKS.c.value).where(MARKS.c.name == name))

    def _count(self, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
        return self._db.scalar(sa.select(sa.func.count()).select_from(table).where(*where))

    def _among(self, select: Any, key: sa.Column[Any], ids: Sequence[str]) -> Iterator[Any]:
        for first in range(0, len(ids), PAGE):
            yield from self._db.rows(select.where(key.in_(ids[first : first + PAGE])))

    def _pages(
        self, table: sa.Table, key: sa.Column[Any], since: float, until: float, upto: int
    ) -> Iterator[Sequence[Any]]:
        """Pages of rows by (ts, key)."""
        ts, at = table.c.ts, (since, "")
        select = sa.select(table).where(ts < until, table.c.seq <= upto).order_by(ts, key).limit(PAGE)
        while True:
            rows = self._db.rows(select.where(sa.tuple_(ts, key) > sa.tuple_(*map(sa.literal, at))))
            if rows:
                yield rows
                at = (rows[-1].ts, rows[-1]._mapping[key])
            if len(rows) < PAGE:
                return

    def _wipe(self) -> None:
        """What was deleted is not left in SQLite's log either."""
        if self._db.in_file:
            self._db.command("PRAGMA wal_checkpoint(TRUNCATE)")


def open_store(where: str | Path) -> Store:
    """The store in a file (made where there is none, with its folder), or at ``postgresql://...``.

    Raises ValueError for a file that is no store or cannot be made, a wrong address, or without psycopg;
    Unavailable for a database that does not answer.
    """
    first = {MARKS: [{"name": name, "value": float(name == "schema")} for name in ("schema", "seq", "floor")]}
    database = open_database(where, TABLES, "a store of feedback", first=first, durable=True)
    version = database.scalar(sa.select(MARKS.c.value).where(MARKS.c.name == "schema"))
    if version != 1:
        database.close()
        raise ValueError(f"the store has schema {version} and this program reads 1; use the newer program")
    return Store(database)


def _hash(id_: str) -> str:
    return hashlib.sha256(id_.encode()).hexdigest()


# ---- exchanges as rows

_PLAIN = ("model", "revision", "messages", "output", "action", "sampling", "session", "arm", "propensity")


def _event_row(event: Event, seq: int, body: str) -> dict[str, Any]:
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


def _exchange_row(exchange: Exchange, seq: int) -> dict[str, Any]:
    body = {name: getattr(exchange, name) for name in _PLAIN}
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


def _exchange(row: Any) -> Exchange:
    body = json.loads(row.body)
    dtype, *shape = body.pop("experts", [""])
    return Exchange(
        response_id=row.response_id,
        ts=row.ts,
        user=row.user_id,
        tenant=row.tenant,
        prompt_tokens=_array(row.prompt_tokens, "<i4"),
        tokens=_array(row.tokens, "<i4"),
        logprobs=_array(row.logprobs, "<f4"),
        experts=None if row.experts is None else _array(row.experts, dtype).reshape(shape),
        **body | {"messages": tuple(body["messages"]), "action": Action(body["action"])},
    )


def _array(data: bytes | None, dtype: str) -> np.ndarray:
    return np.frombuffer(data or b"", dtype)
