"""Seconds of the sampler: prompts are read, then answers decoded, a token of every sequence per step.

A replica is a data rank with its tensor ranks. It decodes its part of the answers, ``setup.sequences`` at
once, and all replicas wait for the one with the longest answer. Prompts are read before, as a phase of their
own: interleaving would hide a part of it, which a plan does not count on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ostinato.apps.plan.cluster import Efficiency, Wires
from ostinato.apps.plan.layouts import as_kept
from ostinato.apps.plan.memory import kv_values
from ostinato.apps.plan.problem import Problem, Setup
from ostinato.apps.plan.traffic import Sent, Traffic, ring
from ostinato.model.config import ModelConfig
from ostinato.model.flops import Part, compute_layer_rates
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.elements import stage_elements, table_size
from ostinato.parallel.gpus import find_peak
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import distinct_ranks, expected_straggler
from ostinato.parallel.memory import DType, weight_bytes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Runs of decode steps between which no sequence comes or goes."""

    steps: Floats  # [n] how many steps
    sequences: Floats  # [n] how many sequences each of them decodes
    generated: Floats  # [n] mean tokens that these have generated, in the middle of the run

    @property
    def longest(self) -> float:
        """The number of all decode steps."""
        return float(self.steps.sum())


def occupancy(lengths: Sequence[int], slots: int) -> Occupancy:
    """Return the occupancy of a replica that decodes ``lengths`` in this order, at most ``slots`` at once:
    when one ends, the next begins. Raises ValueError without a slot or a length."""
    if slots < 1 or not len(lengths) or min(lengths) < 1:
        raise ValueError(
            f"{len(lengths)} lengths and {slots} slots; use at least 1 of each, of 1 token or more"
        )
    length = np.asarray(lengths, np.float64)
    start = np.zeros(len(length))
    ends = list(map(float, length[:slots]))
    heapq.heapify(ends)
    for index in range(slots, len(length)):
        start[index] = heapq.heappop(ends)
        heapq.heappush(ends, start[index] + length[index])
    stop = start + length
    events, place = np.unique(np.concatenate([start, stop]), return_inverse=True)
    start_places, end_places = place[: len(length)], place[len(length) :]
    size = len(events)
    sequences = np.cumsum(
        np.bincount(start_places, minlength=size) - np.bincount(end_places, minlength=size)
    )[:-1]
    starts = np.cumsum(
        np.bincount(start_places, weights=start, minlength=size)
        - np.bincount(end_places, weights=start, minlength=size)
    )[:-1]
    middle = (events[:-1] + events[1:]) / 2
    return Occupancy(
        steps=np.diff(events), sequences=sequences.astype(np.float64), generated=middle - starts / sequences
    )


def dealt(answers: Sequence[int], number: int, replicas: int) -> tuple[int, ...]:
    """Return the answer lengths of a replica's part of ``number`` answers, of the distribution that
    ``answers`` is a sample of. It is the replica with the longest answer, since all others wait for it.

    The lengths are evenly spaced quantiles, and the last is the quantile of the longest of all ``number``.
    Their order is fixed and mixes long and short, as a batch does.
    """
    share = max(1, -(-number // replicas))
    sorted_lengths = np.sort(np.asarray(answers, np.int64))
    places = (np.arange(share) + 0.5) / share
    places[-1] = max(places[-1], (number - 0.5) / number)
    lengths = sorted_lengths[np.ceil(places * len(sorted_lengths)).astype(np.int64) - 1]
    stride = next(n for n in range(max(1, int(share * 0.618)), share + 1) if np.gcd(n, share) == 1)
    return tuple(int(n) for n in lengths[np.arange(share) * stride % share])


def decode_seconds(rooms: Occupancy, step: Callable[[Floats, Floats], Floats]) -> float:
    """Return the seconds of a schedule; ``step(sequences, generated)`` gives the seconds of a decode step."""
    return float((rooms.steps * step(rooms.sequences, rooms.generated)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """FLOPs of a row through all layers: of dense products, of routed experts, of adapters, of a (query, key)
    pair of attention."""

    dense: float
    routed: float
    lora: float
    pair: float


@lru_cache(maxsize=32)
def rates_of(config: ModelConfig, adapter: AdapterSpec | None) -> Rates:
    """Sum the FLOPs of all layers by kind."""
    dense = lora = pair = 0.0
    for layer in compute_layer_rates(config, adapter):
        for part, rates in layer.forward.items():
            pair += rates.pairs
            if part == Part.LORA:
                lora += rates.tokens
            else:
                dense += rates.tokens
    moe, routed = config.moe, 0.0
    if moe is not None:
        routed = 6.0 * config.hidden_size * moe.intermediate_size * moe.top_k * len(moe.layers)
    return Rates(dense=dense - routed, routed=routed, lora=lora, pair=pair)


@lru_cache(maxsize=512)
def _schedule_answers(answers: tuple[int, ...], number: int, replicas: int, slots: int) -> Occupancy:
    return occupancy(dealt(answers, number, replicas), slots)


def rollout_seconds(problem: Problem, setup: Setup, efficiency: Efficiency) -> dict[str, float]:
    """Return the rollout seconds of an RL step by term; "decode" is the roofline of the products."""
    work, layout = problem.work, as_kept(setup.layout)
    pass_ = _Pass(problem=problem, layout=layout, efficiency=efficiency)
    slots = max(1, min(setup.sequences or problem.sampler.sequences, problem.sampler.sequences))
    schedule = _schedule_answers(work.answers, work.num_answers, layout.data, slots)

    terms = {
        "prefill": pass_.prefill(),
        "decode": decode_seconds(schedule, pass_.products),
        "cache": decode_seconds(schedule, pass_.cache),
        "tensor": decode_seconds(schedule, lambda seqs, generated: pass_.talk(seqs, "t")),
        "expert exchange": decode_seconds(schedule, lambda seqs, generated: pass_.talk(seqs, "e")),
    }
    busy = sum(terms.values()) - terms["prefill"]
    least_seconds = schedule.longest * problem.config.num_layers * efficiency.captured
    return {**terms, "launch": max(0.0, least_seconds - busy)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A pass of the engine on one replica."""

    problem: Problem
    layout: Layout
    efficiency: Efficiency

    @property
    def speed(self) -> float:
        """FLOP/s. fp8 weights are multiplied as they are; other codes are widened first."""
        gpu, precision = self.problem.cluster.gpu, self.problem.precision
        return find_peak(gpu, precision.sampler if precision.sampler == DType.FP8 else precision.compute)

    @property
    def hbm(self) -> float:
        return self.problem.cluster.gpu.hbm * self.efficiency.memory

    @property
    def straggler(self) -> float:
        moe = self.problem.config.moe
        return 1.0 if moe is None else expected_straggler(moe.num_experts, self.layout.expert).mean

    @property
    def crowd(self) -> float:
        """The number of replicas that share the same experts."""
        return max(1.0, self.layout.expert * self.layout.expert_tensor / self.layout.tensor)

    def weights(self) -> tuple[float, float]:
        """Return the bytes on a rank: (of all weights but routed experts, of routed experts)."""
        config, dtype = self.problem.config, self.problem.precision.sampler
        elements = stage_elements(config, None, self.layout, 0)
        # The head, or the tied embedding, is read. Of an untied embedding only a few rows are looked up.
        dense_elements = replace(elements, experts=0, ends=table_size(config, self.layout))
        return weight_bytes(dense_elements, dtype), elements.experts * dtype.num_bytes

    def products(self, sequences: Floats, generated: Floats) -> Floats:
        """Return the seconds of the products of a decode step [n]."""
        del generated
        config, e, t = self.problem.config, self.efficiency, self.layout.tensor
        rates, (dense, experts) = rates_of(config, self.problem.adapter), self.weights()
        adapters = self._count_adapter_bytes()
        head = 2.0 * config.vocab_size * config.hidden_size
        flops = sequences * (rates.dense + rates.lora + head) / t / (self.speed * e.products)
        seconds = np.maximum(flops, (dense + adapters) / self.hbm)
        moe = config.moe
        if moe is None:
            return seconds
        num_meeting = sequences * self.crowd
        touched_share = 1.0 - (1.0 - moe.top_k / moe.num_experts) ** num_meeting
        # The share of these rows that a rank computes: of its experts, or of its part of their width.
        rank_rows = num_meeting / (self.layout.expert * self.layout.expert_tensor)
        flops = rank_rows * rates.routed / (self.speed * e.grouped)
        return seconds + np.maximum(flops * self.straggler, touched_share * experts / self.hbm)

    def cache(self, sequences: Floats, generated: Floats) -> Floats:
        """Return the seconds of attention over prompts and generated tokens [n]. Latent caches are not cut by
        tensor ranks."""
        config, e, t = self.problem.config, self.efficiency, self.layout.tensor
        mla, latent = config.mla, self.problem.sampler.latent_kv
        cached_tokens = sequences * (generated + self.problem.work.prompt_tokens)
        width = kv_values(config, latent=latent) * self.problem.precision.kv.num_bytes
        if mla is not None and latent:
            values = 2.0 * config.num_heads * config.num_layers * (2 * mla.kv_lora_rank + mla.rope_head_dim)
            flops = cached_tokens * values / t / (self.speed * e.attention)
            return np.maximum(cached_tokens * width / self.hbm, flops)
        return cached_tokens * width / min(t, config.num_kv_heads) / self.hbm

    def talk(self, sequences: Floats, axis: str) -> Floats:
        """Return the seconds of the messages of a decode step over an axis [n], linear in the rows."""
        wires = Wires(layout=self.layout, cluster=self.problem.cluster, efficiency=self.efficiency)
        seconds_1, seconds_2 = (wires.seconds(self._count_messages(rows), axis) for rows in (1.0, 2.0))
        return seconds_1 + (sequences - 1) * (seconds_2 - seconds_1)

    def prefill(self) -> float:
        """Return the seconds to read all prompts of a replica."""
        work, e, t = self.problem.work, self.efficiency, self.layout.tensor
        prompts = work.prompts if work.prompt_once else work.num_answers
        # At least 1: each replica of a group that is split over replicas reads the prompt.
        prompts = max(1.0, prompts / self.layout.data)
        rows = prompts * work.prompt_tokens
        rates = rates_of(self.problem.config, self.problem.adapter)
        flops = rows * (rates.dense + rates.lora) / t / (self.speed * e.products)
        flops += prompts * rates.pair * work.prompt_tokens**2 / 2 / t / (self.speed * e.attention)
        rank_rows = rows * self.crowd / (self.layout.expert * self.layout.expert_tensor)
        flops += rank_rows * rates.routed * self.straggler / (self.speed * e.grouped)
        passes = max(1.0, rows / self.problem.sampler.prefill_rows)
        read_seconds = passes * sum(self.weights()) / self.hbm
        size = min(rows, self.problem.sampler.prefill_rows)
        wires = Wires(layout=self.layout, cluster=self.problem.cluster, efficiency=e)
        return max(flops, read_seconds) + passes * wires.seconds(self._count_messages(size))

    def _count_messages(self, rows: float) -> Traffic:
        """Return the traffic of a pass of ``rows`` rows. Partial sums of attention and MLP are added up over
        t. Experts on the ranks of several replicas get their rows in an exchange; the shares of other experts
        are in the sum."""
        config, layout = self.problem.config, self.layout
        row, sums = config.hidden_size * self.problem.precision.compute.num_bytes, 2.0 * config.num_layers
        traffic = dict(ring("all_reduce", "t", layout.tensor, rows * row * sums, sums))
        moe = config.moe
        if moe is not None and self.crowd > 1:
            rank_rows = rows / (1 if layout.expert_tensor > 1 else layout.tensor)
            spread = distinct_ranks(moe.num_experts, moe.top_k, layout.expert)
            copies = rank_rows * spread * (layout.expert - 1) / layout.expert * self.straggler
            calls = 2.0 * len(moe.layers)
            traffic["all_to_all", "e"] = Sent(calls, calls * copies * row)
        return traffic

    def _count_adapter_bytes(self) -> float:
        """Return the bytes of the adapters on a rank, also of experts that no token chose."""
        if self.problem.adapter is None:
            return 0.0
        values = stage_elements(self.problem.config, self.problem.adapter, self.layout, 0).adapters
        return values * self.problem.precision.compute.num_bytes
