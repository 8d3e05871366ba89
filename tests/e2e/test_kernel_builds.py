"""The C++ kernels under other compilers and instruction sets, with the options that users build them with.

``tests/native`` tests them without Python, in an emulator where the processor is another.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato import isa
from ostinato.history.native import library as history
from ostinato.model.native import build as kernels

TESTS = Path(__file__).parent.parent / "native"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
QUIET = "-Wno-psabi"  # vectors wider than the processor's are passed in memory: within one library, no matter
LIMIT_S = 2400

# What cannot run everywhere has to compile: the options of every x86 set, by both compilers.
X86 = (
    ("-march=x86-64",),
    ("-march=x86-64-v4",),
    ("-march=x86-64-v4", "-mavx512bf16"),
    ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"),
    ("-march=sapphirerapids",),
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(LIMIT_S)]


def _needs(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)}: not on this machine (CONTRIBUTING.md names the packages)")


def _needs_x86() -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"needs an x86-64 processor, this is {platform.machine()}")


def _objects(compiler: str, options: tuple[str, ...], folder: Path, *, optimise: bool = True) -> list[str]:
    """Compile kernels and history, with their own options but for the instruction set."""
    jobs = []
    for code in (kernels, history):
        assert code.__file__ is not None
        flags = [flag for flag in code.FLAGS if optimise or flag != "-O3"]
        sources = [Path(code.__file__).parent / name for name in code.SOURCES]
        jobs += [(source, [*flags, QUIET, *options]) for source in sources]
    return _compile(compiler, jobs, folder)


def _compile(compiler: str, jobs: list[tuple[Path, list[str]]], folder: Path) -> list[str]:
    def one(job: tuple[Path, list[str]]) -> str:
        source, flags = job
        made = folder / f"{source.stem}.o"
        _run([compiler, *flags, "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, jobs))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def _check(compiler: str, options: tuple[str, ...], folder: Path, emulator: tuple[str, ...] = ()) -> None:
    """Build the tests with the kernels, and run them."""
    sources = sorted(TESTS.glob("*_test.cpp"))
    flags = ["-O1", "-Wall", "-Werror", "-std=c++17", "-fopenmp", QUIET]
    objects = _objects(compiler, options, folder) + _compile(compiler, [(s, flags) for s in sources], folder)
    program = str(folder / "kernels_test")
    _run([compiler, "-fopenmp", *objects, "-o", program])
    lines = _run([*emulator, program]).splitlines()
    print(*lines, sep="\n")
    assert lines[-1] == "0 failures"


@pytest.mark.parametrize("options", ["", "-march=x86-64-v3", "-march=x86-64"], ids=["here", "avx2", "sse"])
def test_kernels_by_gcc(options: str, tmp_path: Path) -> None:
    _needs("g++")
    if options:
        _needs_x86()
    _check("g++", (options,) if options else isa.flags(), tmp_path)


def test_kernels_by_clang(tmp_path: Path) -> None:
    _needs("clang++")
    (tmp_path / "empty.cpp").write_text("#include <omp.h>\nint main() { return 0; }\n")
    link = ["clang++", "-fopenmp", str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")]
    if subprocess.run(link, capture_output=True).returncode != 0:
        pytest.skip("clang++ has no OpenMP runtime (CONTRIBUTING.md names the packages)")
    _check("clang++", isa.flags(), tmp_path)


@pytest.mark.parametrize("options", ["-march=armv8-a", "-march=armv8.2-a+bf16"])
def test_kernels_on_aarch64(options: str, tmp_path: Path) -> None:
    _needs(CROSS, EMULATOR[0])
    _check(CROSS, (options,), tmp_path, EMULATOR)


@pytest.mark.parametrize("options", X86, ids=" ".join)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_kernels_compile_for_every_x86_set(compiler: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Intrinsics that a set lacks are errors only when code is made for it; -O1 finds them."""
    _needs(compiler)
    _needs_x86()
    _objects(compiler, ("-O1", *options), tmp_path, optimise=False)
