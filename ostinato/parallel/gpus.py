"""GPUs by name, with the figures of their data sheets.

GB is 10^9 bytes, links are counted in one direction, and FLOP/s are those of dense products, without
sparsity. A device's memory is what its driver shows, up to 7 % off the number in its name. Money,
network and host memory are on no data sheet: they are assumptions, printed with every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ostinato.parallel.memory import DType

GB = 1e9
TFLOPS = 1e12
# The next wider type, to which operands are widened where a device has no products of their own.
WIDER_DTYPES = {DType.INT4: DType.INT8, DType.INT8: DType.BF16, DType.FP8: DType.BF16, DType.BF16: DType.FP32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU. Rates are peaks of the data sheet, dense, per direction; bytes are bytes."""

    name: str
    memory: float  # bytes
    flops: Mapping[DType, float]  # FLOP/s by dtype of the operands
    hbm: float  # bytes/s
    link: float  # bytes/s from one GPU to its neighbours in the node (NVLink, else PCIe)
    nic: float  # bytes/s from one GPU to other nodes
    pcie: float  # bytes/s to host memory
    host: float  # bytes of the host's memory per GPU
    price: float  # money per GPU and hour: an assumption, printed wherever it is used


class Sheet(NamedTuple):
    """A row of a data sheet, in GB, TFLOP/s and GB/s, with the assumed figures beside it."""

    memory: float
    tf32: float
    bf16: float
    fp8: float  # 0: it has none
    hbm: float
    link: float  # NVLink, half of the figure that counts both directions; PCIe where there is none
    pcie: float
    nic: float  # assumed, per device
    host: float  # assumed, of the host's memory per device
    price: float  # assumed, money per device and hour: commonly let for in 2025, on demand


# H800 is an H100 with less NVLink; "cpu" is a core of a server, its "host" the memory that it has already.
SHEETS: Mapping[str, Sheet] = MappingProxyType(
    {
        "H800-80": Sheet(85.5, 494, 989, 1979, 3350, 200, 64, 50, 250, 2.5),
        "H100-80": Sheet(85.5, 494, 989, 1979, 3350, 450, 64, 50, 250, 2.5),
        "H200-141": Sheet(150, 494, 989, 1979, 4800, 450, 64, 50, 250, 3.2),
        "A100-80": Sheet(85, 156, 312, 0, 2039, 300, 32, 25, 125, 1.5),
        "A100-40": Sheet(42.3, 156, 312, 0, 1555, 300, 32, 25, 125, 1.1),
        "H20-96": Sheet(102, 74, 148, 296, 4000, 450, 64, 50, 250, 1.4),
        "L40S-48": Sheet(48, 183, 362, 733, 864, 32, 32, 12.5, 64, 0.9),
        "A6000-48": Sheet(51, 77.4, 154.8, 0, 768, 32, 32, 3.1, 64, 0.5),
        "A10-24": Sheet(23.7, 62.5, 125, 0, 600, 32, 32, 3.1, 32, 0.6),
        "L4-24": Sheet(23.7, 60, 121, 242, 300, 32, 32, 3.1, 32, 0.5),
        "RTX5090-32": Sheet(33.6, 104.8, 209.5, 419, 1792, 64, 64, 3.1, 64, 0.7),
        "RTX4090-24": Sheet(25.3, 82.6, 165, 330, 1008, 32, 32, 3.1, 32, 0.4),
        "RTX3090-24": Sheet(25.3, 35.6, 71, 0, 936, 32, 32, 3.1, 32, 0.25),
        "B200-192": Sheet(192, 1125, 2250, 4500, 8000, 900, 64, 50, 250, 5.0),
        "cpu": Sheet(8, 0.05, 0.05, 0, 8, 1.5, 8, 1, 8, 0.05),
    }
)


def find_gpu(name: str) -> Gpu:
    """The device called ``name``, or the only one whose name contains it ("4090"). Raises ValueError, which
    says how a device without a row is planned."""
    lower_name = name.lower()
    names = [key for key in SHEETS if lower_name in (key.lower(), key.lower().rpartition("-")[0])]
    names = names or [key for key in SHEETS if lower_name in key.lower()]
    if len(names) > 1:
        raise ValueError(f"gpus names {name!r}, which is {' or '.join(names)}; write one of them")
    if not names:
        raise ValueError(
            f"gpus names {name!r}, of which there is no data sheet here, only of {', '.join(SHEETS)}: "
            "write the one with the nearest speed, and the memory of yours with --gpu-memory GB"
        )
    sheet = SHEETS[names[0]]
    flops = {DType.FP32: sheet.tf32, DType.BF16: sheet.bf16} | ({DType.FP8: sheet.fp8} if sheet.fp8 else {})
    return Gpu(
        name=names[0],
        memory=sheet.memory * GB,
        flops=MappingProxyType({dtype: value * TFLOPS for dtype, value in flops.items()}),
        hbm=sheet.hbm * GB,
        link=sheet.link * GB,
        nic=sheet.nic * GB,
        pcie=sheet.pcie * GB,
        host=sheet.host * GB,
        price=sheet.price,
    )


def find_peak(gpu: Gpu, dtype: DType) -> float:
    """FLOP/s of products of ``dtype``, or of the next wider type that the device multiplies."""
    while dtype not in gpu.flops:
        dtype = WIDER_DTYPES[dtype]
    return gpu.flops[dtype]
