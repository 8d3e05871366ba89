"""How old tokens may be, by a forecast of how far the policy is from the one that sampled them.

The KL of sampler to trainer (``sampling/kl_k3``, nats a token) grows about linearly with the optimizer steps
between them, since these point in varying directions; at an age of 0 it is numerical error. So each step
measures the slope, and the next one uses as much staleness, and as many minibatches, as keep the KL of the
oldest tokens under ``limit``, provided that coming steps have as many optimizer steps as the last ones:

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
FADE = 0.7  # factor on a slope for each step that cannot measure it: slopes fall as a policy grows confident
FALL = 4.0  # a slope is at least 1 / FALL of the one before, or at first of the numerical error over the age
FARTHEST = 10**6  # optimizer steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """``staleness`` and ``minibatches`` are upper bounds; ``least`` is a lower bound of the staleness."""

    limit: float
    staleness: int
    minibatches: int
    least: int = 0

    def chosen(self, measured: Measured, updates: Sequence[int]) -> tuple[int, int]:
        """(staleness, minibatches) of the next step; ``updates``: optimizer steps of each past step, newest
        last. Until a slope is known, the next step's oldest tokens are of age 1."""
        age = 1.0 if len(measured) < 2 else min(FARTHEST, self.limit / max(measured[1], 1e-30))
        past = passed(updates, self.staleness)
        staleness = max(self.least, int(np.searchsorted(past, age, side="right")) - 1)
        if not measured:
            return staleness, 1
        return staleness, min(self.minibatches, max(1, int(age - past[staleness]) + 1))

    def after(self, measured: Measured, metrics: Mapping[str, float]) -> Measured:
        """``measured``, updated by the metrics of a step. Unchanged by a step without these metrics or with a
        refused optimizer step, and by one on older tokens before any on tokens of age 0."""
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
    """``staleness/mean`` and ``staleness/max`` in optimizer steps, where past steps had ``updates``."""
    oldest = max(int(part.staleness.max(initial=0)) for part in batch.microbatches)
    past = passed(updates, oldest)
    found = np.concatenate(
        [past[part.staleness] + n for n, parts in enumerate(batch.minibatches) for part in parts]
    )
    return {"staleness/mean": float(found.mean()), "staleness/max": float(found.max())}
