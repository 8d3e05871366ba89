"""``ostinato bench publish``: what it takes to bring a new policy to a sampler, and what more samplers cost.

    adapters   packed, moved as a file in memory, unpacked, served, proved by fingerprint
    merged     the same with the adapters added to the weights: what samplers without adapters need

The sampler is another process of this machine, one for each way, and the ways take turns. Then the physical
memory of one sampler and of several over one copy of the base (``model.shared``): every page once, wherever
it is mapped. The larger model is made up: its values do not matter here.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.contender import Contender, ContenderFailed
from lab.harness import ModelBench, Result, Say, option
from lab.paired import Paired
from lab.settings import our_threads
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.peft_io import merge
from ostinato.model.shapes import AdapterSpec
from ostinato.model.shared import shared_file, shared_model, sweep
from ostinato.model.wire import fingerprint, fingerprint_weights, pack, pack_weights
from ostinato.workers.remote import sealed

LARGER = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PARTS = ("merge", "pack", "fingerprint", "load", "prove")
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(ModelBench):
    """``layers``: of the larger model, 63 million parameters each; 0: without it."""

    dtype: str = option("bfloat16", "Of the weights.")
    rank: int = option(16, "Of the adapters.")
    layers: int = option(24, "Of a larger model, made up, of 0.5 GB a layer while it runs; 0: without it.")
    rounds: int = option(5, "Of both ways in turn.")
    workers: int = option(3, "Samplers over one copy of the base.")
    tokens: int = 8  # that every worker samples for each prompt before its memory is read

    def quick(self) -> Publish:
        return replace(self, layers=0, rounds=2)

    def measure(self, say: Say) -> dict[str, Any]:
        torch.set_num_threads(our_threads())
        models = []
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            for name, folder in _models(self, Path(root), say):
                models.append({"model": name} | _of_model(self, name, folder, Path(root), say))
        settings = {**asdict(self), "folder": str(self.folder)}
        return {"models": models, "settings": settings}

    @staticmethod
    def table(result: Result) -> RenderableType:
        settings = result["settings"]
        publish = Table(
            "model", "sent", "MB", *(f"{part} s" for part in PARTS), "in all s",
            "MB ratio", "time ratio", "without merge",
            title=f"publishing to a sampler in another process, rank {settings['rank']}, {settings['dtype']}",
        )  # fmt: skip
        memory = Table(
            "model", "weights MB", "own MB of each", "written to", "1 sampler",
            f"{settings['workers']} samplers", "ratio",
            title="physical memory of samplers over one base, MB",
        )  # fmt: skip
        for model in result["models"]:
            found, held = model["publish"], model["memory"]
            ratios = [
                f"{found['bytes_ratio']:.0f}x",
                _ratio(found["seconds"]),
                _ratio(found["seconds_without_merge"]),
            ]
            for way, reported in (("adapters", "adapters"), ("weights", "merged")):
                row = found[way]
                publish.add_row(
                    model["model"],
                    reported,
                    f"{row['bytes'] / 1e6:,.1f}",
                    *(f"{row[f'{part}_s']:.3f}" for part in PARTS),
                    f"{row['total_s']:.3f}",
                    *(ratios if way == "weights" else ()),
                )
            one, several = held["one"], held["several"]
            megabytes = [one["base"], several["own"], several["copied"], one["total"], several["total"]]
            reported = [f"{size / 1e6:,.0f}" for size in megabytes]
            memory.add_row(model["model"], *reported, f"{held['ratio']:.3f}x")
        return Stack(publish, memory)


def _models(bench: Publish, root: Path, say: Say) -> Iterator[tuple[str, Path]]:
    yield bench.model, bench.folder
    if bench.layers:
        config = parse_config({**LARGER, "num_hidden_layers": bench.layers})
        decoder = Decoder(config, dtype=getattr(torch, bench.dtype)).init_weights(0)
        name = f"made up, {sum(p.numel() for p in decoder.parameters()) / 1e9:.1f} B"
        say(f"writing a model of random weights, {_bytes_of(decoder) / 1e9:.1f} GB")
        save_model(decoder, root / "larger")
        del decoder
        gc.collect()
        yield name, root / "larger"


def _of_model(bench: Publish, name: str, folder: Path, root: Path, say: Say) -> dict[str, Any]:
    shared = Path(tempfile.mkdtemp(prefix="shared-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else root))
    try:
        decoder = shared_model(folder, getattr(torch, bench.dtype), folder=shared)
        row = {"parameters": sum(p.numel() for p in decoder.parameters()), "bytes": _bytes_of(decoder)}
        row |= {
            "publish": _publish(bench, decoder, folder, shared, root, lambda line: say(f"{name}: {line}"))
        }
        del decoder
        gc.collect()
        return row | {"memory": _memory(bench, folder, shared, root, lambda line: say(f"{name}: {line}"))}
    finally:
        gc.collect()
        sweep(shared)
        shared.rmdir()


def _bytes_of(decoder: Decoder) -> int:
    return sum(weight.nbytes for weight in decoder.parameters())


@contextmanager
def _sampler(bench: Publish, folder: Path, shared: Path | None, root: Path) -> Iterator[Contender]:
    task = {"folder": str(folder), "dtype": bench.dtype, "threads": our_threads()}
    task["shared"] = str(shared) if shared else ""
    command = [sys.executable, "-m", "lab.publish_worker", json.dumps(task)]
    with Contender("a sampler", command, root / "sampler.log") as contender:
        yield contender


# ---- publishing


def _publish(
    bench: Publish, decoder: Decoder, folder: Path, shared: Path, root: Path, say: Say
) -> dict[str, Any]:
    """Both ways in turn, each round with other adapters; the first round warms up."""
    rows: dict[str, list[dict[str, float]]] = {"adapters": [], "weights": []}
    with (
        _sampler(bench, folder, shared, root) as with_adapters,
        _sampler(bench, folder, None, root) as merged,
    ):
        for number in range(bench.rounds + 1):
            adapters = _random_adapters(decoder, bench.rank, number)
            for way in sorted(rows, reverse=bool(number % 2)):
                sampler, send = (
                    (with_adapters, _send_adapters) if way == "adapters" else (merged, _send_weights)
                )
                row = send(decoder, adapters, shared / f"{way}.safetensors", sampler, number)
                if number:
                    rows[way].append(row)
    found = {way: _medians(each) for way, each in rows.items()}
    say(f"adapters {_shown(found['adapters'])}; merged weights {_shown(found['weights'])}")
    return {
        **found,
        "bytes_ratio": round(found["weights"]["bytes"] / found["adapters"]["bytes"], 2),
        "seconds": _paired(rows, lambda row: row["total_s"]),
        "seconds_without_merge": _paired(rows, lambda row: row["total_s"] - row.get("merge_s", 0.0)),
    }


def _paired(
    rows: Mapping[str, list[dict[str, float]]], seconds: Callable[[Mapping[str, float]], float]
) -> dict[str, Any]:
    base, other = (tuple(map(seconds, rows[way])) for way in ("adapters", "weights"))
    return Paired(base=base, other=other).figures()


def _send_adapters(
    decoder: Decoder, adapters: Adapters, path: Path, sampler: Contender, version: int
) -> dict[str, float]:
    start = time.perf_counter()
    path.write_bytes(sealed(pack(adapters)))
    packed = time.perf_counter()
    expected = fingerprint(adapters)
    row = {"pack_s": packed - start, "fingerprint_s": time.perf_counter() - packed}
    return _delivered(path, sampler.ask(adapters=str(path), version=version), version, expected, row)


def _send_weights(
    decoder: Decoder, adapters: Adapters, path: Path, sampler: Contender, version: int
) -> dict[str, float]:
    start = time.perf_counter()
    merged = merge(decoder, adapters)
    added = time.perf_counter()
    pack_weights(merged, path)
    packed = time.perf_counter()
    expected = fingerprint_weights(merged)
    row = {"merge_s": added - start, "pack_s": packed - added, "fingerprint_s": time.perf_counter() - packed}
    del merged
    return _delivered(path, sampler.ask(weights=str(path), version=version), version, expected, row)


def _delivered(
    path: Path, answer: Mapping[str, Any], version: int, expected: str, row: dict[str, float]
) -> dict[str, float]:
    """The row of a publication that is served as it was meant."""
    size = path.stat().st_size
    path.unlink()
    if (answer["version"], answer["fingerprint"]) != (version, expected):
        raise ContenderFailed(
            f"a sampler serves version {answer['version']} with {answer['fingerprint']} instead of {version} "
            f"with {expected}"
        )
    row |= {"load_s": answer["load_s"], "prove_s": answer["prove_s"]}
    return {"bytes": size, **row, "total_s": sum(row.values())}


def _random_adapters(decoder: Decoder, rank: int, seed: int) -> Adapters:
    adapters = init_adapters(decoder.config, AdapterSpec(rank=rank, alpha=2.0 * rank), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_(0, 1e-3, generator=generator)
    return adapters


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = ("bytes", *(f"{part}_s" for part in PARTS), "total_s")
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


# ---- memory


def _memory(bench: Publish, folder: Path, shared: Path, root: Path, say: Say) -> dict[str, Any]:
    """Of one sampler and of ``bench.workers``, after all have sampled. The base counts as large as its file,
    whichever pages are mapped just now."""
    file = shared_file(folder, getattr(torch, bench.dtype), shared)
    rows = {}
    for count in (1, bench.workers):
        with ExitStack() as stack:
            samplers = [stack.enter_context(_sampler(bench, folder, shared, root)) for _ in range(count)]
            answers = [sampler.ask(sample=bench.tokens)["tokens"] for sampler in samplers]
            found = [sampler.ask(memory=1) for sampler in samplers]
            base = file.stat().st_blocks * 512
        if any(answer != answers[0] for answer in answers):
            raise ContenderFailed("samplers over one base give different tokens")
        own = [one["total"] - one["base"] for one in found]
        rows[count] = {
            "total": base + sum(own),
            "base": base,
            "own": round(statistics.fmean(own)),
            "copied": sum(one["copied"] for one in found),
        }
    one, several = rows[1], rows[bench.workers]
    ratio = several["total"] / one["total"]
    held = [row["total"] / 1e6 for row in rows.values()]
    say(f"{bench.workers} samplers hold {held[-1]:,.0f} MB, one {held[0]:,.0f}: {ratio:.3f}x")
    return {"workers": bench.workers, "one": one, "several": several, "ratio": round(ratio, 4)}


# ---- for people


def _shown(row: Mapping[str, float]) -> str:
    return f"{row['bytes'] / 1e6:,.1f} MB in {row['total_s']:.3f} s"


def _ratio(paired: Mapping[str, float]) -> str:
    return f"{paired['ratio']:.0f}x ({paired['low']:.0f} to {paired['high']:.0f})"
