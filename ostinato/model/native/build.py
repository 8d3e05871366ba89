"""Compile the kernels on first use.

The library is linked against no OpenMP runtime of its own: it resolves the one that torch has loaded, so both
share one pool of threads. Without a compiler, or off Linux and macOS, there is no library and the torch twin
serves.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

from ostinato.compiler import BuildError, NativeCode, build, load
from ostinato.isa import flags

SOURCES = ("gemm.cpp", "rows.cpp", "attention.cpp", "moe.cpp", "step.cpp", "sampler.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")


def library() -> Path:
    """The file of the compiled kernels, named by a fingerprint of all that decides their code; built if this
    machine has not built this source before. Raises BuildError."""
    options = (*_with_openmp(FLAGS), *flags())
    return build(NativeCode(name="kernels", folder=Path(__file__).parent, sources=SOURCES, flags=options))


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built where necessary. Raises BuildError."""
    built = library()
    load(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    try:
        return load(built)
    except BuildError as error:
        if "__kmpc" not in str(error):
            raise
        raise BuildError("clang++ calls an OpenMP that this torch does not bring; install g++") from error


def _with_openmp(options: tuple[str, ...], system: str = platform.system()) -> tuple[str, ...]:
    """Apple's clang has OpenMP behind its preprocessor only, and torch's package has the header there."""
    if system != "Darwin":
        return options
    before = tuple(option for option in options if option != "-fopenmp")
    return (*before, "-Xpreprocessor", "-fopenmp", f"-I{Path(torch.__path__[0]) / 'include'}")


def _openmp_runtime(system: str = platform.system()) -> Path:
    """The libgomp that this torch uses; on macOS its libomp."""
    package, name = Path(torch.__path__[0]), "libomp.dylib" if system == "Darwin" else "libgomp*.so*"
    for folder in (package / "lib", package.parent / "torch.libs"):
        found = sorted(folder.glob(name))
        if found:
            return found[0]
    raise BuildError(f"this build of torch does not bring {name}, whose threads the kernels share")
