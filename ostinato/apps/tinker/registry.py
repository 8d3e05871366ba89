"""The server's state in SQLite: requests, stored before they are acknowledged, results until they are
fetched, and sessions, models, samplers and checkpoints by id. It survives a killed process."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON, PROTO = "application/json", "application/x-protobuf"
PENDING, DONE, FAILED = "pending", "done", "failed"
_SCHEMA = """
create table if not exists things (
    kind text, id text, owner text, created real, body text, primary key (kind, id));
create table if not exists requests (
    id text primary key, owner text, seq integer, kind text, digest text, body blob,
    state text, result blob, media text, created real, fetched real, starts integer default 0);
create index if not exists by_owner on requests (owner, seq);
create index if not exists by_state on requests (state);
"""
_COLUMNS = "id, owner, seq, kind, body, state, result, media, starts"


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


class Registry:
    """The tables in one file. SQLite serializes the calls of several threads. Raises ValueError for a file
    that holds something else."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma journal_mode=wal")
            # survives a kill; a power cut may undo the last writes
            self._db.execute("pragma synchronous=normal")
            self._db.executescript(_SCHEMA)
            self._update()
        except sqlite3.Error as error:
            raise ValueError(
                f"{path} is no registry of a Tinker server ({error}); name another folder"
            ) from error

    def _update(self) -> None:
        """Bring a file of an earlier version to this one: requests count their starts, and folders are
        relative to the file's own."""
        columns = {row[1] for row in self._db.execute("pragma table_info(requests)")}
        if "starts" not in columns:
            self._db.execute("alter table requests add column starts integer default 0")
        old = self._db.execute(
            """select kind, id, body from things where body like '%"folder": "/%'"""
        ).fetchall()
        for kind, id, text in old:
            document = json.loads(text)
            document["folder"] = _relative(document["folder"])
            values = (json.dumps(document), kind, id)
            self._db.execute("update things set body = ? where kind = ? and id = ?", values)

    def close(self) -> None:
        self._db.close()

    # ---- requests

    def submit(self, id: str, owner: str, seq: int, kind: str, body: bytes) -> bool:
        """Store a request; False if it is stored already. UserError if ``id`` has another request."""
        digest = hashlib.sha256(kind.encode() + body).hexdigest()
        row = self._db.execute("select digest from requests where id = ?", (id,)).fetchone()
        if row is None:
            values = (id, owner, seq, kind, digest, body, PENDING, time.time())
            self._db.execute(
                "insert into requests (id, owner, seq, kind, digest, body, state, created) "
                "values (?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        elif row[0] != digest:
            raise UserError(f"seq_id {seq} of {owner} was used for another request; count on")
        return row is None

    def request(self, id: str) -> Stored | None:
        row = self._db.execute(f"select {_COLUMNS} from requests where id = ?", (id,)).fetchone()
        return None if row is None else Stored(*row)

    def next_of(self, owner: str, seq: int) -> Stored | None:
        """The request with this number, if it has arrived."""
        query = f"select {_COLUMNS} from requests where owner = ? and seq = ?"
        row = self._db.execute(query, (owner, seq)).fetchone()
        return None if row is None else Stored(*row)

    def finish(self, id: str, result: Result) -> None:
        values = (result.state, result.payload, result.media, id)
        self._db.execute("update requests set state = ?, result = ?, media = ? where id = ?", values)

    def started(self, id: str, count: int = 1) -> None:
        """A process begins a request; -1: it has stopped in good order before the end."""
        self._db.execute("update requests set starts = starts + ? where id = ?", (count, id))

    def pending(self) -> list[Stored]:
        """Pending requests in order of arrival."""
        query = f"select {_COLUMNS} from requests where state = ? order by created, seq"
        return [Stored(*row) for row in self._db.execute(query, (PENDING,))]

    def since(self, owner: str, seq: int) -> list[Stored]:
        """The ended requests after ``seq``, in order: those that a snapshot at ``seq`` does not contain."""
        query = f"select {_COLUMNS} from requests where owner = ? and seq > ? and state != ? order by seq"
        return [Stored(*row) for row in self._db.execute(query, (owner, seq, PENDING))]

    def last_seq(self, owner: str) -> int:
        """The highest ``seq`` of an ended request; -1 without any."""
        query = "select max(seq) from requests where owner = ? and state != ?"
        last = self._db.execute(query, (owner, PENDING)).fetchone()[0]
        return -1 if last is None else last

    def last_time(self, owner: str) -> float | None:
        """When its last request came, in seconds since 1970."""
        return self._db.execute("select max(created) from requests where owner = ?", (owner,)).fetchone()[0]

    def forget_bodies(self, owner: str, seq: int) -> None:
        """Drop the bodies of ended requests up to ``seq``, whose effect a snapshot contains."""
        query = "update requests set body = null where owner = ? and seq <= ? and seq > 0 and state != ?"
        self._db.execute(query, (owner, seq, PENDING))

    def fetched(self, id: str) -> None:
        self._db.execute("update requests set fetched = ? where id = ?", (time.time(), id))

    def purge(self, fetched_s: float, created_s: float) -> int:
        """Drop samples fetched ``fetched_s`` ago, and results made ``created_s`` ago. Returns how many."""
        now = time.time()
        sampled = "delete from requests where kind = 'sample' and state != ? and (fetched < ? or created < ?)"
        gone = self._db.execute(sampled, (PENDING, now - fetched_s, now - created_s)).rowcount
        old = "update requests set result = null where state != ? and body is null and created < ?"
        return gone + self._db.execute(old, (PENDING, now - created_s)).rowcount

    # ---- sessions, models, samplers, checkpoints

    def put(self, kind: str, id: str, body: dict[str, Any], owner: str = "") -> None:
        values = (kind, id, owner, time.time(), json.dumps(body), json.dumps(body))
        self._db.execute(
            "insert into things values (?, ?, ?, ?, ?) on conflict do update set body = ?", values
        )

    def get(self, kind: str, id: str) -> dict[str, Any] | None:
        row = self._db.execute("select body from things where kind = ? and id = ?", (kind, id)).fetchone()
        return None if row is None else json.loads(row[0])

    def found(self, kind: str, id: str) -> dict[str, Any]:
        """Like ``get``; raises NotFound if there is none."""
        if (body := self.get(kind, id)) is None:
            raise NotFound(f"there is no {kind} {id!r} here; create it first")
        return body

    def delete(self, kind: str, id: str) -> None:
        self._db.execute("delete from things where kind = ? and id = ?", (kind, id))

    def all(self, kind: str, owner: str | None = None) -> list[tuple[str, float, dict[str, Any]]]:
        """(id, seconds since 1970, body), newest first; of one owner or of all."""
        query = "select id, created, body from things where kind = ? and (? is null or owner = ?)"
        rows = self._db.execute(f"{query} order by created desc, id desc", (kind, owner, owner))
        return [(id, created, json.loads(body)) for id, created, body in rows]


def _relative(folder: str) -> str:
    """A folder of a checkpoint (checkpoints/MODEL/KIND/NAME) or sampler (samplers/NAME) within the state."""
    parts = Path(folder).parts
    for length, room in ((4, "checkpoints"), (2, "samplers")):
        if len(parts) > length and parts[-length] == room:
            return str(Path(*parts[-length:]))
    return folder
