"""``ostinato bench catalog``: a catalog of many policies: its index in memory, look-ups, loads, and whether
loads leak. The rows of the catalog are many, its files a few."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.harness import Bench, Result, Say, columns, option
from ostinato.catalog import POLICIES, TABLES, VERSIONS, Catalog, open_catalog
from ostinato.database import open_database

OWNERS = 100
ROWS = 1000  # that are inserted at a time
SIZES_1B5 = {  # of Qwen2.5-1.5B
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogBench(Bench):
    """A catalog of many policies: bytes of its index, look-ups, loads of an adapter of a 1.5B model, and
    memory after many loads into an engine."""

    policies: int = option(100_000, "In the catalog.")
    look_ups: int = option(100_000, "Of random names.")
    ranks: tuple[int, ...] = option((1, 16), "Of the adapters that are loaded, with commas.")
    cold: int = option(200, "Loads of each rank, from the page cache and from the disk.")
    loads: int = option(10_000, "Into an engine of a small model, which keeps 64.")
    dtype: str = option("bfloat16", "Of the factors that are prepared.")

    def quick(self) -> CatalogBench:
        return replace(self, policies=2000, look_ups=2000, cold=3, loads=200, ranks=(1,))

    def measure(self, say: Say) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ostinato-catalog-") as name:
            folder = Path(name)
            say(f"writing {self.policies} rows")
            _fill(folder, self.policies)
            index, catalog = self._measure_index(folder, say)
            catalog.close()
            loads = [
                row for rank in self.ranks for row in _measure_loads(folder, rank, self.dtype, self.cold, say)
            ]
            return {"index": index, "loads": loads, "leak": _measure_leak(folder, self.loads, say)}

    def _measure_index(self, folder: Path, say: Say) -> tuple[dict[str, Any], Catalog]:
        before, start = _resident_mb(), time.perf_counter()
        catalog = open_catalog(folder)
        open_s, index_mb = time.perf_counter() - start, _resident_mb() - before
        draw = np.random.default_rng(0).integers(0, self.policies, self.look_ups).tolist()
        names = [_name(number) for number in draw]
        times = []
        for owner, policy in names:
            begin = time.perf_counter_ns()
            version = catalog.find(owner, policy)
            times.append(time.perf_counter_ns() - begin)
            assert version is not None
        say(f"opened in {open_s:.1f} s")
        p50, p99 = np.quantile(times, (0.5, 0.99)) / 1e3
        return {"index_mb": index_mb, "open_s": open_s, "look_up_p50_us": p50, "look_up_p99_us": p99}, catalog

    @staticmethod
    def table(result: Result) -> Table:
        index, leak = result["index"], result["leak"]
        title = (
            f"{result['settings']['policies']} policies: index {index['index_mb']:.0f} MB, opened in "
            f"{index['open_s']:.1f} s; look-up p50 {index['look_up_p50_us']:.2f} us, p99 "
            f"{index['look_up_p99_us']:.2f} us\n{leak['loads']} loads: resident {leak['first_mb']:.0f} MB "
            f"after a tenth, {leak['last_mb']:.0f} MB at the end"
        )
        names = ("load of a 1.5B model's adapter", "MB", "p50 ms", "p99 ms")
        rows = [
            (
                f"rank {row['rank']}, {row['from']}",
                f"{row['mb']:.1f}",
                f"{row['p50_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
            )
            for row in result["loads"]
        ]
        return columns(title, names, rows)


def _name(number: int) -> tuple[str, str]:
    """(owner, name) of a policy."""
    return f"owner-{number % OWNERS}", f"team/policy-{number}"


def _fill(folder: Path, count: int) -> None:
    """Insert the rows of ``count`` policies, without files: a publish of each would sync the disk thrice."""
    database = open_database(folder / "catalog.sqlite", TABLES, "a catalog of policies")
    with closing(database), database.transaction():
        for start in range(0, count, ROWS):
            keys = [
                dict(zip(("owner", "name"), _name(number), strict=True))
                for number in range(start, min(start + ROWS, count))
            ]
            head = {"newest": 1, "head": 1, "before": 0}
            database.insert(POLICIES, [key | head | {"change": start + k + 1} for k, key in enumerate(keys)])
            facts = {"version": 1, "bytes": 1 << 20, "parent": "", "created": 0.0}
            database.insert(VERSIONS, [key | facts | {"file": start + k + 1} for k, key in enumerate(keys)])


def _measure_loads(folder: Path, rank: int, dtype: str, count: int, say: Say) -> Iterator[dict[str, Any]]:
    """Loads of adapters of Qwen2.5-1.5B's shape, as a server does them."""
    import torch

    from ostinato.engine.engine_thread import run_in_own_thread
    from ostinato.launch.policy import map_policy
    from ostinato.model.config import parse_config
    from ostinato.model.lora import init_adapters
    from ostinato.model.peft_io import write_logical
    from ostinato.model.shapes import AdapterSpec

    config, path = parse_config(SIZES_1B5), folder / f"rank-{rank}"
    write_logical(init_adapters(config, AdapterSpec(rank=rank)), path, "", "")
    size = path.stat().st_size

    def load() -> None:  # without a result, which asyncio.run would write down at its end
        map_policy(path, config, "", getattr(torch, dtype))

    for source in ("page cache", "disk"):
        times = []
        for _ in range(count):
            if source == "disk":
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            asyncio.run(run_in_own_thread(load))
            times.append(time.perf_counter() - start)
        p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e3
        say(f"rank {rank} from {source}: {p50:.1f} ms")
        yield {"rank": rank, "from": source, "mb": size / 1e6, "p50_ms": p50, "p99_ms": p99}


def _measure_leak(folder: Path, loads: int, say: Say) -> dict[str, Any]:
    """Resident memory of ``loads`` loads into an engine that keeps 64 policies."""
    import torch

    from ostinato.engine.local import LocalEngine
    from ostinato.launch.policy import map_policy
    from ostinato.model.config import parse_config
    from ostinato.model.decoder import Decoder
    from ostinato.model.lora import init_adapters
    from ostinato.model.native import load_kernels
    from ostinato.model.peft_io import write_logical
    from ostinato.model.shapes import AdapterSpec
    from ostinato.residency import Residency

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 512}
    config = parse_config({**SIZES_1B5, **sizes, "num_attention_heads": 3, "num_key_value_heads": 1})
    engine = LocalEngine(
        Decoder(config, dtype=torch.float32).init_weights(0), kernels=load_kernels(), kv_memory_mb=4
    )
    paths = [folder / f"small-{rank}" for rank in (1, 16)]
    for path, rank in zip(paths, (1, 16), strict=True):
        write_logical(init_adapters(config, AdapterSpec(rank=rank)), path, "", "")
    residency, memory = Residency[str](64), []
    for number in range(loads):
        served = map_policy(paths[number % 2], config, "", torch.float32)
        for gone in residency.admit(str(number), 1):
            engine.withdraw(gone)
        engine.publish(served, 1, str(number))
        if number % max(1, loads // 10) == 0 or number == loads - 1:
            memory.append(_resident_mb())
    say(f"{loads} loads: {memory[1]:.0f} to {memory[-1]:.0f} MB")
    return {"loads": loads, "first_mb": memory[1], "last_mb": memory[-1], "resident_mb": memory}


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
