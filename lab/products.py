"""``ostinato bench products``: matrix products of our kernels beside torch's, x [rows, K] w [N, K]^T.

Shapes of SmolLM2-135M (attention, MLP, head) and of an expert of seed-moe, round by round: torch in fp32
(``F.linear``), ours in fp32, ours in fp32 on weights stored in bf16. Our C functions are called without their
Python wrapper, as the fused step calls them.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from lab.harness import Bench, Result, Say, option
from lab.settings import our_threads
from ostinato.model.native.build import load_library

SHAPES = {  # [N, K]
    "576 x 576": (576, 576),
    "1536 x 576": (1536, 576),
    "49152 x 576": (49152, 576),
    "expert up 256 x 256": (256, 256),
    "expert down 256 x 128": (256, 128),
}
_CALLS_S = 0.02  # of one measurement, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(Bench):
    rows: tuple[int, ...] = (1, 4, 16, 64, 256)
    rounds: int = option(7, "Of all contenders in turn.")

    def quick(self) -> Products:
        return replace(self, rounds=2)

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        library, found = load_library(), []
        for name, (columns, depth) in SHAPES.items():
            for rows in self.rows:
                found.append(
                    {"shape": name, "rows": rows} | _measure(library, rows, columns, depth, self.rounds)
                )
            say(f"{name}: done")
        return {"products": found}

    @staticmethod
    def table(result: Result) -> Table:
        out = Table(
            "w [N, K]", "rows", "torch fp32", "ours fp32", "ours, bf16 storage", title="products, GFLOP/s"
        )
        for row in result["products"]:
            ours = (
                f"{row[f'{name}_gflops']:.1f} ({row[f'{name}_over_torch']:.2f}x)"
                for name in ("native", "bf16_storage")
            )
            out.add_row(row["shape"], str(row["rows"]), f"{row['torch_gflops']:.1f}", *ours)
        return out


@torch.no_grad()
def _measure(library: ctypes.CDLL, rows: int, columns: int, depth: int, rounds: int) -> dict[str, float]:
    x, w = torch.randn(rows, depth), torch.randn(columns, depth)
    narrow, y = w.bfloat16(), torch.empty(rows, columns)
    contenders = {
        "torch": lambda: F.linear(x, w),
        "native": _call(library.nt_f32, x, w, y),
        "bf16_storage": _call(library.nt_f32_bf16, x, narrow, y),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first warms up
        for name, call in contenders.items():
            took = _seconds(call)
            if number:
                seconds[name].append(took)
    flop = 2.0 * rows * columns * depth
    speeds = {f"{name}_gflops": flop / statistics.median(each) / 1e9 for name, each in seconds.items()}
    ratios = {
        f"{name}_over_torch": statistics.median(
            base / own for base, own in zip(seconds["torch"], seconds[name], strict=True)
        )
        for name in ("native", "bf16_storage")
    }
    return speeds | ratios


def _call(function: Any, x: Tensor, w: Tensor, y: Tensor) -> Callable[[], None]:
    """y = x w^T by a C function; the tensors must outlive the call."""
    (rows, depth), columns = x.shape, w.shape[0]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, w, y)]
    sizes = [ctypes.c_long(size) for size in (depth, columns, rows, columns, depth)]
    arguments = (pointers[0], sizes[0], pointers[1], pointers[2], sizes[1], None, *sizes[2:])

    def call() -> None:
        function(*arguments)

    return call


def _seconds(call: Callable[[], object]) -> float:
    """Of one call, over as many as fill ``_CALLS_S``."""
    calls, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < _CALLS_S:
        call()
        calls += 1
    return took / calls
