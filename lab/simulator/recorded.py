"""A run of several workers for the simulator: its answers, and what a pass, a trained token and a step cost.

A cost table measured beside the run gives the seconds of a pass over the model by its rows, and the run what
its sampler adds to each pass (the loop around it, and what it shares with other cores): a simulated token
then takes the samplers the seconds that a token of the run took them. What works when, and what waits for
what, is the simulator's own.
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

FITS = 4  # rounds of fitting what is added to a pass: the batches depend on it
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


def longer(cost: Cost, seconds: float) -> Cost:
    """With so many seconds more for each pass; at least a tenth of what it has is left."""
    return replace(cost, base=tuple(max(0.1 * one, one + seconds) for one in cost.base))


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
        grade_s=statistics.fmean(_quiet(spans)),
    )
    cost, more = setup.cost, 0.0
    for _ in range(FITS):
        found = simulate(setup, stream)
        more += (sampling / tokens - found.token_s) * found.batch_mean
        setup = replace(setup, cost=longer(cost, more))
    return setup


def _quiet(spans: Sequence[Span]) -> Iterator[float]:
    """Seconds of each wait of the trainer in which no sampler works: verdicts, and what is on its way."""
    work = [s for s in spans if pool_of(s.worker) == "samplers"]
    for wait in (s for s in spans if s.worker == "trainer" and s.kind is Kind.WAIT):
        inside = [(max(s.start, wait.start), min(s.stop, wait.stop)) for s in work]
        covered = until = 0.0
        for start, stop in sorted(pair for pair in inside if pair[0] < pair[1]):
            covered += max(0.0, stop - max(start, until))
            until = max(until, stop)
        yield wait.seconds - covered


def _between(trainer: Sequence[Span]) -> Iterator[float]:
    """Seconds between two steps in which the trainer neither works nor waits for answers."""
    work = sorted((s for s in trainer if s.kind in (Kind.TRAIN, Kind.PACK)), key=lambda span: span.start)
    waits = [s for s in trainer if s.kind is Kind.WAIT]
    for before, after in pairwise(work):
        if before.step != after.step:
            waited = sum(s.seconds for s in waits if before.stop <= s.start < after.start)
            yield max(0.0, after.start - before.stop - waited)
