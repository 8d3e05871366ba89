"""How old tokens may be, by a forecast of how far the policy is from the one that sampled them.

The KL of sampler to trainer (``sampling/kl_k3``, nats a token) grows about linearly with the optimizer steps
between them, since these go now here, now there; what it is at an age of 0 is numerics. So a step measures
the slope, and the next one has as many minibatches, and admits with as much staleness, as keep the oldest
tokens under ``limit``, if the steps to come have as many optimizer steps as those before:

    optimizer steps of the last ``staleness`` steps + minibatches - 1  <=  limit / slope

(A limit of the KL is PPO's target_kl, Schulman et al. 2017, which stops after the fact.) Pure functions; what
was measured is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.types import Batch

Measured = tuple[float, ...]  # (), (KL at an age of 0,) or (that, slope per optimizer step)
FADE = 0.7  # of a slope, for each step that had nothing to measure it by: slopes fall as a policy gets sure
FALL = 4.0  # a slope is taken to be no less than that part of the one before, or of what numerics are
FARTHEST = 10**6  # optimizer steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """``staleness`` and ``minibatches`` are the most that there may be; ``least`` staleness is kept."""

    limit: float
    staleness: int
    minibatches: int
    least: int = 0

    def chosen(self, measured: Measured, updates: Sequence[int]) -> tuple[int, int]:
        """(staleness, minibatches) of the next step, after ones of so many ``updates``, the newest last.
        Without a slope its oldest tokens are of age 1."""
        age = 1.0 if len(measured) < 2 else min(FARTHEST, self.limit / max(measured[1], 1e-30))
        past = passed(updates, self.staleness)
        staleness = max(self.least, int(np.searchsorted(past, age, side="right")) - 1)
        if not measured:
            return staleness, 1
        return staleness, min(self.minibatches, max(1, int(age - past[staleness]) + 1))

    def after(self, measured: Measured, metrics: Mapping[str, float]) -> Measured:
        """With what a step found. A step without these metrics, or with an optimizer step that was refused,
        changes nothing, nor does one of older tokens before there was one of new ones."""
        kl, age = metrics.get("sampling/kl_k3", math.nan), metrics.get("staleness/mean", math.nan)
        if not math.isfinite(kl + age) or metrics.get("refused_steps") or (age and not measured):
            return measured
        floor, *slope = measured or (kl,)
        if age == 0:
            return (floor + kl) / 2, *(FADE * one for one in slope)
        least = (slope[0] if slope else floor / age) / FALL
        new = max((kl - floor) / age, least)
        return floor, math.sqrt(slope[0] * new) if slope and slope[0] else new

    def figures(self, measured: Measured, updates: Sequence[int]) -> dict[str, float]:
        """Metrics: what the next step may do."""
        staleness, minibatches = self.chosen(measured, updates)
        slope = {"drift/kl_per_update": measured[1]} if len(measured) > 1 else {}
        return {"drift/staleness": float(staleness), "drift/minibatches": float(minibatches)} | slope


def passed(updates: Sequence[int], most: int) -> np.ndarray:
    """[most + 1] optimizer steps since 0, 1 ... ``most`` policies ago, 1 each where there were fewer."""
    newest = [*reversed(updates)][:most]
    return np.cumsum([0, *newest, *[1] * (most - len(newest))])


def ages(batch: Batch, updates: Sequence[int]) -> dict[str, float]:
    """``staleness/mean`` and ``staleness/max``, where steps had different numbers of ``updates``."""
    oldest = max(int(part.staleness.max(initial=0)) for part in batch.microbatches)
    past = passed(updates, oldest)
    found = np.concatenate(
        [past[part.staleness] + n for n, parts in enumerate(batch.minibatches) for part in parts]
    )
    return {"staleness/mean": float(found.mean()), "staleness/max": float(found.max())}
