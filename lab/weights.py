"""``ostinato bench decode --weights bf16,int8,fp8``: a pass of the sampler with each, side by side.

One pass is what the engine runs for ``batch`` sequences half way through their answers: all layers, head
and draw. The contenders take turns, round by round, and the ratio is the median over rounds of the first
one's time to another's, so that a machine that others use shifts both.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from lab.decode import Decode, Parts
from lab.harness import Result, Say, columns, option
from lab.settings import Clock, our_threads
from ostinato.model.hf import load_model
from ostinato.model.native import load
from ostinato.model.quantise import Weights, own_bytes, quantise

_PASSES = 5  # of each contender in a turn; their median counts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBeside(Decode):
    """The contenders take turns; the ratio is the median over rounds of the first one's time to another's."""

    dtype: str = option("bfloat16", "Of the model.")
    weights: tuple[Weights, ...] = option((Weights.BF16, Weights.INT8, Weights.FP8), "Kinds, with commas.")
    clock: Clock = option(Clock.WALL, "cpu is for one thread.")

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        kernels = load()
        decoder = load_model(self.folder, dtype=getattr(torch, self.dtype), device="cpu", fp32_head=True)
        decoders = {kind: quantise(decoder, kind) for kind in self.weights}
        rows, context = [], self.prompt + self.new_tokens
        for batch in self.batches:
            say(f"batch {batch}: {self.rounds} rounds of {', '.join(self.weights)}")
            passes = {kind: Parts(own, kernels, batch, context) for kind, own in decoders.items()}
            times: dict[Weights, list[float]] = {kind: [] for kind in self.weights}
            for number in range(self.rounds + 1):  # the first warms up
                for kind, parts in passes.items():
                    seconds = _pass(parts, self.clock)
                    if number:
                        times[kind].append(1e3 * seconds)
            rows.append({"batch": batch, "weights": {kind: _summary(times, kind) for kind in self.weights}})
        return {
            "model": self.model,
            "dtype": self.dtype,
            "clock": self.clock,
            "bytes": {kind: own_bytes(own) for kind, own in decoders.items()},
            "batches": rows,
        }

    @staticmethod
    def table(result: Result) -> Table:
        kinds = list(result["bytes"])
        title = f"{result['model']} {result['dtype']}, one pass of the sampler, medians ({result['clock']})"
        names = [f"{kind}, {1e-6 * result['bytes'][kind]:.0f} MB (ms)" for kind in kinds]
        rows = (
            [row["batch"]]
            + [f"{row['weights'][kind]['ms']:.2f}" for kind in kinds]
            + [f"{row['weights'][kind]['speedup']:.2f}" for kind in kinds[1:]]
            for row in result["batches"]
        )
        return columns(title, ["batch", *names, *(f"{kinds[0]} / {kind}" for kind in kinds[1:])], rows)


def _pass(parts: Parts, clock: Clock) -> float:
    """Seconds of one pass."""
    seconds = []
    for _ in range(_PASSES):
        start = clock.read()
        parts.run()
        seconds.append(clock.read() - start)
    return statistics.median(seconds)


def _summary(times: dict[Weights, list[float]], kind: Weights) -> dict[str, float]:
    first = next(iter(times.values()))
    ratios = [a / b for a, b in zip(first, times[kind], strict=True)]
    return {"ms": statistics.median(times[kind]), "speedup": statistics.median(ratios)}
