"""Atomic writes of whole files, and the user's cache.

A cache is untrusted: a full disk, a power cut, another version or another user may have left anything there.
A file that is not verified to be whole is made again.
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
    """Replace ``path`` by ``content``: text (UTF-8, lone surrogates escaped), bytes, or a function
    that writes the file at the path it is given. The folder is made if it is missing.

    Any failure (a full disk, an exception of the function) leaves the old file and no litter, and is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # not the name of what was to be moved there
        raise
    os.close(descriptor)
    temporary = Path(name)
    try:
        with name_file_in_errors(path):
            if isinstance(content, str):
                temporary.write_bytes(escape_surrogates(content).encode())
            elif isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                content(temporary)
            sync(temporary)
        temporary.chmod(0o666 & ~read_umask())  # mkstemp's 0600 would lock out a shared run folder
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError of the block that has no file name: a user has to free that disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def find_remedy(error: Exception) -> str:
    """Advice on a failed write, by the words of its error, as safetensors gives no error number."""
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


def read_umask() -> int:
    mask = os.umask(0)  # reading it is setting it
    os.umask(mask)
    return mask


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/ostinato`` or ``~/.cache/ostinato``; for a user id without a home, as containers have
    them, a private folder among the temporary files, which is made. Raises ValueError if others can change
    that folder."""
    if xdg_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg_cache) / "ostinato"
    try:
        return Path.home() / ".cache" / "ostinato"
    except RuntimeError:  # neither HOME nor an entry in the table of users
        pass
    user = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"ostinato-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if reason := find_distrust(folder.lstat(), user):
        raise ValueError(
            f"there is no home folder, and {folder} {reason}; set XDG_CACHE_HOME to your own folder"
        )
    return folder


def read_cached(file: Path, parse: Callable[[Any], T]) -> T | None:
    """The result of ``parse`` on the JSON in a file of the cache; None for a missing or unreadable file.

    ``parse`` raises ValueError, TypeError, LookupError, AttributeError or ArithmeticError for an invalid
    form, which also gives None, with a warning."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    try:
        return parse(parse_json(data))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning(f"{file} is damaged or of another version ({reason}) and is not used")
        return None


def find_distrust(facts: os.stat_result, user: int) -> str:
    """The reason why others than ``user`` and root can change a file or folder; empty if they cannot."""
    if facts.st_uid not in (user, 0):
        return f"belongs to user {facts.st_uid}, not to {user}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(facts.st_mode):o})"
    return ""
