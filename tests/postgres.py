"""A PostgreSQL server of a test's own, in /tmp."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cluster:
    """Reached by a socket in ``folder``."""

    folder: Path
    binaries: Path
    user: str | None  # PostgreSQL refuses to run as root
    _numbers: count[int] = field(default_factory=count)

    def run(self, name: str, *arguments: str) -> None:
        command = [str(self.binaries / name), *arguments]
        env = {**os.environ, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=env,
            user=self.user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if done.returncode:
            log = self.folder / "log"
            end = log.read_text(errors="replace")[-1000:] if log.exists() else ""
            raise RuntimeError(f"{name}: {done.stderr.decode()}\n{end}")

    def start(self) -> None:
        data, log = str(self.folder / "data"), str(self.folder / "log")
        options = f"-k {self.folder} -c listen_addresses=''"
        self.run("pg_ctl", "-D", data, "-l", log, "-w", "-t", "600", "-o", options, "start")

    def address(self) -> str:
        """Of a new, empty database."""
        name = f"store_{next(self._numbers)}"
        self.run("createdb", "-h", str(self.folder), "-U", "ostinato", name)
        return f"postgresql://ostinato@/{name}?host={self.folder}"

    def stop(self) -> None:
        """All of it at once, as a crash does."""
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")


def found() -> Path | None:
    """The newest initdb of this machine."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    here = shutil.which("initdb")
    return Path(here) if here else next(iter(installed), None)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Running while the context lasts. RuntimeError without the binaries."""
    if (initdb := found()) is None:
        raise RuntimeError("needs PostgreSQL: there is no initdb")
    user = None if os.geteuid() else "postgres"
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has 107 bytes at most
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    made = Cluster(folder, initdb.resolve().parent, user)
    try:
        made.run("initdb", "-D", str(folder / "data"), "-U", "ostinato", "-A", "trust", "-E", "UTF8")
        made.start()
        yield made
    finally:
        with suppress(RuntimeError):
            made.stop()
        shutil.rmtree(folder, ignore_errors=True)
