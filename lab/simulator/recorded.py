"""A run of several workers for the simulator: its answers, and what a pass, a trained token and a step cost.

A cost table measured beside the run gives the shape of a pass, and the run its height: a simulated token
takes the samplers the seconds that a token of the run took them. What works when, and what waits for what, is
then the simulator's own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from lab.settings import native_kernels
from lab.simulator.events import Setup, simulate
from lab.simulator.sampler import Cost
from lab.simulator.traces import Stream
from ostinato.engine.cost import CostTable
from ostinato.engine.paged import KVStore
from ostinato.engine.runner import Runner
from ostinato.model.decoder import Decoder
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.run import RunFolder

FITS = 4  # rounds of fitting the height of a cost table: the batches depend on it
PREFILLED = 64  # rows of a pass that reads prompts
MOST_ROWS = 256


def pass_cost(decoder: Decoder) -> Cost:
    """Seconds of passes of up to 256 rows over ``decoder`` on this thread, measured now."""
    config = decoder.config
    torch.set_num_threads(1)
    store = KVStore.allocate(config.num_layers, 64, decoder.kv_shape, decoder.dtype, decoder.device)
    table = CostTable.measured(Runner(decoder, native_kernels(), store).seconds)
    rows = np.arange(MOST_ROWS + 1)
    base = table.seconds(rows, 0.0)
    slope = float(table.seconds(1, 1.0) - table.seconds(1, 0.0))
    return Cost(base=tuple(base.tolist()), attended_s=slope, prefill_s=float(base[PREFILLED]) / PREFILLED)


def batched(cost: Cost, slots: int, rows: float = 1.0) -> Cost:
    """Of up to ``slots`` sequences with so many rows each: a token and the drafts behind it."""
    base = np.interp(np.arange(slots + 1) * rows, np.arange(len(cost.base)), cost.base)
    return replace(cost, base=tuple(base.tolist()))


def scaled(cost: Cost, height: float) -> Cost:
    """With all seconds so many times as long."""
    base, others = tuple(height * seconds for seconds in cost.base), (cost.attended_s, cost.prefill_s)
    return Cost(base=base, attended_s=height * others[0], prefill_s=height * others[1])


def answers(folder: RunFolder, siblings: int) -> Stream:
    """The groups of a run in the order of its stream. ValueError where some were not kept."""
    lengths: dict[int, dict[int, int]] = defaultdict(dict)
    prompts: dict[int, tuple[str, int]] = {}
    for row in folder.trajectories.rows():
        _, _, place, sample = row["seed"]
        lengths[place][sample] = max(1, sum(len(turn["tokens"]) for turn in row["turns"]))
        prompts[place] = row["uid"], len(row["turns"][0]["context"])
    if not lengths or any(len(group) != siblings for group in lengths.values()):
        raise ValueError(f"{folder.path.name} has not kept all answers; train with log.trajectories_every=1")
    return Stream(
        lengths=np.array([[lengths[place][i] for i in range(siblings)] for place in sorted(lengths)]),
        prompts=np.array([prompts[place][1] for place in sorted(lengths)]),
        uids=[prompts[place][0] for place in sorted(lengths)],
    )


def calibrated(setup: Setup, stream: Stream, spans: Sequence[Span]) -> Setup:
    """``setup`` with the seconds of the run whose ``stream`` and ``spans`` these are."""
    samplers = [span for span in spans if pool_of(span.worker) == "samplers"]
    publish = [span.seconds for span in samplers if span.kind is Kind.PUBLISH and span.amount]
    sampling = sum(span.seconds for span in samplers if span.kind in (Kind.PREFILL, Kind.DECODE))
    training = sum(span.seconds for span in spans if span.kind in (Kind.TRAIN, Kind.PACK))
    tokens = float(stream.lengths.sum())
    setup = replace(
        setup,
        train_token_s=training / tokens,
        between_s=statistics.fmean(_between([s for s in spans if pool_of(s.worker) == "trainer"])),
        publish_s=statistics.fmean(publish) if publish else 0.0,
    )
    for _ in range(FITS):
        height = sampling / tokens / simulate(setup, stream).token_s
        setup = replace(setup, cost=scaled(setup.cost, height))
    return setup


def _between(trainer: Sequence[Span]) -> Iterator[float]:
    """Seconds between two steps in which the trainer neither works nor waits for answers."""
    work = sorted((s for s in trainer if s.kind in (Kind.TRAIN, Kind.PACK)), key=lambda span: span.start)
    waits = [s for s in trainer if s.kind is Kind.WAIT]
    for before, after in pairwise(work):
        if before.step != after.step:
            waited = sum(s.seconds for s in waits if before.stop <= s.start < after.start)
            yield max(0.0, after.start - before.stop - waited)
