"""Whole files, and the user's cache: what is written there by a rename, and what is believed of it.

A cache is untrusted: a full disk, a power cut, another version or another user may have left anything there.
What does not prove whole is made again.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ostinato.inputs import escape_surrogates, parse_json

T = TypeVar("T")
logger = logging.getLogger(__name__)


def atomic_write(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Replace ``path`` by ``content``: text (UTF-8; what is no character is escaped), bytes, or a function
    that writes the file at the path it is given.

    Any failure (a full disk, an exception of the function) leaves the old file and no litter, and is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # not the name of what was to be moved there
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        with naming(path):
            if isinstance(content, str):
                temporary.write_bytes(escape_surrogates(content).encode())
            elif isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                content(temporary)
            sync(temporary)
        temporary.chmod(0o666 & ~umask())  # mkstemp's 0600 would lock out a shared run folder
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The error of a write names no file by itself: add it, for the user who has to free the disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remedy(error: Exception) -> str:
    """What to do about a failed write. The safetensors library has the system's words alone."""
    refused = ("Permission denied", "Read-only file system", "Operation not permitted")
    is_refused = any(words in str(error) for words in refused)
    return "make the folder writable for this user" if is_refused else "free disk space"


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def umask() -> int:
    mask = os.umask(0)  # reading it is setting it
    os.umask(mask)
    return mask


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/ostinato`` or ``~/.cache/ostinato``; for a user id without a home, as containers have
    them, a folder of its own among the temporary files. Raises ValueError where that is another user's."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "ostinato"
    try:
        return Path.home() / ".cache" / "ostinato"
    except RuntimeError:  # neither HOME nor an entry in the table of users
        pass
    user = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"ostinato-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if why := distrusted(folder.lstat(), user):
        raise ValueError(
            f"there is no home folder, and {folder} {why}; set XDG_CACHE_HOME to your own folder"
        )
    return folder


def read_cached(file: Path, parse: Callable[[Any], T]) -> T | None:
    """What ``parse`` makes of the JSON in a file of the cache; None where there is none.

    ``parse`` raises ValueError, TypeError, LookupError, AttributeError or ArithmeticError for what is not of
    its form: that is None too, and a warning.
    """
    try:
        data = file.read_bytes()
    except OSError:
        return None
    try:
        return parse(parse_json(data))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        logger.warning(f"{file} is damaged or of another version ({why}) and is not used")
        return None


def distrusted(facts: os.stat_result, user: int) -> str:
    """Why a file or folder is not one that only ``user`` (or root) can change; empty where it is."""
    if facts.st_uid not in (user, 0):
        return f"belongs to user {facts.st_uid}, not to {user}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(facts.st_mode):o})"
    return ""
