"""The instruction set of the arithmetic, and a developer's cap on it: OSTINATO_MAX_ISA.

The cap makes a processor compute as a lesser one does, so that every machine can test and time lesser sets.
It has an effect only on x86-64, and below the processor's own set.

    apply()    before torch is imported: the variables that cap torch's own libraries, for children too
    flags()    what the kernels are compiled with
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "OSTINATO_MAX_ISA"
NATIVE = "native"  # no cap

# By rank: required features in /proc/cpuinfo; values that cap torch's own kernels, oneDNN and MKL.
_FEATURES = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
_CAP_VALUES = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E2"),
}
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_NAMES = {"avx2": "AVX2 + FMA", "avx512": "AVX-512", "avx512_bf16": "AVX-512 with bf16", "amx": "AMX"}
# extensions of AVX-512 that a processor with bf16 products may also have
_EXTENSIONS = ("avx512_bf16", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg")


def apply(environ: MutableMapping[str, str] = os.environ, cpuinfo: str | None = None) -> None:
    """Cap torch, oneDNN and MKL as OSTINATO_MAX_ISA says, in this process and its children. A variable that
    the user has set stays. Call it before torch is imported; without a cap nothing is changed.

    Raises ValueError for a value that is none of the known ones.
    """
    cap = effective_cap(environ, cpuinfo)
    if cap != NATIVE:
        for variable, value in zip(_VARIABLES, _CAP_VALUES[cap], strict=True):
            environ.setdefault(variable, value)


def effective_cap(environ: Mapping[str, str] = os.environ, cpuinfo: str | None = None) -> str:
    """The effective cap: a key of the sets above, or "native". Raises ValueError as ``apply`` does."""
    cap = environ.get(VARIABLE, "") or NATIVE
    if cap != NATIVE and cap not in _CAP_VALUES:
        raise ValueError(f"{VARIABLE} is {cap!r}; use one of {', '.join((*_CAP_VALUES, NATIVE))}")
    ranks = list(_FEATURES)
    highest_set = _find_highest_set(_read_features(cpuinfo))
    return cap if cap != NATIVE and highest_set and ranks.index(cap) < ranks.index(highest_set) else NATIVE


def flags(environ: Mapping[str, str] = os.environ, cpuinfo: str | None = None) -> tuple[str, ...]:
    """Options of gcc and clang that choose the instruction set of the kernels."""
    cap = effective_cap(environ, cpuinfo)
    if cap == NATIVE:
        return (
            "-mcpu=native" if _is_arm(_read_features(cpuinfo)) else "-march=native",
        )  # clang on Arm: no -march
    if cap == "avx2":
        return ("-march=x86-64-v3",)
    features = _read_features(cpuinfo)
    extensions = [name for name in _EXTENSIONS if name in features] if cap == "avx512_bf16" else []
    return ("-march=x86-64-v4", *(f"-m{name.replace('_', '')}" for name in extensions))


def instruction_set(environ: Mapping[str, str] = os.environ, cpuinfo: str | None = None) -> str:
    """The name of the instruction set of the kernels, e.g. "AVX2 + FMA" or "NEON with bf16"."""
    features = _read_features(cpuinfo)
    if _is_arm(features):
        return "NEON with bf16" if "bf16" in features else "NEON"
    cap = effective_cap(environ, cpuinfo)
    name = _find_highest_set(features) if cap == NATIVE else cap
    return _NAMES[name] if name else f"{platform.machine()} without AVX2"


def _find_highest_set(features: set[str]) -> str:
    """The highest set with all features present, its own and those of lower sets; "" for none."""
    highest_set = ""
    for name, features_of_set in _FEATURES.items():
        if not features_of_set <= features:
            break
        highest_set = name
    return highest_set


def _is_arm(features: set[str]) -> bool:
    return "asimd" in features or (not features and platform.machine() in ("arm64", "aarch64"))


def _read_features(cpuinfo: str | None) -> set[str]:
    """Names of the features in the text of /proc/cpuinfo (of this machine if None); empty without such a
    line."""
    for line in (processor() if cpuinfo is None else cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def processor() -> str:
    """The text of /proc/cpuinfo; on macOS the same two lines made from sysctl; otherwise empty."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return parse_sysctl(_call_sysctl()) if platform.system() == "Darwin" else ""


def _call_sysctl() -> str:
    """The output of macOS's sysctl on the processor; empty if it fails."""
    command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_sysctl(text: str) -> str:
    """Lines "model name" and "flags" as in /proc/cpuinfo, from sysctl's text: hw.optional.arm.FEAT_BF16 is
    "bf16"."""
    lines = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in lines}
    features = [values.get(f"machdep.cpu.{key}", "").lower() for key in ("features", "leaf7_features")]
    prefix = "hw.optional.arm.FEAT_"
    features += [
        key.removeprefix(prefix).lower()
        for key, value in values.items()
        if key.startswith(prefix) and value == "1"
    ]
    if "hw.optional.neon" in values:
        features.append("asimd")
    return f"model name : {values.get('machdep.cpu.brand_string', '')}\nflags : {' '.join(features)}\n"
