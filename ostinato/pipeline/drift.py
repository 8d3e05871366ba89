"""How old tokens may be, by a forecast of how far the policy is from the one that sampled them.

The KL of sampler to trainer (``sampling/kl_k3``, nats a token) grows about linearly with the optimizer steps
between them, since these go now here, now there; what it is at an age of 0 is numerics. So a step measures
the slope, and the next one has as much staleness, and then as many minibatches, as keep its oldest tokens
under ``limit``:

    age = (staleness + 1) * minibatches - 1  <=  limit / slope

(A limit of the KL is PPO's target_kl, Schulman et al. 2017, which stops after the fact.) Pure functions; what
was measured is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Measured = tuple[float, ...]  # (), (KL at an age of 0,) or (that, slope per optimizer step)
FADE = 0.7  # of a slope, for each step that had nothing to measure it by: slopes fall as a policy gets sure
LEAST = 1e-12  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """``staleness`` and ``minibatches`` are the most that there may be; ``least`` staleness is kept."""

    limit: float
    staleness: int
    minibatches: int
    least: int = 0

    def chosen(self, measured: Measured) -> tuple[int, int]:
        """(staleness, minibatches) of the next step. Without a slope its oldest tokens are of age 1."""
        age = 1 if len(measured) < 2 else int(min(self.limit / measured[1], 1 / LEAST))
        staleness = min(self.staleness, max(self.least, age))
        if not measured:
            return staleness, 1
        return staleness, min(self.minibatches, max(1, (age + 1) // (staleness + 1)))

    def after(self, measured: Measured, metrics: Mapping[str, float]) -> Measured:
        """With what a step found. A step without these metrics changes nothing."""
        kl, age = metrics.get("sampling/kl_k3", math.nan), metrics.get("staleness/mean", math.nan)
        if not math.isfinite(kl + age):
            return measured
        floor = measured[0] if measured else kl if age == 0 else 0.0
        slope = measured[1:]
        if age == 0:
            return (floor + kl) / 2, *(FADE * one for one in slope)
        new = max(LEAST, (kl - floor) / age)
        return floor, math.sqrt(slope[0] * new) if slope else new

    def figures(self, measured: Measured) -> dict[str, float]:
        """Metrics of what the next step may do."""
        staleness, minibatches = self.chosen(measured)
        slope = {"drift/kl_per_update": measured[1]} if len(measured) > 1 else {}
        return {"drift/staleness": float(staleness), "drift/minibatches": float(minibatches)} | slope
