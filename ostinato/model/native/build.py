"""Compile the kernels on first use and keep the library in the user's cache.

The library is linked against no OpenMP runtime of its own: it resolves the one that torch has loaded, so both
share one pool of threads. Without a compiler, or off Linux, there is no library and the torch twin serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = ("gemm.cpp", "kernels.cpp", "moe.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")
BUILD_LIMIT_S = 180.0


class BuildError(Exception):
    """One sentence: why there are no native kernels here."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built if this machine has not built this source before. Raises BuildError."""
    if platform.system() != "Linux":
        raise BuildError(f"native kernels are built on Linux only, this is {platform.system()}")
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) was found; install one for faster sampling")
    runtime = _openmp_runtime()
    library = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if not os.path.exists(library):  # unlike Path.exists, False in a folder that may not be entered
        _compile(compiler, library)
    try:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled kernels do not load: {error}") from error


def _openmp_runtime() -> Path:
    """The libgomp that this torch uses."""
    package = Path(torch.__path__[0])
    for folder in (package / "lib", package.parent / "torch.libs"):
        found = sorted(folder.glob("libgomp*.so*"))
        if found:
            return found[0]
    raise BuildError("this build of torch does not bring libgomp, whose threads the kernels share")


def _cache_folder() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user id without an entry, in a container
        raise BuildError("there is no home folder to keep the kernels in; set XDG_CACHE_HOME") from error
    return Path(base) / "ostinato" / "native"


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the processor (``-march=native``)."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for name in (*SOURCES, "common.h"):
        digest.update((folder / name).read_bytes())
    digest.update(" ".join(FLAGS).encode())
    digest.update(_run([compiler, "--version"]).encode())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    digest.update(
        "".join(line for line in lines if line.startswith(("flags", "model name", "Features"))).encode()
    )
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: Path) -> None:
    """Build into a temporary name and rename, so that two processes never see half a library."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            objects = []
            for name in SOURCES:
                objects.append(f"{folder}/{name}.o")
                source = str(Path(__file__).parent / name)
                _run([compiler, *FLAGS, "-c", source, "-o", objects[-1]])
            built = f"{folder}/kernels.so"
            _run([compiler, "-shared", *objects, "-o", built])
            os.replace(built, library)
    except OSError as error:
        raise BuildError(f"the kernels cannot be written to {library.parent}: {error}") from error


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
