"""Compile the kernels on first use.

The library is linked against no OpenMP runtime of its own: it resolves the one that torch has loaded, so both
share one pool of threads. Without a compiler, or off Linux, there is no library and the torch twin serves.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ostinato.compiler import BuildError, NativeCode, build, load
from ostinato.isa import flags

__all__ = ["BuildError", "library", "load_library"]

SOURCES = ("gemm.cpp", "rows.cpp", "attention.cpp", "moe.cpp", "step.cpp", "sampler.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")


def library() -> Path:
    """The file of the compiled kernels, named by a fingerprint of all that decides their code; built if this
    machine has not built this source before. Raises BuildError."""
    options = (*FLAGS, *flags())
    return build(NativeCode(name="kernels", folder=Path(__file__).parent, sources=SOURCES, flags=options))


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built where necessary. Raises BuildError."""
    built = library()
    load(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    return load(built)


def _openmp_runtime() -> Path:
    """The libgomp that this torch uses."""
    package = Path(torch.__path__[0])
    for folder in (package / "lib", package.parent / "torch.libs"):
        found = sorted(folder.glob("libgomp*.so*"))
        if found:
            return found[0]
    raise BuildError("this build of torch does not bring libgomp, whose threads the kernels share")
