"""Compile the kernels on first use.

The library is linked against no OpenMP runtime of its own: it uses the runtime that torch has loaded, so that
both share a pool of threads. Without a compiler, or off Linux and macOS, there is no library, and the torch
twin is used.
"""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from pathlib import Path

import torch

from ostinato.compiler import BuildError, NativeCode, build, load
from ostinato.isa import flags

SOURCES = ("gemm.cpp", "rows.cpp", "attention.cpp", "moe.cpp", "step.cpp", "sampler.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")


def build_kernels() -> Path:
    """Return the file of the compiled kernels, whose name has a fingerprint of everything that determines
    their code. It is built if this machine has not built it before. Raises BuildError."""
    options = (*_adapt_openmp(FLAGS), *flags())
    return build(NativeCode(name="kernels", folder=Path(__file__).parent, sources=SOURCES, flags=options))


def load_library() -> ctypes.CDLL:
    """Load the compiled kernels, and torch's OpenMP before them; build them if necessary. Raises
    BuildError."""
    path = build_kernels()
    load(_find_openmp(), mode=ctypes.RTLD_GLOBAL)
    try:
        return load(path)
    except BuildError as error:
        if "__kmpc" not in str(error):
            raise
        raise BuildError("clang++ calls an OpenMP that this torch does not bring; install g++") from error


def compute_alone() -> None:
    """Let the calling thread compute without OpenMP workers from now on, as far as torch brings its OpenMP;
    other threads keep theirs."""
    torch.get_num_threads()  # here torch sets the number of a new thread, which would undo the next line
    with suppress(BuildError):
        ctypes.CDLL(str(_find_openmp())).omp_set_num_threads(1)


def _adapt_openmp(options: tuple[str, ...], system: str = platform.system()) -> tuple[str, ...]:
    """Adapt the options to Apple's clang, which takes OpenMP by its preprocessor only; torch has the
    header."""
    if system != "Darwin":
        return options
    other_options = tuple(option for option in options if option != "-fopenmp")
    return (*other_options, "-Xpreprocessor", "-fopenmp", f"-I{Path(torch.__path__[0]) / 'include'}")


def _find_openmp(system: str = platform.system()) -> Path:
    """Return the libgomp that this torch uses; on macOS its libomp. Raises BuildError if there is none."""
    package, name = Path(torch.__path__[0]), "libomp.dylib" if system == "Darwin" else "libgomp*.so*"
    for folder in (package / "lib", package.parent / "torch.libs"):
        paths = sorted(folder.glob(name))
        if paths:
            return paths[0]
    raise BuildError(f"this build of torch does not bring {name}, whose threads the kernels share")
