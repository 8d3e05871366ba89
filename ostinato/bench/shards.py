"""``ostinato bench shards``: what a pass of the engine costs over several ranks of one host.

For every layout: bytes of the weights in a rank, milliseconds of a decode pass (layers, head and draw)
against one rank with its layers fused and op by op, how much of it rank 0 spends in collectives, bytes that
it sends in them, and what a publish takes. Ranks of one host share its cores, so more of them make nothing
faster here; what is measured is what it costs to spread a model that would not fit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.settings import machine, our_threads
from ostinato.engine.local import NewRunner
from ostinato.engine.paged import KVStore
from ostinato.engine.runner import Runner
from ostinato.engine.sharded import ShardedRunner, start_ranks
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import AdapterSpec, init_adapters
from ostinato.model.named import SMOLLM, model_folder
from ostinato.model.native import BuildError, Kernels, load
from ostinato.model.quantise import own_bytes
from ostinato.parallel.layout import Layout

Say = Callable[[str], None]
BEGIN, END = "<!-- bench shards: begin -->", "<!-- bench shards: end -->"
CASES = (("asset:seed-moe", ("d2e2",)), (SMOLLM, ("t3",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    cases: tuple[tuple[str, tuple[str, ...]], ...] = CASES  # model, layouts of several ranks
    dtype: str = "float32"
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 96
    rounds: int = 21

    def shortened(self) -> Plan:
        return Plan(cases=self.cases[:1], batches=(1, 8), rounds=3)


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Medians over the rounds, in milliseconds; batches of one model are timed in turn."""
    torch.set_num_threads(our_threads())
    try:
        kernels = load()
    except BuildError as error:
        say(f"without native kernels: {error}")
        kernels = None
    rows = []
    for model, layouts in plan.cases:
        folder = model_folder(model)
        decoder = load_model(folder, getattr(torch, plan.dtype))
        for fused in (True, False):
            say(f"{model}: one rank{', layers fused' if fused else ', op by op'}")
            rows += _timed(plan, decoder, kernels, _one_rank(fused), {"model": model, "fused": fused})
        for layout in layouts:
            say(f"{model}: {layout}")
            with _ranks(plan, folder, layout, kernels) as (part, runner):
                rows += _timed(plan, part, kernels, runner, {"model": model, "layout": layout})
    return {"rows": rows, "dtype": plan.dtype, "context": plan.context, "machine": machine()}


def _one_rank(fused: bool) -> NewRunner:
    def new(decoder: Decoder, kernels: Kernels | None, store: KVStore) -> Runner:
        return Runner(decoder, kernels, store, fused=fused)

    return new


@contextmanager
def _ranks(
    plan: Plan, folder: Path, layout: str, kernels: Kernels | None
) -> Iterator[tuple[Decoder, NewRunner]]:
    dtype = getattr(torch, plan.dtype)
    shards = start_ranks(folder, Layout.parse(layout), dtype=dtype, native=kernels is not None)
    try:
        yield shards.decoder, shards.runner
    finally:
        shards.close()


def _timed(
    plan: Plan, decoder: Decoder, kernels: Kernels | None, new: NewRunner, about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    blocks = max(plan.batches) * (plan.context // 16) + 1
    layers = decoder.config.num_layers
    store = KVStore.allocate(layers, blocks, decoder.kv_shape, decoder.dtype, decoder.device)
    runner = new(decoder, kernels, store)
    publish_ms, published = _publish(plan, decoder, runner)
    rows = []
    for batch in plan.batches:
        runner.parts(batch, plan.context)  # warms up
        links = runner.links if isinstance(runner, ShardedRunner) else None
        if links is not None:
            links.traffic.taken()
        passes = [sum(runner.parts(batch, plan.context)) for _ in range(plan.rounds)]
        said = links.traffic.taken() if links is not None else None
        rows.append(
            {
                **about,
                "batch": batch,
                "weight_mb": own_bytes(decoder) / 1e6,
                "pass_ms": 1e3 * statistics.median(passes),
                "collectives_ms": 1e3 * sum(said.seconds.values()) / plan.rounds if said else 0.0,
                "collectives": sum(said.calls.values()) / plan.rounds if said else 0.0,
                "sent_mb": sum(said.bytes.values()) / plan.rounds / 1e6 if said else 0.0,
                "publish_ms": publish_ms,
                "published_mb": published / 1e6,
            }
        )
    return rows


def _publish(plan: Plan, decoder: Decoder, runner: Runner) -> tuple[float, float]:
    """(milliseconds, bytes to the other ranks) of a publish; the base is served again afterwards."""
    adapters = init_adapters(decoder.config, AdapterSpec(rank=16))
    before, seconds = runner.published_bytes if isinstance(runner, ShardedRunner) else 0, []
    times = max(1, plan.rounds // 4)
    for _ in range(times):
        start = time.perf_counter()
        runner.serve(adapters)
        seconds.append(time.perf_counter() - start)
    after = runner.published_bytes if isinstance(runner, ShardedRunner) else 0
    runner.serve(None)
    return 1e3 * statistics.median(seconds), (after - before) / times


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each model, layout and batch."""
    lines = [
        "| model | ranks | weights in a rank, MB | batch | pass, ms | of it in collectives, ms | collectives "
        "| sent by rank 0, MB | publish, ms (MB to others) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ranks = row.get("layout") or ("1, fused" if row["fused"] else "1, op by op")
        collectives = (
            f"{row['collectives_ms']:.2f} | {row['collectives']:.0f} | {row['sent_mb']:.2f}"
            if "layout" in row
            else "- | - | -"
        )
        publish = f"{row['publish_ms']:.0f}" + (f" ({row['published_mb']:.1f})" if "layout" in row else "")
        lines.append(
            f"| {row['model']} | {ranks} | {row['weight_mb']:.1f} | {row['batch']} | {row['pass_ms']:.2f} "
            f"| {collectives} | {publish} |"
        )
    about = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    return "\n".join((*lines, "", f"{result['dtype']}, {result['context']} positions seen; {about}.", ""))


def write(result: Mapping[str, Any], page: Path) -> None:
    """Put the table between its marks. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}; put them where the table belongs")
    page.write_text(f"{before}{BEGIN}\n{table(result)}{END}{after}", encoding="utf-8")


__all__ = ["CASES", "Plan", "run", "table", "write"]
