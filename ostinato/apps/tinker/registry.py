"""The server's state in SQLite: requests, stored before they are acknowledged, results until they are
fetched, and sessions, models, samplers and checkpoints by id. It survives a killed process."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.database import open_database, sa

JSON, PROTO = "application/json", "application/x-protobuf"
PENDING, DONE, FAILED = "pending", "done", "failed"
TABLES = sa.MetaData()
THINGS = sa.Table(
    "things",
    TABLES,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text),
    sa.Column("created", sa.Double),
    sa.Column("body", sa.Text),
)
REQUESTS = sa.Table(
    "requests",
    TABLES,
    sa.Column("id", sa.Text, primary_key=True),
    *map(sa.Column, ("owner", "seq", "kind", "digest"), (sa.Text, sa.Integer, sa.Text, sa.Text)),
    *map(sa.Column, ("body", "state", "result"), (sa.LargeBinary, sa.Text, sa.LargeBinary)),
    *map(sa.Column, ("media", "created", "fetched"), (sa.Text, sa.Double, sa.Double)),
    sa.Column("starts", sa.Integer, default=0),
    sa.Index("by_owner", "owner", "seq"),
    sa.Index("by_state", "state"),
)
R, T = REQUESTS.c, THINGS.c
ENDED = R.state != PENDING


class UserError(ValueError):
    """An error of the client, in one sentence."""

    status = 422  # of the response, if a request is refused at once


class NotFound(UserError):
    """There is nothing with this id."""

    status = 404


@dataclass(frozen=True, slots=True)
class Stored:
    """A request and its result. ``body`` is None once it cannot be needed any more."""

    id: str
    owner: str  # a model, whose requests run in the order of ``seq``, or a sampling session
    seq: int
    kind: str
    body: bytes | None
    state: str
    result: bytes | None
    media: str
    starts: int = 0  # how often a process has begun it, and neither ended it nor stopped in good order


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a request: the payload of its future, or an error in Tinker's format."""

    payload: bytes
    media: str = JSON
    state: str = DONE

    @classmethod
    def of(cls, body: dict[str, Any]) -> Result:
        """As JSON."""
        return cls(json.dumps(body).encode())

    @classmethod
    def failed(cls, sentence: str, category: str) -> Result:
        """``category``: "User" for an error of the client, else "Server"."""
        error = {"error": sentence, "category": category.lower()}
        return cls(json.dumps(error).encode(), JSON, FAILED)


STORED = sa.select(*(R[name] for name in Stored.__dataclass_fields__))


class Registry:
    """The tables in one file, for calls of several threads. Raises ValueError for a file that holds something
    else."""

    def __init__(self, path: Path) -> None:
        self._db = open_database(path, TABLES, "the registry of a Tinker server")

    def close(self) -> None:
        self._db.close()

    # ---- requests

    def submit(self, id: str, owner: str, seq: int, kind: str, body: bytes) -> bool:
        """Store a request; False if it is stored already. UserError if ``id`` has another request."""
        digest = hashlib.sha256(kind.encode() + body).hexdigest()
        with self._db.transaction():
            known = self._db.scalar(sa.select(R.digest).where(R.id == id))
            if known is None:
                row = {"id": id, "owner": owner, "seq": seq, "kind": kind, "digest": digest, "body": body}
                self._db.insert(REQUESTS, [row | {"state": PENDING, "created": time.time()}])
        if known not in (None, digest):
            raise UserError(f"seq_id {seq} of {owner} was used for another request; count on")
        return known is None

    def request(self, id: str) -> Stored | None:
        return next(iter(self._stored(R.id == id)), None)

    def next_of(self, owner: str, seq: int) -> Stored | None:
        """The request with this number, if it has arrived."""
        return next(iter(self._stored(R.owner == owner, R.seq == seq)), None)

    def pending(self) -> list[Stored]:
        """Pending requests in order of arrival."""
        return self._stored(R.state == PENDING)

    def since(self, owner: str, seq: int) -> list[Stored]:
        """The ended requests after ``seq``, in order: those that a snapshot at ``seq`` does not contain."""
        return sorted(self._stored(R.owner == owner, R.seq > seq, ENDED), key=lambda one: one.seq)

    def _stored(self, *where: sa.ColumnElement[bool]) -> list[Stored]:
        return [Stored(*row) for row in self._db.rows(STORED.where(*where).order_by(R.created, R.seq))]

    def finish(self, id: str, result: Result) -> None:
        values = {"state": result.state, "result": result.payload, "media": result.media}
        self._db.change(REQUESTS.update().where(R.id == id).values(values))

    def started(self, id: str, count: int = 1) -> None:
        """A process begins a request; -1: it has stopped in good order before the end."""
        self._db.change(REQUESTS.update().where(R.id == id).values(starts=R.starts + count))

    def last_seq(self, owner: str) -> int:
        """The highest ``seq`` of an ended request; -1 without any."""
        last = self._db.scalar(sa.select(sa.func.max(R.seq)).where(R.owner == owner, ENDED))
        return -1 if last is None else last

    def last_time(self, owner: str) -> float | None:
        """When its last request came, in seconds since 1970."""
        return self._db.scalar(sa.select(sa.func.max(R.created)).where(R.owner == owner))

    def forget_bodies(self, owner: str, seq: int) -> None:
        """Drop the bodies of ended requests up to ``seq``, whose effect a snapshot contains."""
        ended = REQUESTS.update().where(R.owner == owner, R.seq <= seq, R.seq > 0, ENDED)
        self._db.change(ended.values(body=None))

    def fetched(self, id: str) -> None:
        self._db.change(REQUESTS.update().where(R.id == id).values(fetched=time.time()))

    def purge(self, fetched_s: float, created_s: float) -> int:
        """Drop samples fetched ``fetched_s`` ago, and results made ``created_s`` ago. Returns how many."""
        now = time.time()
        old = R.created < now - created_s
        sampled = sa.and_(R.kind == "sample", ENDED, sa.or_(R.fetched < now - fetched_s, old))
        gone = self._db.change(REQUESTS.delete().where(sampled))
        results = REQUESTS.update().where(ENDED, R.body.is_(None), old)
        return gone + self._db.change(results.values(result=None))

    # ---- sessions, models, samplers, checkpoints

    def put(self, kind: str, id: str, body: dict[str, Any], owner: str = "") -> None:
        row = {"kind": kind, "id": id, "owner": owner, "created": time.time(), "body": json.dumps(body)}
        self._db.put(THINGS, row, ["body"])

    def get(self, kind: str, id: str) -> dict[str, Any] | None:
        body = self._db.scalar(sa.select(T.body).where(T.kind == kind, T.id == id))
        return None if body is None else json.loads(body)

    def require(self, kind: str, id: str) -> dict[str, Any]:
        """Like ``get``; raises NotFound if there is none."""
        if (body := self.get(kind, id)) is None:
            raise NotFound(f"there is no {kind} {id!r} here; create it first")
        return body

    def delete(self, kind: str, id: str) -> None:
        self._db.change(THINGS.delete().where(T.kind == kind, T.id == id))

    def all(self, kind: str, owner: str | None = None) -> list[tuple[str, float, dict[str, Any]]]:
        """(id, seconds since 1970, body), newest first; of one owner or of all."""
        things = sa.select(T.id, T.created, T.body).where(T.kind == kind)
        things = things if owner is None else things.where(T.owner == owner)
        rows = self._db.rows(things.order_by(T.created.desc(), T.id.desc()))
        return [(id, created, json.loads(body)) for id, created, body in rows]
