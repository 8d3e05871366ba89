"""The bench of quantised rollout weights."""

from __future__ import annotations

from pathlib import Path

from lab.decode import Plan
from lab.settings import Clock
from lab.weights import run as compare
from lab.weights import table
from ostinato.model.named import model_folder
from ostinato.model.native import Kernels
from ostinato.model.quantise import Weights


def test_the_benchmark_puts_them_side_by_side(kernels: Kernels) -> None:
    folder = Path(model_folder("asset:seed-moe"))
    plan = Plan(folder=folder, model="seed-moe", batches=(1,), new_tokens=8, prompt=8, rounds=1)
    result = compare(plan, (Weights.BF16, Weights.INT8), Clock.CPU, lambda line: None)
    found = result["batches"][0]["weights"]
    assert found["bf16"]["speedup"] == 1 and found["int8"]["ms"] > 0
    assert result["bytes"]["int8"] < 0.6 * result["bytes"]["bf16"]
    assert table(result).row_count == 1
