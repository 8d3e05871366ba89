"""The server's state in SQLite: requests, which are stored before they are acknowledged, results until they
are fetched, and sessions, models, samplers and checkpoints by id. It survives a killed process."""

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
HAS_ENDED = R.state != PENDING


class UserError(ValueError):
    """An error of the client, described in a sentence."""

    status = 422  # of the response, where a request is refused at once


class NotFound(UserError):
    """No session, model, sampler or checkpoint has this id."""

    status = 404


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request and its result. ``body`` is None once it cannot be needed any more."""

    id: str
    owner: str  # a model, whose requests run in the order of ``seq``, or a sampling session
    seq: int
    kind: str
    body: bytes | None
    state: str
    result: bytes | None
    media: str
    starts: int = 0  # times that a process has begun it and died


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a request: the payload of its future, or an error in Tinker's format."""

    payload: bytes
    media: str = JSON
    state: str = DONE

    @classmethod
    def from_document(cls, body: dict[str, Any]) -> Result:
        """Return a result in JSON."""
        return cls(json.dumps(body).encode())

    @classmethod
    def make_failure(cls, sentence: str, category: str) -> Result:
        """Return a failure. ``category``: "User" for an error of the client, else "Server"."""
        error = {"error": sentence, "category": category.lower()}
        return cls(json.dumps(error).encode(), JSON, FAILED)


REQUEST_QUERY = sa.select(*(R[name] for name in StoredRequest.__dataclass_fields__))


class Registry:
    """The tables in a file, for calls of several threads. Raises ValueError for a file of another kind."""

    def __init__(self, path: Path) -> None:
        self._db = open_database(path, TABLES, "the registry of a Tinker server")

    def close(self) -> None:
        self._db.close()

    # ---- requests

    def submit(self, id: str, owner: str, seq: int, kind: str, body: bytes) -> bool:
        """Store a request; False if it is stored already. Raises UserError if ``id`` has another request."""
        digest = hashlib.sha256(kind.encode() + body).hexdigest()
        with self._db.transaction():
            known_digest = self._db.scalar(sa.select(R.digest).where(R.id == id))
            if known_digest is None:
                row = {"id": id, "owner": owner, "seq": seq, "kind": kind, "digest": digest, "body": body}
                self._db.insert(REQUESTS, [row | {"state": PENDING, "created": time.time()}])
        if known_digest not in (None, digest):
            raise UserError(f"seq_id {seq} of {owner} was used for another request; count on")
        return known_digest is None

    def get_request(self, id: str) -> StoredRequest | None:
        return next(iter(self._select_requests(R.id == id)), None)

    def find_request(self, owner: str, seq: int) -> StoredRequest | None:
        """Return the request with this number, if it has arrived."""
        return next(iter(self._select_requests(R.owner == owner, R.seq == seq)), None)

    def list_pending(self) -> list[StoredRequest]:
        """Return the pending requests in order of arrival."""
        return self._select_requests(R.state == PENDING)

    def list_ended(self, owner: str, seq: int) -> list[StoredRequest]:
        """Return the ended requests after ``seq``, in order: a snapshot at ``seq`` does not contain them."""
        return sorted(
            self._select_requests(R.owner == owner, R.seq > seq, HAS_ENDED), key=lambda stored: stored.seq
        )

    def _select_requests(self, *where: sa.ColumnElement[bool]) -> list[StoredRequest]:
        return [
            StoredRequest(*row)
            for row in self._db.rows(REQUEST_QUERY.where(*where).order_by(R.created, R.seq))
        ]

    def finish(self, id: str, result: Result) -> None:
        values = {"state": result.state, "result": result.payload, "media": result.media}
        self._db.change(REQUESTS.update().where(R.id == id).values(values))

    def count_start(self, id: str, count: int = 1) -> None:
        """Count the start of a request by a process; -1: the process stopped in good order before the end."""
        self._db.change(REQUESTS.update().where(R.id == id).values(starts=R.starts + count))

    def find_last_seq(self, owner: str) -> int:
        """Return the highest ``seq`` of an ended request; -1 without any."""
        highest = self._db.scalar(sa.select(sa.func.max(R.seq)).where(R.owner == owner, HAS_ENDED))
        return -1 if highest is None else highest

    def find_last_time(self, owner: str) -> float | None:
        """Return the time of the owner's last request, in seconds since 1970; None without any."""
        return self._db.scalar(sa.select(sa.func.max(R.created)).where(R.owner == owner))

    def forget_bodies(self, owner: str, seq: int) -> None:
        """Drop the bodies of ended requests up to ``seq``, whose effect a snapshot contains."""
        update = REQUESTS.update().where(R.owner == owner, R.seq <= seq, R.seq > 0, HAS_ENDED)
        self._db.change(update.values(body=None))

    def mark_fetched(self, id: str) -> None:
        self._db.change(REQUESTS.update().where(R.id == id).values(fetched=time.time()))

    def purge(self, fetched_s: float, created_s: float) -> int:
        """Drop samples fetched ``fetched_s`` ago, and results of requests that came ``created_s`` ago.
        Returns how many."""
        now = time.time()
        is_old = R.created < now - created_s
        is_old_sample = sa.and_(R.kind == "sample", HAS_ENDED, sa.or_(R.fetched < now - fetched_s, is_old))
        num_deleted = self._db.change(REQUESTS.delete().where(is_old_sample))
        results = REQUESTS.update().where(HAS_ENDED, R.body.is_(None), is_old)
        return num_deleted + self._db.change(results.values(result=None))

    # ---- sessions, models, samplers, checkpoints

    def put(self, kind: str, id: str, body: dict[str, Any], owner: str = "") -> None:
        row = {"kind": kind, "id": id, "owner": owner, "created": time.time(), "body": json.dumps(body)}
        self._db.put(THINGS, row, ["body"])

    def get(self, kind: str, id: str) -> dict[str, Any] | None:
        body = self._db.scalar(sa.select(T.body).where(T.kind == kind, T.id == id))
        return None if body is None else json.loads(body)

    def require(self, kind: str, id: str) -> dict[str, Any]:
        """Return the same as ``get``. Raises NotFound if there is none."""
        if (body := self.get(kind, id)) is None:
            raise NotFound(f"there is no {kind} {id!r} here; create it first")
        return body

    def delete(self, kind: str, id: str) -> None:
        self._db.change(THINGS.delete().where(T.kind == kind, T.id == id))

    def list_all(self, kind: str, owner: str | None = None) -> list[tuple[str, float, dict[str, Any]]]:
        """Return (id, seconds since 1970, body), newest first, of an owner or of all."""
        query = sa.select(T.id, T.created, T.body).where(T.kind == kind)
        query = query if owner is None else query.where(T.owner == owner)
        rows = self._db.rows(query.order_by(T.created.desc(), T.id.desc()))
        return [(id, created_at, json.loads(body)) for id, created_at, body in rows]
