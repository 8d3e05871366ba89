"""The developer's cap on the instruction set, on processors that are only text."""

from __future__ import annotations

import pytest

from ostinato.isa import apply, flags, instruction_set, parse_sysctl

AVX2 = "flags : fpu sse2 avx avx2 fma f16c bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
APPLE = "machdep.cpu.brand_string: Apple M2\nhw.optional.neon: 1\n"
AMX = f"{BF16} avx512vbmi amx_tile amx_bf16"


@pytest.mark.parametrize(
    ("cpuinfo", "cap", "name", "options"),
    [
        (AVX2, "", "AVX2 + FMA", ("-march=native",)),
        (AVX2, "avx512", "AVX2 + FMA", ("-march=native",)),
        (AVX512, "avx2", "AVX2 + FMA", ("-march=x86-64-v3",)),
        (AVX512, "avx512", "AVX-512", ("-march=native",)),
        (BF16, "avx512", "AVX-512", ("-march=x86-64-v4",)),
        (AMX, "native", "AMX", ("-march=native",)),
        (
            AMX,
            "avx512_bf16",
            "AVX-512 with bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"),
        ),
        ("flags : fpu sse2", "avx2", None, ("-march=native",)),
        ("Features : fp asimd bf16", "avx2", "NEON with bf16", ("-mcpu=native",)),
        ("Features : fp asimd", "", "NEON", ("-mcpu=native",)),
    ],
)
def test_the_kernels_are_built_for_the_cap_or_for_what_there_is(
    cpuinfo: str, cap: str, name: str | None, options: tuple[str, ...]
) -> None:
    environ = {"OSTINATO_MAX_ISA": cap}
    assert flags(environ, cpuinfo) == options
    assert name is None or instruction_set(environ, cpuinfo) == name


def test_torch_is_capped_too_but_never_against_the_user() -> None:
    environ = {"OSTINATO_MAX_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    apply(environ, AMX)
    assert environ["ATEN_CPU_CAPABILITY"] == "avx2" and environ["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
    assert environ["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    untouched = {"OSTINATO_MAX_ISA": "avx512"}
    apply(untouched, AVX2)
    assert untouched == {"OSTINATO_MAX_ISA": "avx512"}, "a cap above the processor is none"


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (
            "machdep.cpu.brand_string: Apple M2\nhw.optional.neon: 1\nhw.optional.arm.FEAT_BF16: 1\n",
            "NEON with bf16",
        ),
        ("machdep.cpu.brand_string: Apple M1\nhw.optional.neon: 1\nhw.optional.arm.FEAT_BF16: 0\n", "NEON"),
        (
            "machdep.cpu.brand_string: Intel(R) Core(TM) i7\nmachdep.cpu.features: FPU SSE2 FMA AVX1.0 F16C\n"
            "machdep.cpu.leaf7_features: BMI1 AVX2 BMI2\n",
            "AVX2 + FMA",
        ),
    ],
)
def test_a_mac_names_its_processor_by_sysctl(output: str, name: str) -> None:
    """Written after Apple's documentation; it was never run on a Mac."""
    assert instruction_set({}, parse_sysctl(output)) == name
    assert parse_sysctl(output).splitlines()[0].split(" : ")[1] in output
