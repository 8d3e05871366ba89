"""Machines by name, with the figures of their data sheets, and how fast groups of their devices talk.

GB is 10^9 bytes, links are counted in one direction, and FLOP/s are those of dense products, without
sparsity. A device's memory is what its driver shows, up to 7 % more than the number in its name. Money,
network and host memory are on no data sheet: they are assumptions, printed with every plan, and all of them
can be given (``replace``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ostinato.apps.plan.problem import GB, Cluster, DType, Gpu

# also in README.md and docs/index.md
ON_GPUS = "Nothing of Ostinato has run on a GPU yet: it is tested on CPUs, and plans go by data sheets"
TFLOPS = 1e12
PER_NODE = 8
# Operands that a device has no products for are widened: to what comes next here.
WIDER = {DType.INT4: DType.INT8, DType.INT8: DType.BF16, DType.FP8: DType.BF16, DType.BF16: DType.FP32}


class Sheet(NamedTuple):
    """A row of a data sheet, in GB, TFLOP/s and GB/s, and beside it what is assumed."""

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
        "H20-96": Sheet(102, 74, 148, 296, 4000, 450, 64, 50, 250, 1.4),
        "L40S-48": Sheet(48, 183, 362, 733, 864, 32, 32, 12.5, 64, 0.9),
        "RTX4090-24": Sheet(25.3, 82.6, 165, 330, 1008, 32, 32, 3.1, 32, 0.4),
        "B200-192": Sheet(192, 1125, 2250, 4500, 8000, 900, 64, 50, 250, 5.0),
        "cpu": Sheet(8, 0.05, 0.05, 0, 8, 1.5, 8, 1, 8, 0.05),
    }
)


NEAREST = {  # of those above, to devices that have no row
    "a100-40": "A100-80",
    "v100": "A100-80",
    "gh200": "H200-141",
    "mi300": "H200-141",
    "mi325": "B200-192",
    "a6000": "L40S-48",
    "5090": "RTX4090-24",
    "3090": "RTX4090-24",
}


def gpu_named(name: str) -> Gpu:
    """The device called ``name``, or that only one device has in its name: "4090". Raises ValueError."""
    lowered = name.lower()
    found = [key for key in SHEETS if lowered in (key.lower(), key.lower().rpartition("-")[0])]
    found = found or [key for key in SHEETS if lowered in key.lower()]
    if len(found) != 1:
        near = next((known for part, known in NEAREST.items() if part in lowered), "")
        fix = f"the nearest that is known is {near}, beside" if near else "known are"
        others = (key for key in SHEETS if key != near)
        raise ValueError(
            f"gpus names {name!r}, of which there is no data sheet here; {fix} {', '.join(others)}"
        )
    sheet = SHEETS[found[0]]
    flops = {DType.FP32: sheet.tf32, DType.BF16: sheet.bf16} | ({DType.FP8: sheet.fp8} if sheet.fp8 else {})
    return Gpu(
        name=found[0],
        memory=sheet.memory * GB,
        flops=MappingProxyType({dtype: value * TFLOPS for dtype, value in flops.items()}),
        hbm=sheet.hbm * GB,
        link=sheet.link * GB,
        nic=sheet.nic * GB,
        pcie=sheet.pcie * GB,
        price=sheet.price,
    )


def parse_cluster(text: str) -> Cluster:
    """ "64xH800-80" (nodes of 8, or a single one of fewer) or "4x8xH100-80" (nodes x devices in each).

    Raises ValueError for a device that is not known and for numbers that make no whole nodes.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9][\w-]*)", text.strip())
    if found is None:
        raise ValueError(f"gpus is {text!r}; write a number and a device, like 64xH800-80 or 8x8xH100-80")
    count, gpu = int(found[2]), gpu_named(found[3])
    nodes, per_node = (int(found[1]), count) if found[1] else _nodes(text, count, gpu)
    if nodes < 1 or per_node < 1:
        raise ValueError(f"gpus is {text!r}; use at least 1 device")
    return Cluster(gpu=gpu, nodes=nodes, per_node=per_node, host_memory=SHEETS[gpu.name].host * GB * per_node)


def _nodes(text: str, count: int, gpu: Gpu) -> tuple[int, int]:
    """(nodes, devices in each) of ``count`` devices."""
    if count <= PER_NODE or gpu.name == "cpu":
        return 1, count
    if count % PER_NODE:
        raise ValueError(
            f"gpus is {text!r}, which is no whole number of nodes of {PER_NODE}; write nodes x devices, "
            f"like 2x{(count + 1) // 2}x{gpu.name}"
        )
    return count // PER_NODE, PER_NODE


def peak(gpu: Gpu, dtype: DType) -> float:
    """FLOP/s of products of ``dtype``, or of the next wider type that the device multiplies."""
    while dtype not in gpu.flops:
        dtype = WIDER[dtype]
    return gpu.flops[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """``ranks`` devices, every ``stride``-th one: a group of a layout on its cluster. Ranks fill node by
    node."""

    ranks: int
    stride: int

    def per_node(self, cluster: Cluster) -> int:
        """How many of them share a node."""
        return max(1, min(self.ranks, cluster.per_node // self.stride))

    def bandwidth(self, cluster: Cluster) -> float:
        """Bytes/s that one device sends in a ring, all groups at once. Between nodes a ring is laid through
        every network port that its members have, so it is as fast as all of them together (NCCL)."""
        here = self.per_node(cluster)
        return cluster.gpu.link if here == self.ranks else min(cluster.gpu.link, here * cluster.gpu.nic)

    def exchange_seconds(self, cluster: Cluster, sent: float) -> float:
        """Of an all-to-all in which every device sends ``sent`` bytes to the others, alike to each: its own
        port carries what leaves the node, while the links carry the rest."""
        if self.ranks == 1:
            return 0.0
        away = sent * (self.ranks - self.per_node(cluster)) / (self.ranks - 1)
        return max(away / cluster.gpu.nic, (sent - away) / cluster.gpu.link)
