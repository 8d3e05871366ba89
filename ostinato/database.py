"""Databases of applications: tables of SQLAlchemy Core in a file of SQLite, or at postgresql://.

A Database is one connection; calls of several threads take turns. What a call writes is committed when it
returns, or with the ``transaction`` around it. Applications write SQLAlchemy's expressions: one dialect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import sqlalchemy as sa
    from sqlalchemy import exc
except ModuleNotFoundError:
    raise ValueError('a store needs sqlalchemy; install it: pip install "ostinato[store]"') from None

KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")  # ordered by bytes, as in SQLite
LOCK = 7304  # of PostgreSQL: only one process makes the tables
Row = Mapping[str, Any]


class Unavailable(ConnectionError):
    """The database does not answer now; the same call may be made again on a new connection."""


class Database:
    """See ``open_database``. Every method raises Unavailable where the database does not answer."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection, self._turn = connection, threading.RLock()
        self.in_file = connection.dialect.name == "sqlite"

    def rows(self, statement: sa.Executable) -> Sequence[Any]:
        """What a SELECT, or a RETURNING, gives."""
        with self._turn, _answering():
            return self._connection.execute(statement).all()

    def scalar(self, statement: sa.Executable) -> Any:
        """The first column of the first row; None without any."""
        rows = self.rows(statement)
        return rows[0][0] if rows else None

    def change(self, statement: sa.Executable) -> int:
        """How many rows an UPDATE or DELETE changed."""
        with self._turn, _answering():
            return self._connection.execute(statement).rowcount

    def insert(self, table: sa.Table, rows: Sequence[Row]) -> None:
        if rows:
            with self._turn, _answering():
                self._connection.execute(table.insert(), rows)

    def put(self, table: sa.Table, row: Row, update: Sequence[str] = ()) -> None:
        """Insert a row; where there is one with its primary key, change the columns ``update`` of that."""
        there = sa.and_(*(column == row[column.name] for column in table.primary_key))
        with self.transaction():
            if self.scalar(sa.select(sa.func.count()).select_from(table).where(there)) == 0:
                self.insert(table, [row])
            elif update:
                self.change(table.update().where(there).values({name: row[name] for name in update}))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; in a file, no other writer in between."""
        with self._turn:
            self.command("BEGIN IMMEDIATE" if self.in_file else "BEGIN")
            try:
                yield
                self.command("COMMIT")
            except BaseException:
                with suppress(Unavailable):  # with a connection its transaction is gone
                    self.command("ROLLBACK")
                raise

    def command(self, text: str) -> None:
        with self._turn, _answering():
            self._connection.exec_driver_sql(text).close()

    def make(self, tables: sa.MetaData, first: Mapping[sa.Table, Sequence[Row]]) -> None:
        """Make the tables with their ``first`` rows, all at once, but for those that are there. ValueError
        where one of these lacks a column."""
        with self.transaction():
            if not self.in_file:
                self.rows(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
            with _answering():
                inspector = sa.inspect(self._connection)
                there = set(inspector.get_table_names())
                for table in tables.sorted_tables if there else ():
                    if table.name in there:
                        columns = {column["name"] for column in inspector.get_columns(table.name)}
                        if lacking := {column.name for column in table.columns} - columns:
                            raise ValueError(
                                f"its table {table.name} has no {', '.join(sorted(lacking))}: another "
                                "program made it, or an older version"
                            )
                tables.create_all(self._connection)
            for table, rows in first.items():
                self.insert(table, () if table.name in there else rows)

    def close(self) -> None:
        with self._turn, suppress(exc.SQLAlchemyError):  # a connection that is gone
            self._connection.close()


def open_database(
    where: str | Path | None,
    tables: sa.MetaData,
    what: str,
    *,
    first: Mapping[sa.Table, Sequence[Row]] | None = None,
    durable: bool = False,
) -> Database:
    """Of a file (made where there is none, with its folder), of an address postgresql://..., or of memory
    (None). ``what`` it is, for errors: "a store of feedback"; ``first``: rows of tables that are new.

    ``durable``: what is committed survives a power cut, not only a kill, and what is deleted is not left in
    the file. Raises ValueError for a file that is something else or cannot be made, a wrong address, or
    without psycopg; Unavailable for a server that does not answer.
    """
    text = "" if where is None else str(where)
    server = text.startswith(("postgresql://", "postgres://"))
    try:
        with _answering():
            database = Database(_engine(text, server).connect())
        try:
            if not server:
                for pragma in ("journal_mode=WAL", f"synchronous={'FULL' if durable else 'NORMAL'}"):
                    database.command(f"PRAGMA {pragma}")
                database.command(f"PRAGMA secure_delete={'ON' if durable else 'OFF'}")
            database.make(tables, first or {})
            return database
        except BaseException:
            database.close()
            raise
    except (exc.SQLAlchemyError, ValueError, OSError) as error:
        if server and isinstance(error, Unavailable):
            raise
        name = "the address" if server else text  # which may hold a password
        raise ValueError(f"{name} cannot be opened as {what} ({_said(error)}); give another one") from error


def _engine(text: str, server: bool) -> sa.Engine:
    """Of connections on which every statement commits by itself, outside of BEGIN."""
    if server:
        url = sa.make_url(text).set(drivername="postgresql+psycopg")
        options: dict[str, Any] = {"connect_timeout": 10}
    elif "://" in text:
        raise ValueError("it is neither a file nor postgresql://...")
    else:
        if text:
            Path(text).parent.mkdir(parents=True, exist_ok=True)
        url = sa.URL.create("sqlite", database=text or ":memory:")
        options = {"check_same_thread": False, "timeout": 30.0}
    try:
        return sa.create_engine(
            url, poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT", connect_args=options
        )
    except ModuleNotFoundError:
        raise ValueError('it needs psycopg; pip install "ostinato[postgres]"') from None


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.PendingRollbackError) as error:
        said = f"the store does not answer ({type(error).__name__}: {_said(error)})"
        raise Unavailable(said) from error


def _said(error: BaseException) -> str:
    """The driver's words, without SQLAlchemy's."""
    return str(getattr(error, "orig", None) or error)
