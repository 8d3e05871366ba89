"""``ostinato bench decode``: one decode step by part, against the roofline of its matrix products.

The engine decodes ``batch`` sequences; steps in which all of them decode and nothing else happens are timed.
Interleaved with them, round by round: the forward and the draw by themselves, with the layers fused into one
call and op by op, and the matrix products alone (every weight once, by whichever of torch and ours is
faster).
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.harness import ModelBench, Result, Say, columns, option
from lab.rollout_worker import roofline_s
from lab.settings import native_kernels, our_threads
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import KVStore
from ostinato.engine.runner import Runner
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.native import Kernels
from ostinato.types import Request, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(ModelBench):
    batches: tuple[int, ...] = option((1, 8, 64), "Batch sizes, with commas.", "batch")
    new_tokens: int = 64
    prompt: int = 32
    rounds: int = 5

    def quick(self) -> Decode:
        return replace(self, rounds=2)

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        kernels = native_kernels()
        decoder = load_model(self.folder, dtype=getattr(torch, self.dtype), device="cpu", fp32_head=True)
        rows = []
        for batch in self.batches:
            say(f"batch {batch}: {self.rounds} rounds of {self.new_tokens} tokens")
            rows.append(_batch(self, decoder, kernels, batch))
        return {"model": self.model, "dtype": self.dtype, "batches": rows}

    @staticmethod
    def table(result: Result) -> Table:
        parts = {
            "step": "step (ms)",
            "roofline": "matrix products alone",
            "fused_forward": "layers, one call",
            "op_by_op_forward": "layers, op by op",
            "fused_draw": "head and draw",
        }
        rows = []
        for row in result["batches"]:
            ms = row["ms"]
            own = ms["step"] - ms["fused_forward"] - ms["fused_draw"]
            cells = [f"{ms[name]:.2f}" if name in ms else "-" for name in parts]
            last = (f"{own:.2f}", f"{row['roofline_share']:.2f}", f"{row['tokens_per_s']:.0f}")
            rows.append((row["batch"], *cells, *last))
        names = ("batch", *parts.values(), "the engine's own", "roofline / step", "tokens/s")
        return columns(f"{result['model']} {result['dtype']}, one decode step, medians", names, rows)


def _batch(bench: Decode, decoder: Decoder, kernels: Kernels | None, batch: int) -> dict[str, Any]:
    context = bench.prompt + bench.new_tokens
    engine = LocalEngine(
        decoder, kernels=kernels, kv_memory_mb=512, max_batch=batch, context_limit=context + 16
    )
    paths = {"fused": Parts(decoder, kernels, batch, context)}
    if paths["fused"].runner.is_fused:
        paths["op_by_op"] = Parts(decoder, kernels, batch, context, fused=False)
    times: dict[str, list[float]] = {}
    for number in range(bench.rounds + 1):  # the first warms up
        found = {"step": statistics.median(_steps(engine, bench, batch, number))}
        for name, parts in paths.items():
            found[f"{name}_forward"], found[f"{name}_draw"] = parts.seconds()
        found["roofline"] = roofline_s(decoder, kernels, batch, rounds=3)
        if number:
            for name, seconds in found.items():
                times.setdefault(name, []).append(1e3 * seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    share = statistics.median(r / s for r, s in zip(times["roofline"], times["step"], strict=True))
    return {
        "batch": batch,
        "ms": medians,
        "roofline_share": share,
        "tokens_per_s": 1e3 * batch / medians["step"],
    }


def _steps(engine: LocalEngine, bench: Decode, batch: int, number: int) -> list[float]:
    """Seconds of the steps in which all sequences decode and nothing else happens."""
    engine.publish(None, number + 1)
    rng = np.random.default_rng(number)
    sampling = Sampling(max_tokens=bench.new_tokens)
    vocab = engine.decoder.config.vocab_size
    requests = [
        Request(
            tokens=rng.integers(0, vocab, bench.prompt).astype(np.int32),
            sampling=sampling,
            seed=(number, row),
        )
        for row in range(batch)
    ]
    seconds: list[float] = []

    async def watch() -> None:
        answers = engine.generate(requests)
        first = asyncio.ensure_future(anext(answers))
        counters, before = engine.counters, (0, 0.0, 0)
        while not first.done():
            await asyncio.sleep(0)
            now = counters.decoded, counters.seconds, counters.prefilled
            if now[0] - before[0] == batch and now[2] == before[2]:
                seconds.append(now[1] - before[1])
            before = now
        async for _ in answers:
            pass

    asyncio.run(watch())
    return seconds


class Parts:
    """The forward and the draw of one decode step by themselves."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels | None, batch: int, context: int, *, fused: bool = True
    ) -> None:
        blocks = (context + 15) // 16 * batch + 1
        config = decoder.config
        store = KVStore.allocate(config.num_layers, blocks, decoder.kv_shape, decoder.dtype, decoder.device)
        self.runner = Runner(decoder, kernels, store, fused=fused)
        self._batch, self._context = batch, context

    def run(self) -> tuple[float, float]:
        """One pass half way through the answers: seconds of (forward, head and draw)."""
        return self.runner.measure_parts(self._batch, self._context)

    def seconds(self, rounds: int = 9) -> tuple[float, float]:
        """The same, medians."""
        timed = [self.run() for _ in range(rounds)]
        return statistics.median(f for f, _ in timed), statistics.median(d for _, d in timed)
