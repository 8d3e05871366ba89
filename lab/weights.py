"""``ostinato bench decode --weights bf16,int8,fp8``: a pass of the sampler with each, side by side.

One pass is what the engine runs for ``batch`` sequences half way through their answers: all layers, head
and draw. The contenders take turns, round by round, and the ratio is the median over rounds of the first
one's time to another's, so that a machine that others use shifts both.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.table import Table

from lab.decode import Parts, Plan, Say
from lab.settings import Clock, machine, our_threads
from ostinato.model.hf import load_model
from ostinato.model.native import load
from ostinato.model.quantise import Weights, own_bytes, quantise

_PASSES = 5  # of each contender in a turn; their median counts


def run(plan: Plan, kinds: tuple[Weights, ...], clock: Clock, say: Say) -> dict[str, Any]:
    """Milliseconds of a pass by batch size and kind of weights. Raises BuildError without native kernels."""
    torch.set_num_threads(our_threads())
    kernels = load()
    decoder = load_model(plan.folder, dtype=getattr(torch, plan.dtype), device="cpu", fp32_head=True)
    decoders = {kind: quantise(decoder, kind) for kind in kinds}
    rows, context = [], plan.prompt + plan.new_tokens
    for batch in plan.batches:
        say(f"batch {batch}: {plan.rounds} rounds of {', '.join(kinds)}")
        passes = {kind: Parts(own, kernels, batch, context) for kind, own in decoders.items()}
        times: dict[Weights, list[float]] = {kind: [] for kind in kinds}
        for number in range(plan.rounds + 1):  # the first warms up
            for kind, parts in passes.items():
                seconds = _pass(parts, clock)
                if number:
                    times[kind].append(1e3 * seconds)
        rows.append({"batch": batch, "weights": {kind: _summary(times, kind) for kind in kinds}})
    return {
        "model": plan.model,
        "dtype": plan.dtype,
        "clock": clock,
        "bytes": {kind: own_bytes(own) for kind, own in decoders.items()},
        "batches": rows,
        "machine": machine(),
    }


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


def table(result: dict[str, Any]) -> Table:
    """A row for each batch size: milliseconds, and how many times as fast as the first kind."""
    kinds = list(result["bytes"])
    shown = Table(
        title=f"{result['model']} {result['dtype']}, one pass of the sampler, medians ({result['clock']})"
    )
    shown.add_column("batch", justify="right")
    for kind in kinds:
        shown.add_column(f"{kind}, {1e-6 * result['bytes'][kind]:.0f} MB (ms)", justify="right")
    for kind in kinds[1:]:
        shown.add_column(f"{kinds[0]} / {kind}", justify="right")
    for row in result["batches"]:
        found = row["weights"]
        shown.add_row(
            str(row["batch"]),
            *(f"{found[kind]['ms']:.2f}" for kind in kinds),
            *(f"{found[kind]['speedup']:.2f}" for kind in kinds[1:]),
        )
    return shown
