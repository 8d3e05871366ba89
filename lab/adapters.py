"""``ostinato bench adapters``: a decode pass whose rows are of many adapters, against one of one adapter.

The numbers of adapters are timed in turn, round by round, so that load on the machine meets all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.harness import ModelBench, Result, Say, columns, option
from lab.settings import Clock, native_kernels, our_threads
from ostinato.engine.cache import BLOCK
from ostinato.engine.paged import KVStore, Places
from ostinato.engine.runner import Runner
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters(ModelBench):
    """Milliseconds of the layers of a pass by number of adapters, medians, and their ratio to one adapter."""

    adapters: tuple[int, ...] = option((1, 4, 16, 64), "Numbers of adapters, with commas.")
    batch: int = option(64, "Sequences in the pass, shared out evenly.")
    rank: int = option(16, "Of every adapter.")
    clock: Clock = option(Clock.WALL, "wall, or cpu: processor seconds, for one thread on a busy machine.")
    rounds: int = option(9, "Passes of each.")
    context: int = 96

    def quick(self) -> Adapters:
        return replace(self, rounds=2)

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        run = self._make_pass(max(self.adapters))
        times: dict[int, list[float]] = {count: [] for count in self.adapters}
        for number in range(self.rounds + 1):  # the first warms up
            say(f"round {number} of {self.rounds}")
            for count, ms in times.items():
                start = self.clock.read()
                run(count)
                ms += [1e3 * (self.clock.read() - start)] if number else []
        first = times[self.adapters[0]]
        rows = [
            {
                "adapters": count,
                "ms": statistics.median(ms),
                "ratio": statistics.median(own / one for own, one in zip(ms, first, strict=True)),
            }
            for count, ms in times.items()
        ]
        return {"model": self.model, "dtype": self.dtype, "rows": rows}

    def _make_pass(self, most: int) -> Any:
        """A function that runs a pass with the rows shared out over so many adapters."""
        decoder = load_model(self.folder, dtype=getattr(torch, self.dtype), device="cpu", fp32_head=True)
        config, each = decoder.config, -(-self.context // BLOCK)
        blocks = each * self.batch + 1
        store = KVStore.allocate(config.num_layers, blocks, decoder.kv_shape, decoder.dtype, decoder.device)
        runner = Runner(decoder, native_kernels(), store)
        for number in range(1, most + 1):
            adapters = init_adapters(config, AdapterSpec(rank=self.rank, alpha=2 * self.rank), number)
            with torch.no_grad():
                for _, b in adapters.tensors.values():
                    b.normal_(0, 0.02)
            runner.serve(adapters, number)
        tables = (np.arange(self.batch)[:, None] * each + np.arange(each)).astype(np.int32)
        lengths, owner = np.full(self.batch, each * BLOCK, np.int32), np.arange(self.batch, dtype=np.int32)
        places = Places(tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1, tables, owner, lengths)
        tokens = np.arange(self.batch, dtype=np.int64) % config.vocab_size

        def run(count: int) -> None:
            ends = [self.batch * (i + 1) // count for i in range(count)]
            spans = [
                (i + 1, first, last) for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False))
            ]
            runner.forward(tokens, lengths.astype(np.int64) - 1, places, spans)

        return run

    @staticmethod
    def table(result: Result) -> Table:
        rows = [(row["adapters"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}") for row in result["rows"]]
        settings = result["settings"]
        title = f"{result['model']} {result['dtype']}, {settings['batch']} rows, rank {settings['rank']}"
        return columns(f"{title}: layers of a pass", ("adapters", "ms", "ratio"), rows)
