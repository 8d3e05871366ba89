"""Compile C++ on first use and keep the library in the user's cache: for kernels and for history.

A library is named by a fingerprint of all that decides its code, so it is never stale, and it appears by a
rename, so that two processes never see half of it. Without a compiler, or off Linux, there is a
``BuildError`` and whoever asked uses the plain twin.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

BUILD_LIMIT_S = 180.0


class BuildError(Exception):
    """One sentence: why there is no native code here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCode:
    """What a library is built from; every ``*.h`` of the folder counts as included."""

    name: str  # of the library in the cache
    folder: Path
    sources: tuple[str, ...]
    flags: tuple[str, ...]


def build(code: NativeCode) -> Path:
    """The compiled library, built if this machine has not built this source before. Raises BuildError."""
    if platform.system() != "Linux":
        raise BuildError(f"native {code.name} are built on Linux only, this is {platform.system()}")
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) was found; install one for faster sampling")
    library = _cache_folder() / f"{code.name}-{_fingerprint(code, compiler)}.so"
    if not os.path.exists(library):  # unlike Path.exists, False in a folder that may not be entered
        _compile(code, compiler, library)
    return library


def load(
    library: Path, kind: type[ctypes.CDLL] = ctypes.CDLL, mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL:
    """The library as ctypes sees it; a ``ctypes.PyDLL`` holds the GIL in calls. Raises BuildError."""
    try:
        return kind(str(library), mode)
    except OSError as error:
        raise BuildError(f"the library {library.name} does not load: {error}") from error


def _cache_folder() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user id without an entry, in a container
        raise BuildError("there is no home folder to keep native code in; set XDG_CACHE_HOME") from error
    return Path(base) / "ostinato" / "native"


def _fingerprint(code: NativeCode, compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the processor (``-march=native``)."""
    digest = hashlib.sha256()
    for file in (*(code.folder / name for name in code.sources), *sorted(code.folder.glob("*.h"))):
        digest.update(file.read_bytes())
    digest.update(" ".join(code.flags).encode())
    digest.update(_run([compiler, "--version"]).encode())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    digest.update(
        "".join(line for line in lines if line.startswith(("flags", "model name", "Features"))).encode()
    )
    return digest.hexdigest()[:16]


def _compile(code: NativeCode, compiler: str, library: Path) -> None:
    """Build into a temporary name and rename, so that two processes never see half a library."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            objects = []
            for name in code.sources:
                objects.append(f"{folder}/{name}.o")
                _run([compiler, *code.flags, "-c", str(code.folder / name), "-o", objects[-1]])
            built = f"{folder}/{library.name}"
            _run([compiler, "-shared", *objects, "-o", built])
            os.replace(built, library)
    except OSError as error:
        raise BuildError(f"native {code.name} cannot be written to {library.parent}: {error}") from error


def _run(command: list[str]) -> str:
    """What the command says on standard output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_LIMIT_S:.0f} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        # the last line is a caret or "compilation terminated"; the first error says what is wrong
        raise BuildError(f"{command[0]} failed: {next((line for line in said if 'error' in line), said[-1])}")
    return done.stdout
