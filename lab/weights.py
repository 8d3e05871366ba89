"""``ostinato bench decode --weights bf16,int8,fp8``: a pass of the sampler with each, side by side.

``--stored bfloat16,int8 --dtype float32``: bases as ``model.storage`` has them, instead of copies.

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
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.native import load_kernels
from ostinato.model.quantise import Weights, count_own_bytes, quantise

_PASSES = 5  # of each contender in a turn; their median counts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBeside(Decode):
    """The contenders take turns; the ratio is the median over rounds of the first one's time to another's."""

    dtype: str = option("bfloat16", "Of the model.")
    weights: tuple[Weights, ...] = option((Weights.BF16, Weights.INT8, Weights.FP8), "Kinds, with commas.")
    stored: tuple[str, ...] = option((), "Of model.storage, with commas, instead of copies.")
    clock: Clock = option(Clock.WALL, "cpu is for one thread.")

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        kernels = load_kernels()
        decoders = self._decoders()
        rows, context = [], self.prompt + self.new_tokens
        for batch in self.batches:
            say(f"batch {batch}: {self.rounds} rounds of {', '.join(decoders)}")
            passes = {kind: Parts(own, kernels, batch, context) for kind, own in decoders.items()}
            times: dict[str, list[float]] = {kind: [] for kind in decoders}
            for number in range(self.rounds + 1):  # the first warms up
                for kind, parts in passes.items():
                    seconds = _pass(parts, self.clock)
                    if number:
                        times[kind].append(1e3 * seconds)
            found = {kind: _summary(times, kind, batch) for kind in decoders}
            rows.append({"batch": batch, "weights": found})
        return {
            "model": self.model,
            "dtype": self.dtype,
            "clock": self.clock,
            "bytes": {kind: count_own_bytes(own) for kind, own in decoders.items()},
            "batches": rows,
        }

    def _decoders(self) -> dict[str, Decoder]:
        dtype = getattr(torch, self.dtype)
        if self.stored:
            kinds = {kind: None if kind == "same" else getattr(torch, kind) for kind in self.stored}
            return {kind: load_model(self.folder, dtype, storage=own) for kind, own in kinds.items()}
        decoder = load_model(self.folder, dtype=dtype, device="cpu", fp32_head=True)
        return {kind: quantise(decoder, kind) for kind in self.weights}

    @staticmethod
    def table(result: Result) -> Table:
        kinds = list(result["bytes"])
        title = f"{result['model']} {result['dtype']}, one pass of the sampler, medians ({result['clock']})"
        names = [f"{kind}, {1e-6 * result['bytes'][kind]:.0f} MB (ms)" for kind in kinds]
        rows = (
            [row["batch"]]
            + [f"{row['weights'][kind]['ms']:.2f}" for kind in kinds]
            + [f"{row['weights'][kind]['speedup']:.2f}" for kind in kinds[1:]]
            + [f"{row['weights'][kind]['tokens_per_s']:.1f}" for kind in kinds]
            for row in result["batches"]
        )
        ratios = [f"{kinds[0]} / {kind}" for kind in kinds[1:]]
        return columns(title, ["batch", *names, *ratios, *(f"{kind}, tokens/s" for kind in kinds)], rows)


def _pass(parts: Parts, clock: Clock) -> float:
    """Seconds of one pass."""
    seconds = []
    for _ in range(_PASSES):
        start = clock.read()
        parts.run()
        seconds.append(clock.read() - start)
    return statistics.median(seconds)


def _summary(times: dict[str, list[float]], kind: str, batch: int) -> dict[str, float]:
    first = next(iter(times.values()))
    ratios = [a / b for a, b in zip(first, times[kind], strict=True)]
    ms = statistics.median(times[kind])
    return {"ms": ms, "speedup": statistics.median(ratios), "tokens_per_s": 1e3 * batch / ms}
