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
LOCK = 7304  # advisory lock of PostgreSQL: only one process makes the tables
Row = Mapping[str, Any]


class Unavailable(ConnectionError):
    """The database does not answer; the same call may succeed on a new connection."""


class Database:
    """One connection, see ``open_database``. Every method raises Unavailable if the database does not
    answer."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection, self._lock = connection, threading.RLock()
        self.in_file = connection.dialect.name == "sqlite"

    def rows(self, statement: sa.Executable) -> Sequence[Any]:
        """All rows of a SELECT or a RETURNING."""
        with self._lock, _translate_errors():
            return self._connection.execute(statement).all()

    def scalar(self, statement: sa.Executable) -> Any:
        """The first column of the first row; None without any."""
        rows = self.rows(statement)
        return rows[0][0] if rows else None

    def change(self, statement: sa.Executable) -> int:
        """Run an UPDATE or DELETE; returns the number of changed rows."""
        with self._lock, _translate_errors():
            return self._connection.execute(statement).rowcount

    def insert(self, table: sa.Table, rows: Sequence[Row]) -> None:
        """Insert the rows, if there are any."""
        if rows:
            with self._lock, _translate_errors():
                self._connection.execute(table.insert(), rows)

    def put(self, table: sa.Table, row: Row, update: Sequence[str] = ()) -> None:
        """Insert a row. If its primary key exists, change the columns ``update`` of the existing row instead;
        without such columns the row stays as it is."""
        same_key = sa.and_(*(column == row[column.name] for column in table.primary_key))
        with self.transaction():
            if self.scalar(sa.select(sa.func.count()).select_from(table).where(same_key)) == 0:
                self.insert(table, [row])
            elif update:
                self.change(table.update().where(same_key).values({name: row[name] for name in update}))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all calls of the block, or none if it raises; in a file, without other writers in
        between."""
        with self._lock:
            self.command("BEGIN IMMEDIATE" if self.in_file else "BEGIN")
            try:
                yield
                self.command("COMMIT")
            except BaseException:
                with suppress(Unavailable):  # with a connection its transaction is gone
                    self.command("ROLLBACK")
                raise

    def command(self, text: str) -> None:
        """Run a statement in the database's own SQL, without a result."""
        with self._lock, _translate_errors():
            self._connection.exec_driver_sql(text).close()

    def make(self, tables: sa.MetaData, first_rows: Mapping[sa.Table, Sequence[Row]]) -> None:
        """Make missing tables, in one transaction, and insert their ``first_rows``; tables that exist get no
        rows. Raises ValueError if an existing table lacks a column."""
        with self.transaction():
            if not self.in_file:
                self.rows(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
            with _translate_errors():
                inspector = sa.inspect(self._connection)
                existing = set(inspector.get_table_names())
                for table in tables.sorted_tables if existing else ():
                    if table.name in existing:
                        columns = {column["name"] for column in inspector.get_columns(table.name)}
                        if missing := {column.name for column in table.columns} - columns:
                            raise ValueError(
                                f"its table {table.name} has no {', '.join(sorted(missing))}: another "
                                "program made it, or an older version"
                            )
                tables.create_all(self._connection)
            for table, rows in first_rows.items():
                self.insert(table, () if table.name in existing else rows)

    def close(self) -> None:
        with self._lock, suppress(exc.SQLAlchemyError):  # a connection that is gone
            self._connection.close()


def open_database(
    where: str | Path | None,
    tables: sa.MetaData,
    what: str,
    *,
    first_rows: Mapping[sa.Table, Sequence[Row]] | None = None,
    durable: bool = False,
) -> Database:
    """A database in the file ``where`` (made if missing, with its folder), at an address postgresql://..., or
    in memory (None). ``what``: its name in errors, "a store of feedback"; ``first_rows``: rows of new tables.

    ``durable``: committed data survives a power cut, not only a kill, and deleted data is erased from the
    file. Raises ValueError for a file that is something else or cannot be made, a wrong address, or without
    psycopg; Unavailable for a server that does not answer."""
    text = "" if where is None else str(where)
    is_server = text.startswith(("postgresql://", "postgres://"))
    try:
        with _translate_errors():
            database = Database(_make_engine(text, is_server).connect())
        try:
            if not is_server:
                for pragma in ("journal_mode=WAL", f"synchronous={'FULL' if durable else 'NORMAL'}"):
                    database.command(f"PRAGMA {pragma}")
                database.command(f"PRAGMA secure_delete={'ON' if durable else 'OFF'}")
            database.make(tables, first_rows or {})
            return database
        except BaseException:
            database.close()
            raise
    except (exc.SQLAlchemyError, ValueError, OSError) as error:
        if is_server and isinstance(error, Unavailable):
            raise
        name = "the address" if is_server else text  # which may hold a password
        raise ValueError(
            f"{name} cannot be opened as {what} ({_quote_driver(error)}); give another one"
        ) from error


def _make_engine(text: str, is_server: bool) -> sa.Engine:
    """An engine whose statements commit by themselves, outside of BEGIN. Makes the folder of a file. Raises
    ValueError for an address of another kind, and without psycopg."""
    if is_server:
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
def _translate_errors() -> Iterator[None]:
    """Replace errors of the connection by Unavailable."""
    try:
        yield
    except (exc.OperationalError, exc.InterfaceError, exc.PendingRollbackError) as error:
        message = f"the store does not answer ({type(error).__name__}: {_quote_driver(error)})"
        raise Unavailable(message) from error


def _quote_driver(error: BaseException) -> str:
    """The driver's message, without SQLAlchemy's."""
    return str(getattr(error, "orig", None) or error)
