"""The bench of quantised rollout weights."""

from __future__ import annotations

from lab.settings import Clock
from lab.weights import WeightsBeside
from ostinato.model.native import Kernels
from ostinato.model.quantise import Weights


def test_the_benchmark_puts_them_side_by_side(kernels: Kernels) -> None:
    plan = WeightsBeside(
        model="asset:seed-moe",
        weights=(Weights.BF16, Weights.INT8),
        clock=Clock.CPU,
        batches=(1,),
        new_tokens=8,
        prompt=8,
        rounds=1,
    )
    result = plan.measure(lambda line: None)
    found = result["batches"][0]["weights"]
    assert found["bf16"]["speedup"] == 1 and found["int8"]["ms"] > 0
    assert result["bytes"]["int8"] < 0.6 * result["bytes"]["bf16"]
    assert plan.table(result).row_count == 1
