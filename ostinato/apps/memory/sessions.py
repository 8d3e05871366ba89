"""Conversations that outlive the process: originals, blocks and states in one SQLite file.

The file stays valid through a kill at any moment: an original is stored before a block that needs it, and a
state is replaced in one statement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ostinato.apps.memory.blocks import Block, MemoryState, hash_text
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
        source = hash_text(text)
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

    def find_best_match(self, digests: Sequence[str]) -> str:
        """Return the session that ends with the latest of these ``digests`` of messages; "" if none does."""
        for digest in reversed(digests):
            first_name = sa.select(sa.func.min(SESSIONS.c.name)).where(SESSIONS.c.seen == digest)
            if (name := self._db.scalar(first_name)) is not None:
                return name
        return ""

    def add(self, name: str, block: Block) -> None:
        """Store a block of a session, in the place of one with the same id."""
        self._db.put(BLOCKS, {"name": name, "id": block.id, "fields": json.dumps(asdict(block))}, ["fields"])

    def save(self, name: str, digest: str, state: MemoryState) -> None:
        """Store the state of a session, with the digest of its messages, in the place of the state before."""
        row = {"name": name, "seen": digest, "state": json.dumps(state.to_json())}
        self._db.put(SESSIONS, row, ["seen", "state"])

    def list_gone(self, name: str, state: MemoryState, max_blocks: int = 200) -> list[Block]:
        """Return blocks of a session that are not in its context, the newest first, ``max_blocks`` at
        most."""
        query = sa.select(BLOCKS.c.fields).where(BLOCKS.c.name == name, BLOCKS.c.id < state.next_id)
        rows = self._db.rows(query.order_by(BLOCKS.c.id.desc()).limit(max_blocks + len(state.blocks)))
        present_ids = {block.id for block in state.blocks}
        blocks = (Block(**json.loads(fields)) for (fields,) in rows)
        return [block for block in blocks if block.id not in present_ids][:max_blocks]

    def load_block(self, name: str, id: int) -> Block | None:
        """Return a block of a session in its first form; None for an unknown one."""
        fields = self._db.scalar(sa.select(BLOCKS.c.fields).where(BLOCKS.c.name == name, BLOCKS.c.id == id))
        return None if fields is None else Block(**json.loads(fields))

    def close(self) -> None:
        self._db.close()
