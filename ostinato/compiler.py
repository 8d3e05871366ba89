"""Compile C++ on first use and keep the library in the user's cache: for kernels and for history.

A library is named by a fingerprint of all that decides its code, so it is never stale. It is flushed to disk
before a rename makes it visible, and ends with a digest of itself, behind what a loader reads: a file that
was cut off or changed is compiled again, since a process that runs into the missing part ends with SIGBUS. A
file that another user could have written is never loaded. Without a compiler, or off Linux and macOS, there
is a ``BuildError`` and the caller uses the Python version."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato.files import cache_folder, find_distrust, sync
from ostinato.isa import processor

BUILD_LIMIT_S = 180.0  # limit of one call of the compiler
SYSTEMS = ("Linux", "Darwin")
# symbols of OpenMP are resolved at load time, in the runtime that torch has loaded
_LINK = {"Darwin": ("-Wl,-undefined,dynamic_lookup",)}
_POLL_S = 0.1
_SEAL = b"\0ostinato sha256"  # behind a library; then the digest of all that is before it
_DIGEST_BYTES = hashlib.sha256().digest_size


logger = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no native code here; the message is the reason, one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCode:
    """The sources and flags of a library; every ``*.h`` of the folder counts as included."""

    name: str  # of the library in the cache
    folder: Path
    sources: tuple[str, ...]
    flags: tuple[str, ...]


def build(code: NativeCode, warn: Callable[[str], None] = warnings.warn) -> Path:
    """The compiled library, built if this machine has not built this source before or if its file is damaged.
    ``warn`` gets a line about a damaged file, and about a folder that others could write to, whose libraries
    are deleted. Raises BuildError without Linux or macOS, a compiler or a private folder, and for a failed
    build."""
    if platform.system() not in SYSTEMS:
        raise BuildError(f"native {code.name} are built on Linux and macOS, this is {platform.system()}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++, c++ or clang++) was found; install one for faster sampling")
    try:
        library = cache_folder() / "native" / f"{code.name}-{_compute_fingerprint(code, compiler)}.so"
    except (OSError, ValueError) as error:  # no home, and no folder in its place
        raise BuildError(str(error)) from error
    if _find_flaw(library) is None:
        return library
    try:
        _make_private(library.parent, warn)
        with _lock_folder(library.parent, BUILD_LIMIT_S * (1 + len(code.sources))):
            if (flaw := _find_flaw(library)) is not None:  # else another process has built it meanwhile
                if flaw:
                    warn(f"native {code.name} are compiled again, since {library} {flaw}")
                logger.info(f"compiling native {code.name}, once on this machine: some 20 s")
                _compile(code, compiler, library)
    except OSError as error:
        raise BuildError(
            f"native {code.name} cannot be written to {library.parent} ({error}); set XDG_CACHE_HOME to a "
            "folder that can"
        ) from error
    return library


def find_compiler() -> str | None:
    """The path of the compiler, None without one: g++ first, since on Linux clang's OpenMP is not the one
    that torch brings."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def load(
    library: Path, kind: type[ctypes.CDLL] = ctypes.CDLL, mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL:
    """The loaded library, as ``kind``; a ``ctypes.PyDLL`` holds the GIL in calls. Raises BuildError."""
    try:
        return kind(str(library), mode)
    except OSError as error:
        raise BuildError(f"the library {library.name} does not load: {error}") from error


def _find_flaw(library: Path) -> str | None:
    """The reason why the file cannot be loaded; empty for a missing or unreadable file, None for a good
    one."""
    try:
        # refuses links, and does not wait on pipes
        descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return ""
    except OSError as error:
        return f"cannot be opened ({error.strerror})"
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        if reason := find_distrust(status, os.geteuid()) or find_distrust(
            library.parent.stat(), os.geteuid()
        ):
            return reason
        with open(descriptor, "rb", closefd=False) as file:
            return None if _is_sealed(file.read()) else "is damaged"
    finally:
        os.close(descriptor)


def _is_sealed(content: bytes) -> bool:
    """Whether ``content`` ends with the seal and the digest of what is before it."""
    code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return code.endswith(_SEAL) and hashlib.sha256(code.removesuffix(_SEAL)).digest() == digest


def _make_private(folder: Path, warn: Callable[[str], None]) -> None:
    """Make the folder if it is missing. If others could write to it, make it private, delete its libraries
    and warn. Raises OSError, and BuildError if it is another user's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if not (reason := find_distrust(status, os.geteuid())):
        return
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"{folder}, where native code is kept, {reason}; set XDG_CACHE_HOME to your own folder"
        )
    folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    for library in folder.glob("*.so"):
        library.unlink(missing_ok=True)
    warn(f"native code is compiled again, since {folder} {reason}; it is yours alone now")


@contextmanager
def _lock_folder(folder: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock on the folder, so that workers that start together compile once. After ``limit_s`` seconds
    the block runs without the lock, since a stopped process may hold it."""
    deadline = time.monotonic() + limit_s
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _compute_fingerprint(code: NativeCode, compiler: str) -> str:
    """Sixteen hex digits over source, flags, compiler and processor (``-march=native``)."""
    digest = hashlib.sha256(_SEAL)
    for file in (*(code.folder / name for name in code.sources), *sorted(code.folder.glob("*.h"))):
        digest.update(file.read_bytes())
    digest.update(" ".join(code.flags).encode())
    digest.update(_run_command([compiler, "--version"]).encode())
    lines = processor().splitlines()
    digest.update(
        "".join(line for line in lines if line.startswith(("flags", "model name", "Features"))).encode()
    )
    return digest.hexdigest()[:16]


def _compile(code: NativeCode, compiler: str, library: Path) -> None:
    """Build the library under a temporary name, sealed and flushed, and rename it. Raises OSError,
    BuildError."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [f"{folder}/{name}.o" for name in code.sources]
        commands = [
            [compiler, *code.flags, "-c", str(code.folder / name), "-o", object_file]
            for name, object_file in zip(code.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a user's first start waits for it
            list(pool.map(_run_command, commands))
        temporary_library = Path(folder) / library.name
        _run_command(
            [compiler, "-shared", *_LINK.get(platform.system(), ()), *objects, "-o", str(temporary_library)]
        )
        content = temporary_library.read_bytes()
        temporary_library.write_bytes(content + _SEAL + hashlib.sha256(content).digest())
        temporary_library.chmod(0o700)  # whatever the umask: what others may write is not loaded
        sync(temporary_library)
        os.replace(temporary_library, library)
    sync(library.parent)


def _run_command(command: list[str]) -> str:
    """The standard output of the command. Raises BuildError if it fails, is missing or takes too long."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_LIMIT_S:.0f} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode != 0:
        messages = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        # the last line is a caret or "compilation terminated"; the first error says what is wrong
        raise BuildError(
            f"{command[0]} failed: {next((line for line in messages if 'error' in line), messages[-1])}"
        )
    return result.stdout
