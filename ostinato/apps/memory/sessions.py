"""Conversations that outlive the process: originals, blocks and states in one SQLite file.

What is in it survives a kill at any moment: an original is there before a block that needs it, and a state is
replaced as a whole.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.apps.memory.blocks import Block, MemoryState, block_from_row, source_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS originals (source TEXT PRIMARY KEY, text BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (name TEXT PRIMARY KEY, seen TEXT NOT NULL, state TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_seen ON sessions (seen);
CREATE TABLE IF NOT EXISTS blocks (name TEXT, id INTEGER, body TEXT NOT NULL, PRIMARY KEY (name, id));
"""


class Sessions:
    """``blocks.Originals`` and the states by name, of any thread. ``file`` None: in this process alone.

    ValueError for a file that is no such store.
    """

    def __init__(self, file: Path | None) -> None:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        try:
            self._base = sqlite3.connect(
                ":memory:" if file is None else file, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise ValueError(f"{file} is no store of memories ({error}); give another file") from error

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._base.execute(sql, values).fetchall()

    def put(self, text: str) -> str:
        source = source_of(text)
        data = text.encode("utf-8", "surrogatepass")
        self._rows("INSERT OR IGNORE INTO originals VALUES (?, ?)", source, data)
        return source

    def get(self, source: str) -> str:
        found = self._rows("SELECT text FROM originals WHERE source = ?", source)
        if not found:
            raise KeyError(source)
        return found[0][0].decode("utf-8", "surrogatepass")

    def load(self, name: str) -> tuple[MemoryState, str] | None:
        """(state, digest of its messages) of a session; None for one that is not known."""
        found = self._rows("SELECT state, seen FROM sessions WHERE name = ?", name)
        return (MemoryState.from_json(json.loads(found[0][0])), found[0][1]) if found else None

    def found(self, seen: Sequence[str]) -> str:
        """The session that has the most of these digests of messages; "" where none has any."""
        for digest in reversed(seen):
            if rows := self._rows("SELECT name FROM sessions WHERE seen = ? ORDER BY name", digest):
                return rows[0][0]
        return ""

    def add(self, name: str, block: Block) -> None:
        """A block that has come to a session."""
        body = json.dumps([getattr(block, key) for key in Block.__dataclass_fields__])
        self._rows("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", name, block.id, body)

    def save(self, name: str, seen: str, state: MemoryState) -> None:
        text = json.dumps(state.to_json())
        self._rows("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", name, seen, text)

    def gone(self, name: str, state: MemoryState, most: int = 200) -> list[Block]:
        """Blocks of a session that are not in its context, the newest first."""
        sql = "SELECT body FROM blocks WHERE name = ? AND id < ? ORDER BY id DESC LIMIT ?"
        rows = self._rows(sql, name, state.next_id, most + len(state.blocks))
        present = {one.id for one in state.blocks}
        blocks = (block_from_row(json.loads(body)) for (body,) in rows)
        return [one for one in blocks if one.id not in present][:most]

    def block(self, name: str, id: int) -> Block | None:
        """A block of a session as it was when it came."""
        found = self._rows("SELECT body FROM blocks WHERE name = ? AND id = ?", name, id)
        return block_from_row(json.loads(found[0][0])) if found else None

    def close(self) -> None:
        with self._lock:
            self._base.close()


__all__ = ["Sessions"]
