"""A PostgreSQL server of its own for tests, where the machine has one."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PLACES = ("/usr/lib/postgresql/*/bin", "/usr/local/bin", "/usr/bin")


class Cluster:
    """In a folder of its own, reached by a socket there. It runs as another user where this one is root."""

    def __init__(self, folder: Path, binaries: Path, user: str | None) -> None:
        self._folder, self._binaries, self._user, self._databases = folder, binaries, user, 0

    def run(self, name: str, *arguments: str) -> None:
        command = [str(self._binaries / name), *arguments]
        env = {**os.environ, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            command, cwd=self._folder, env=env, user=self._user, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def control(self, action: str, *more: str) -> None:
        data, log = str(self._folder / "data"), str(self._folder / "log")
        self.run("pg_ctl", "-D", data, "-l", log, "-w", *more, action)

    def start(self) -> None:
        self.control("start", "-o", f"-k {self._folder} -c listen_addresses=''")

    def kill(self) -> None:
        """All of it at once, as a crash does."""
        self.control("stop", "-m", "immediate")

    def address(self) -> str:
        """Of a new, empty database."""
        self._databases += 1
        name = f"store_{self._databases}"
        self.run("createdb", "-h", str(self._folder), "-U", "tests", name)
        return f"postgresql://tests@/{name}?host={self._folder}"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Running while the context lasts; without the binaries or psycopg the test is skipped."""
    pytest.importorskip("psycopg")
    found = [path for place in PLACES for path in sorted(Path("/").glob(f"{place[1:]}/initdb"), reverse=True)]
    if not found:
        pytest.skip("needs PostgreSQL: no initdb in " + ", ".join(PLACES))
    binaries = found[0].resolve().parent
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has 107 bytes at most
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    made = Cluster(folder, binaries, user)
    try:
        made.run("initdb", "-D", str(folder / "data"), "-U", "tests", "-A", "trust", "-E", "UTF8")
        made.start()
        yield made
    finally:
        with suppress(AssertionError):
            made.kill()
        shutil.rmtree(folder)


def _user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")
