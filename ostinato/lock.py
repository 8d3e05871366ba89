"""A lock by which one process at a time writes a run folder; the kernel releases it when its holder is
killed.

    RUN/.lock    flock(2), exclusive, while its holder lives; its content names the holder

Readers (report, eval, export) take no lock: whole files are replaced, logs are appended to.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

LOCK = ".lock"
logger = logging.getLogger(__name__)


class Locked(ValueError):
    """Another process writes the folder. The message is one sentence with folder, holder and fix."""


@contextmanager
def hold_lock(folder: Path, noun: str = "run folder", other: str = "") -> Iterator[None]:
    """Hold the lock of ``folder``, which exists, and write this process into its file while the block runs;
    then the file is emptied. Child processes do not inherit the lock. ``noun``: what the folder is,
    ``other``: how to name another one, both for errors.

    Raises Locked at once if another process holds the lock, and OSError if the file cannot be written. A file
    system without locks gives a warning.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(
            f"{noun} {folder} cannot be written ({error.strerror}); make it so for this user"
        ) from error
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = f", or name another: {other}" if other else ""
            raise Locked(f"{noun} {folder} is in use by {_describe_holder(file.read())}{fix}") from None
        except OSError as error:  # of some network file systems
            logger.warning(f"{path} cannot be locked ({error}): another process may write there too")
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": (datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")),
        }
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        try:
            yield
        finally:
            file.truncate(0)


def is_abandoned(folder: Path) -> bool:
    """Whether the file names a holder. If no process holds the lock, that one ended without releasing it."""
    try:
        return (folder / LOCK).stat().st_size > 0
    except OSError:
        return False


def is_held(folder: Path) -> bool | None:
    """Whether a process of this machine holds the lock; None if the lock names no process of this machine."""
    try:
        holder = json.loads((folder / LOCK).read_bytes())
        if holder["host"] != socket.gethostname():
            return None
        os.kill(int(holder["pid"]), 0)
    except PermissionError:
        return True  # of another user
    except ProcessLookupError:
        return False
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return True


def _describe_holder(content: bytes) -> str:
    """The holder that the content of a lock names, and how to end it."""
    try:
        holder = json.loads(content)
        name = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        fix = f"wait until it has ended, or end it there (kill {holder['pid']})"
    except (ValueError, TypeError, KeyError):  # it has only just locked the file
        name, fix = "another process", "wait until it has ended, or end it"
    return f"{name}; {fix}"
