"""When another layout pays: at a checkpoint, if what it gains over the rest of the run outweighs the switch.

A plan was made for a distribution of lengths and an imbalance of experts. Both move while a policy learns.
Adapters and optimizer are saved as logical tensors and load under any layout, so a switch costs what loading
does; a frozen base moves too. Advice has hysteresis on both sides: the world must have moved before anything
is planned anew, and the gain must beat the cost by a margin that covers what the planner does not know.
Pure: ``ostinato plan --against RUN`` asks, prints the sentence and keeps it in the run folder; no run asks by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a plan depends on and training changes."""

    answers: tuple[int, ...]  # a sample of answer lengths
    imbalance: float = 1.0  # max / mean load of expert ranks, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """What has to be exceeded before a switch is advised."""

    lengths: float = 0.15  # relative change of the mean, the 90 % quantile or the longest answer
    imbalance: float = 0.10  # relative change
    gain: float = 0.05  # of a step: smaller gains are within what a planner knows
    payback: float = 2.0  # times the switch cost that the gain must come to by the end of the run

    def __post_init__(self) -> None:
        for name in ("lengths", "imbalance", "gain"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use a share, 0 or more")
        if self.payback < 1:
            raise ValueError(f"payback is {self.payback}; use 1 (break even) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Whether to switch, and why or why not in one sentence."""

    switch: bool
    reason: str
    saved_s: float = 0.0  # over the rest of the run, the switch paid


def moved(planned: World, now: World, bounds: Hysteresis) -> str:
    """What has moved since the plan was made, in words; empty where nothing has: then no plan is made."""
    told = []
    for name, before, after in zip(
        ("mean", "90 %", "longest"), _lengths(planned), _lengths(now), strict=True
    ):
        if abs(after / before - 1) > bounds.lengths:
            told.append(f"{name} answer {before:.0f} -> {after:.0f} tokens")
    if abs(now.imbalance / planned.imbalance - 1) > bounds.imbalance:
        told.append(f"expert load max/mean {planned.imbalance:.2f} -> {now.imbalance:.2f}")
    return ", ".join(told)


def advise(
    *,
    current: str,
    current_s: float,
    best: str,
    best_s: float,
    switch_s: float,
    steps_left: int,
    bounds: Hysteresis | None = None,
) -> Advice:
    """Should a run that takes ``current_s`` a step under the plan named ``current`` go on under ``best``?

    Seconds of a step are the planner's, for the world as it is now, under either plan; ``switch_s``: a
    checkpoint, a start and what loads. Raises ValueError for seconds that are none.
    """
    bounds = bounds or Hysteresis()
    if min(current_s, best_s) <= 0 or switch_s < 0 or steps_left < 0:
        raise ValueError(
            f"a step of {current_s:g} s or {best_s:g} s, a switch of {switch_s:g} s and {steps_left} steps "
            "left cannot be weighed; give positive seconds"
        )
    if best == current:
        return Advice(switch=False, reason=f"{current} is still the best layout")
    gain = current_s - best_s
    if gain <= bounds.gain * current_s:
        reason = (
            f"{best} would gain {gain / current_s:.1%} a step, within what a plan knows ({bounds.gain:.0%})"
        )
        return Advice(switch=False, reason=reason)
    saved = gain * steps_left - switch_s
    need = bounds.payback * switch_s
    told = f"{best} for {current}: {gain:.3g} s a step for {steps_left} steps is {gain * steps_left:.3g} s"
    if gain * steps_left <= need:
        reason = f"{told}, less than {bounds.payback:g} times the {switch_s:.3g} s of the switch; stay"
        return Advice(switch=False, reason=reason)
    return Advice(switch=True, reason=f"{told}, and the switch costs {switch_s:.3g} s", saved_s=saved)


def _lengths(world: World) -> Sequence[float]:
    answers = np.asarray(world.answers, np.float64)
    return float(answers.mean()), float(np.quantile(answers, 0.9)), float(answers.max())


__all__ = ["Advice", "Hysteresis", "World", "advise", "moved"]
