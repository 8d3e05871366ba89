"""What a simulated pipeline answers, and on what: lengths that were recorded or drawn, costs likewise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.simulator.sampler import Cost
from ostinato.inputs import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """How long answers are: to each prompt in each epoch."""

    name: str
    lengths: np.ndarray  # [epochs, prompts, samples] int, tokens
    prompts: np.ndarray  # [prompts] int, tokens of each

    @classmethod
    def read(cls, path: Path) -> Trace:
        row = parse_json(path.read_text(encoding="utf-8"))
        return cls(
            name=row["name"],
            lengths=np.array(row["lengths"], np.int64),
            prompts=np.array(row["prompts"], np.int64),
        )

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "prompts": self.prompts.tolist(), "lengths": self.lengths.tolist()}

    def stream(self, groups: int, seed: int = 0) -> Stream:
        """``groups`` groups: the prompts in a new order each epoch, the epochs in turn. The first epoch is
        history: it has been sampled before, and is not sampled again until the last one has been."""
        epochs, count, _ = self.lengths.shape
        order = [np.random.default_rng([seed, e]).permutation(count) for e in range(-(-groups // count))]
        prompts = np.concatenate(order)[:groups]
        epoch = (1 + np.repeat(np.arange(len(order)), count)[:groups]) % epochs
        return Stream(
            lengths=self.lengths[epoch, prompts],
            prompts=self.prompts[prompts],
            uids=[str(prompt) for prompt in prompts.tolist()],
            history={str(prompt): lengths for prompt, lengths in enumerate(self.lengths[0])},
        )


def read_cost(path: Path, slots: int) -> Cost:
    """The cost table that a recorded trace came with."""
    row = parse_json(path.read_text(encoding="utf-8"))["cost"]
    return Cost.of(row["rows"], slots=slots, attended_s=row["attended_s"], prefill_s=row["prefill_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Groups in the order in which they are admitted."""

    lengths: np.ndarray  # [groups, samples] int, at least 1
    prompts: np.ndarray  # [groups] int, tokens of the prompt
    uids: list[str]  # [groups]
    history: Mapping[str, np.ndarray] = field(default_factory=dict)  # lengths from before, by prompt


def log_normal(
    name: str,
    *,
    epochs: int,
    prompts: int,
    samples: int = 16,
    mean: float = 3000.0,
    limit: int = 16384,
    between: float = 0.8,
    within: float = 0.5,
    drift: float = 0.1,
    prompt_tokens: int = 300,
    seed: int = 0,
) -> Trace:
    """Lengths exp(mu_p + within z), cut at ``limit``, scaled to the mean (tokens).

    mu_p is normal with deviation ``between`` over prompts and moves from epoch to epoch by an
    autoregression that keeps this deviation: mu <- sqrt(1 - drift^2) mu + drift between z.
    """
    rng = np.random.default_rng(seed)
    mu = rng.normal(0.0, between, prompts)
    drawn = np.empty((epochs, prompts, samples))
    for epoch in range(epochs):
        drawn[epoch] = np.exp(mu[:, None] + rng.normal(0.0, within, (prompts, samples)))
        mu = np.sqrt(1 - drift**2) * mu + rng.normal(0.0, between * drift, prompts)
    low, high = 0.0, 10 * limit / float(np.median(drawn))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(drawn * middle, limit).mean() < mean else (low, middle)
    lengths = np.clip(drawn * high, 1, limit).astype(np.int64)
    return Trace(name=name, lengths=lengths, prompts=np.full(prompts, prompt_tokens, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A roofline: a pass reads the weights and all keys and values, or is bound by arithmetic."""

    name: str
    bandwidth: float  # bytes a second that are reached
    flops: float  # a second that are reached
    weights: float  # bytes that a pass reads
    active: float  # parameters that a token uses
    kv_bytes: float  # of a position
    overhead_s: float  # of a pass

    def cost(self, slots: int) -> Cost:
        base = [
            self.overhead_s + max(self.weights / self.bandwidth, 2 * b * self.active / self.flops)
            for b in range(slots + 1)
        ]
        return Cost(
            base=tuple(base),
            attended_s=self.kv_bytes / self.bandwidth,
            prefill_s=2 * self.active / self.flops,
        )


H100_7B = Device(
    name="7.6 billion parameters in bf16 on an H100: 80 % of 3.35 TB/s, 60 % of 989 TFLOP/s",
    bandwidth=0.8 * 3.35e12,
    flops=0.6 * 989e12,
    weights=15.2e9,
    active=7.6e9,
    kv_bytes=57_344,
    overhead_s=0.5e-3,
)


def stability(lengths: np.ndarray, band: float = 0.2) -> float:
    """Share of prompts whose rank by mean length moves by less than ``band`` of all ranks between
    neighbouring epochs. lengths: [epochs, prompts, samples]."""
    ranks = lengths.mean(axis=2).argsort(axis=1).argsort(axis=1) / max(1, lengths.shape[1] - 1)
    return float((np.abs(np.diff(ranks, axis=0)) < band).mean())
