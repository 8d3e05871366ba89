"""A folder of many policies: files of adapters, by owner, name and version, and the table that lists them.

    FOLDER/catalog.sqlite       owners and their keys, policies with their heads, versions with their parents
    FOLDER/files/042/1042       an adapter (``peft_io.LOGICAL``); a file never changes

A version is whole or not there: its file is on the disk before the transaction that lists it, and a file that
none lists is deleted later. The heads of all policies are in memory too, where ``find`` looks. Several
processes may have a catalog open; ``refresh`` reads what others have changed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ostinato.database import KEY, Database, open_database, sa
from ostinato.files import sync

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
WRITING_S = 3600.0  # a file that has been written for longer was left by a process that died
TABLES = sa.MetaData()
OWNERS = sa.Table(
    "owners",
    TABLES,
    sa.Column("owner", KEY, primary_key=True),
    sa.Column("digest", KEY, nullable=False, unique=True),  # of its key
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("versions", "bytes", "sequences")),
    sa.Column("change", sa.BigInteger, nullable=False, index=True),  # the number of its last change
)
POLICIES = sa.Table(
    "policies",
    TABLES,
    sa.Column("owner", KEY, primary_key=True),
    sa.Column("name", KEY, primary_key=True),
    # newest: the highest version that there ever was; head, before: 0 for none
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("newest", "head", "before")),
    sa.Column("change", sa.BigInteger, nullable=False, index=True),  # the number of its last change
)
VERSIONS = sa.Table(
    "versions",
    TABLES,
    sa.Column("owner", KEY, primary_key=True),
    sa.Column("name", KEY, primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True),
    sa.Column("file", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("parent", KEY, nullable=False),  # NAME@VERSION of the same owner, or ""
    sa.Column("created", sa.Double, nullable=False),  # seconds since 1970
)
UNLISTED = sa.Table(  # files that are being written, and those that are to be deleted
    "unlisted",
    TABLES,
    sa.Column("file", sa.Integer, primary_key=True),
    *(sa.Column(name, kind, nullable=False) for name, kind in (("owner", KEY), ("bytes", sa.BigInteger))),
    sa.Column("since", sa.Double, nullable=False),  # 0: to be deleted
    sqlite_autoincrement=True,  # no number is used twice
)
K, P, V, U = OWNERS.c, POLICIES.c, VERSIONS.c, UNLISTED.c


class OverQuota(ValueError):
    """An owner has no room for another version. The message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that an owner has: versions and their bytes on the disk, and sequences under way at once."""

    versions: int = 1000
    bytes: int = 100 << 30
    sequences: int = 64


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a policy. ``file``: its number in the folder."""

    owner: str
    name: str
    version: int
    file: int
    num_bytes: int

    @property
    def label(self) -> str:
        """NAME@VERSION."""
        return f"{self.name}@{self.version}"


FIELDS = (V.owner, V.name, V.version, V.file, V.bytes)  # of Version


class Catalog:
    """The catalog of a folder, see ``open_catalog``. Methods that change it raise ValueError for names that
    do not exist or cannot be used, and Unavailable where the table cannot be written."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder, self._db = folder, database
        self._last_change = {POLICIES: 0, OWNERS: 0}  # that is in memory
        self._heads: dict[str, dict[str, Version]] = {}  # by owner and name
        self._owners: dict[str, tuple[str, Quota]] = {}  # by the digest of the key
        self._digests: dict[str, str] = {}  # by owner
        self.refresh()

    def close(self) -> None:
        self._db.close()

    # ---- reading

    def refresh(self) -> None:
        """Read what has changed since the last call, in this process or another one."""
        heads = sa.select(P.change, P.owner, P.name, V.version, V.file, V.bytes)
        heads = heads.select_from(POLICIES.outerjoin(VERSIONS, _is_head()))
        newer = P.change > self._last_change[POLICIES]
        for change, owner, name, *version in self._db.rows(heads.where(newer).order_by(P.change)):
            known = self._heads.setdefault(owner, {})
            if version[0] is None:
                known.pop(name, None)
            else:
                known[name] = Version(owner, name, *version)
            self._last_change[POLICIES] = change
        owners = sa.select(K.change, K.owner, K.digest, K.versions, K.bytes, K.sequences)
        newer = K.change > self._last_change[OWNERS]
        for change, owner, digest, versions, num_bytes, sequences in self._db.rows(
            owners.where(newer).order_by(K.change)
        ):
            self._owners.pop(self._digests.get(owner, ""), None)
            quota = Quota(versions=versions, bytes=num_bytes, sequences=sequences)
            self._digests[owner], self._owners[digest] = digest, (owner, quota)
            self._last_change[OWNERS] = change

    def find(self, owner: str, name: str) -> Version | None:
        """The version of a policy that NAME (its head) or NAME@VERSION means. None if the owner has no such
        policy, whatever others have."""
        head = self._heads.get(owner, {}).get(name)
        if head is not None or "@" not in name:
            return head
        policy, _, number = name.rpartition("@")
        known = self._heads.get(owner, {}).get(policy)
        if known is None or not number.isdecimal() or len(number) > 18:
            return None
        return known if known.version == int(number) else self._read_version(owner, policy, int(number))

    def path(self, version: Version) -> Path:
        return self._make_path(version.file)

    def list_heads(self, owner: str) -> Iterable[Version]:
        """The policies of an owner, each with the version that is served."""
        return self._heads.get(owner, {}).values()

    def list_lineage(self, owner: str, name: str) -> list[Version]:
        """A version, as ``find`` takes it, with all that it came from, the newest first, up to the first that
        was deleted."""
        lineage: list[Version] = []
        version = self.find(owner, name)
        while version is not None:
            lineage.append(version)
            mine = sa.and_(V.owner == owner, V.name == version.name, V.version == version.version)
            policy, _, number = (self._db.scalar(sa.select(V.parent).where(mine)) or "").rpartition("@")
            version = self._read_version(owner, policy, int(number)) if policy else None
        return lineage

    @property
    def has_owners(self) -> bool:
        """Whether policies belong to keys."""
        return bool(self._owners)

    def find_owner(self, key: str) -> tuple[str, Quota] | None:
        """The owner of a key, with its quota; None for a key that nobody has."""
        return self._owners.get(_digest(key))

    def find_quota(self, owner: str) -> Quota | None:
        """The quota of an owner; None for one without a key."""
        return self._owners.get(self._digests.get(owner, ""), ("", None))[1]

    # ---- changes

    def add_owner(self, owner: str, quota: Quota) -> str:
        """Give an owner a new key, which is returned and not stored, and a quota. An earlier key of it is
        valid no more."""
        _check_name("owner", owner)
        key = f"ost-{secrets.token_urlsafe(24)}"
        values = {"digest": _digest(key), "versions": quota.versions, "bytes": quota.bytes}
        with self._db.transaction():
            values |= {"sequences": quota.sequences, "change": self._next_change(OWNERS)}
            if not self._db.change(OWNERS.update().where(K.owner == owner).values(values)):
                self._db.insert(OWNERS, [{"owner": owner, **values}])
        self.refresh()
        return key

    def publish(self, owner: str, name: str, source: Path, parent: str = "") -> Version:
        """Add a copy of the file ``source`` as the next version of a policy, and serve it from now on.
        ``parent``: what it came from, NAME@VERSION of this owner; by default the version that was served.
        Raises OverQuota too, and OSError if the file cannot be copied."""
        _check_name("policy", name)
        if parent and ("@" not in parent or self.find(owner, parent) is None):
            raise ValueError(f"parent is {parent!r}; name a version of yours, NAME@VERSION")
        self.sweep()
        num_bytes = source.stat().st_size
        file = self._reserve(owner, num_bytes)
        try:
            path = self._make_path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            sync(path)
            sync(path.parent)
            version = self._list_file(owner, name, file, num_bytes, parent)
        except BaseException:
            self._db.change(UNLISTED.update().where(U.file == file).values(since=0.0))
            self.sweep()
            raise
        self.refresh()
        return version

    def promote(self, owner: str, name: str, version: int) -> Version:
        """Serve this version of a policy from now on."""
        with self._db.transaction():
            promoted, head = self._read_version(owner, name, version), self._read_head(owner, name)[0]
            if promoted is None:
                raise ValueError(f"there is no {name}@{version}; list its versions: ostinato catalog list")
            if version != head:
                self._set_head(owner, name, version, head)
        self.refresh()
        return promoted

    def roll_back(self, owner: str, name: str) -> Version:
        """Serve the version again that was served before the one that is."""
        _, before = self._read_head(owner, name)
        if not before:
            raise ValueError(f"no other version of {name!r} was served before; promote one by its number")
        return self.promote(owner, name, before)

    def delete(self, owner: str, name: str, version: int = 0) -> int:
        """Delete a version that is not served, or (0) the policy with all versions; their numbers are not
        used again. Returns how many. What is loaded elsewhere ends as it began."""
        with self._db.transaction():
            head, before = self._read_head(owner, name)
            if version and version == head:
                raise ValueError(f"{name}@{version} is served; promote another one first, or delete {name}")
            which = sa.and_(V.owner == owner, V.name == name, *([V.version == version] if version else []))
            rows = self._db.rows(sa.select(V.file, V.bytes).where(which))
            if not rows:
                raise ValueError(f"there is no {name}@{version}; list its versions: ostinato catalog list")
            gone = [{"file": file, "owner": owner, "bytes": size, "since": 0.0} for file, size in rows]
            self._db.insert(UNLISTED, gone)
            self._db.change(VERSIONS.delete().where(which))
            if not version:
                self._set_head(owner, name, 0, 0)
            elif version == before:
                self._set_head(owner, name, head, 0)
        self.sweep()
        self.refresh()
        return len(rows)

    def sweep(self) -> int:
        """Delete the files that no version has and no living process writes. Returns how many."""
        old = U.since < time.time() - WRITING_S
        files = [file for (file,) in self._db.rows(sa.select(U.file).where(old))]
        for file in files:
            with self._db.transaction():  # one that is still written loses its reservation, or is listed
                if self._db.change(UNLISTED.delete().where(U.file == file)):
                    self._make_path(file).unlink(missing_ok=True)
        return len(files)

    # ---- helpers

    def _reserve(self, owner: str, num_bytes: int) -> int:
        """A number for a file of ``num_bytes``, which counts for the owner's quota from now on."""
        with self._db.transaction():
            rows = self._db.rows(sa.select(K.versions, K.bytes).where(K.owner == owner))
            for most_versions, most_bytes in rows:
                count = size = 0
                for table, column in ((VERSIONS, V), (UNLISTED, U)):
                    used = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(column.bytes), 0))
                    n, total = self._db.rows(used.select_from(table).where(column.owner == owner))[0]
                    count, size = count + n, size + total
                if count + 1 > most_versions or size + num_bytes > most_bytes:
                    raise OverQuota(
                        f"{owner} has {count} of {most_versions} versions and {size} of {most_bytes} bytes; "
                        "delete some, or ask for a larger quota"
                    )
            row = {"owner": owner, "bytes": num_bytes, "since": time.time()}
            return self._db.scalar(UNLISTED.insert().values(row).returning(U.file))

    def _list_file(self, owner: str, name: str, file: int, num_bytes: int, parent: str) -> Version:
        """List a file that is on the disk as the next version of a policy, which is served from now on."""
        with self._db.transaction():
            rows = self._db.rows(sa.select(P.newest, P.head).where(P.owner == owner, P.name == name))
            newest, head = rows[0] if rows else (0, 0)
            values = {"newest": newest + 1, "head": newest + 1, "before": head}
            values |= {"change": self._next_change(POLICIES)}
            if rows:
                self._db.change(POLICIES.update().where(P.owner == owner, P.name == name).values(values))
            else:
                self._db.insert(POLICIES, [{"owner": owner, "name": name, **values}])
            parent = parent or (f"{name}@{head}" if head else "")
            row = {"owner": owner, "name": name, "version": newest + 1, "file": file, "bytes": num_bytes}
            self._db.insert(VERSIONS, [row | {"parent": parent, "created": time.time()}])
            if not self._db.change(UNLISTED.delete().where(U.file == file)):
                raise ValueError(f"{name} took over {WRITING_S:g} s to write and is gone; publish it again")
        return Version(owner, name, newest + 1, file, num_bytes)

    def _read_head(self, owner: str, name: str) -> tuple[int, int]:
        """(version that is served, that before). Raises ValueError for a policy that does not exist."""
        rows = self._db.rows(sa.select(P.head, P.before).where(P.owner == owner, P.name == name, P.head > 0))
        if not rows:
            raise ValueError(f"there is no policy {name!r}; list what there is: ostinato catalog list")
        return rows[0][0], rows[0][1]

    def _read_version(self, owner: str, name: str, version: int) -> Version | None:
        which = sa.and_(V.owner == owner, V.name == name, V.version == version)
        rows = self._db.rows(sa.select(*FIELDS).where(which))
        return Version(*rows[0]) if rows else None

    def _set_head(self, owner: str, name: str, head: int, before: int) -> None:
        values = {"head": head, "before": before, "change": self._next_change(POLICIES)}
        self._db.change(POLICIES.update().where(P.owner == owner, P.name == name).values(values))

    def _next_change(self, table: sa.Table) -> int:
        return (self._db.scalar(sa.select(sa.func.max(table.c.change))) or 0) + 1

    def _make_path(self, file: int) -> Path:
        return self._folder / "files" / f"{file % 1000:03d}" / str(file)


def open_catalog(folder: Path, *, new: bool = False) -> Catalog:
    """Open the catalog of a folder; ``new``: make it where there is none. Raises ValueError for a folder
    without one."""
    path = folder / "catalog.sqlite"
    if not new and not path.is_file():
        raise ValueError(f"{folder} is no catalog; make one: ostinato catalog add {folder} NAME ADAPTER")
    return Catalog(folder, open_database(path, TABLES, "a catalog of policies", durable=True))


def _is_head() -> sa.ColumnElement[bool]:
    return sa.and_(V.owner == P.owner, V.name == P.name, V.version == P.head)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{what} is {name!r}; use up to 128 of A-Z, a-z, 0-9, and . _ / - after the first")
