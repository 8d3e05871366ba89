"""Conversations that outlive the process: originals, blocks and states in one SQLite file.

The file stays valid through a kill at any moment: an original is stored before a block that needs it, and a
state is replaced in one statement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ostinato.apps.memory.blocks import Block, MemoryState, source_of
from ostinato.database import open_database, sa

TABLES = sa.MetaData()
ORIGINALS = sa.Table(
    "originals", TABLES, sa.Column("source", sa.Text, primary_key=True), sa.Column("text", sa.LargeBinary)
)
SESSIONS = sa.Table(
    "sessions",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("seen", sa.Text, nullable=False, index=True),
    sa.Column("state", sa.Text, nullable=False),
)
BLOCKS = sa.Table(
    "blocks",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("fields", sa.Text, nullable=False),
)


class Sessions:
    """``blocks.Originals`` and the states by name, usable from any thread. ``file`` None: in the memory of
    this process alone.

    Raises ValueError for a file that is no such store.
    """

    def __init__(self, file: Path | None) -> None:
        self._db = open_database(file, TABLES, "a store of memories")

    def put(self, text: str) -> str:
        source = source_of(text)
        self._db.put(ORIGINALS, {"source": source, "text": text.encode("utf-8", "surrogatepass")})
        return source

    def get(self, source: str) -> str:
        text = self._db.scalar(sa.select(ORIGINALS.c.text).where(ORIGINALS.c.source == source))
        if text is None:
            raise KeyError(source)
        return text.decode("utf-8", "surrogatepass")

    def load(self, name: str) -> tuple[MemoryState, str] | None:
        """Return (state, digest of its messages) of a session; None for an unknown session."""
        rows = self._db.rows(sa.select(SESSIONS).where(SESSIONS.c.name == name))
        return (MemoryState.from_json(json.loads(rows[0].state)), rows[0].seen) if rows else None

    def best_match(self, seen: Sequence[str]) -> str:
        """Return the session that has the most of these digests of messages; "" where no session has any."""
        for digest in reversed(seen):
            names = sa.select(sa.func.min(SESSIONS.c.name)).where(SESSIONS.c.seen == digest)
            if (name := self._db.scalar(names)) is not None:
                return name
        return ""

    def add(self, name: str, block: Block) -> None:
        """Store a new block of a session."""
        self._db.put(BLOCKS, {"name": name, "id": block.id, "fields": json.dumps(asdict(block))}, ["fields"])

    def save(self, name: str, seen: str, state: MemoryState) -> None:
        row = {"name": name, "seen": seen, "state": json.dumps(state.to_json())}
        self._db.put(SESSIONS, row, ["seen", "state"])

    def list_gone(self, name: str, state: MemoryState, most: int = 200) -> list[Block]:
        """Return the blocks of a session that are not in its context, the newest first."""
        query = sa.select(BLOCKS.c.fields).where(BLOCKS.c.name == name, BLOCKS.c.id < state.next_id)
        rows = self._db.rows(query.order_by(BLOCKS.c.id.desc()).limit(most + len(state.blocks)))
        present_ids = {block.id for block in state.blocks}
        blocks = (Block(**json.loads(fields)) for (fields,) in rows)
        return [block for block in blocks if block.id not in present_ids][:most]

    def block(self, name: str, id: int) -> Block | None:
        """Return a block of a session in its first form."""
        fields = self._db.scalar(sa.select(BLOCKS.c.fields).where(BLOCKS.c.name == name, BLOCKS.c.id == id))
        return None if fields is None else Block(**json.loads(fields))

    def close(self) -> None:
        self._db.close()
