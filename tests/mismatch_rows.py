"""Rows of mismatch.jsonl as a run would leave them, from made-up log ratios of plausible sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostinato.observe.mismatch import DIRECTION, arm, routers
from ostinato.types import NO_EXPERT

LAYERS, EXPERTS, TOP_K, SEQUENCES, LENGTH = 6, 32, 4, 32, 60


def mismatch_row(step: int, *, dense: bool = False, on: bool = True, growth: float = 1.0) -> dict[str, Any]:
    """A measured step. Native log ratios have heavy tails, replayed ones a third of them; ``growth`` widens
    both."""
    dice = np.random.default_rng(step)
    owner = np.repeat(np.arange(SEQUENCES), LENGTH)
    small = dice.normal(0, 0.004 * growth, owner.size)
    flipped = dice.random(owner.size) < 0.08
    arms = {"native": arm(small + flipped * dice.standard_t(2, owner.size) * 0.02 * growth, owner)}
    if not dense:
        arms["replay"] = arm(small * 0.9 + flipped * dice.normal(0, 0.01 * growth, owner.size), owner)
    if step == 1:
        arms["floor"] = arm(dice.normal(0, 1e-7, owner.size), owner)
    return {
        "step": step,
        "direction": DIRECTION,
        "replay": on and not dense,
        "arms": arms,
        "routers": None if dense else choice(dice),
        "versions": {"0": owner.size},
        "coverage": 0.0 if dense else 1.0,
        "route_bytes_per_token": None if dense else float(LAYERS * TOP_K),
        "seconds": 1.24,
    }


def choice(dice: np.random.Generator) -> dict[str, Any]:
    """Routers of which some two in a hundred chose another set, more of them in late layers."""
    rows = SEQUENCES * LENGTH
    native = np.argsort(dice.random((rows, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int16)
    recorded = native.copy()
    margins = dice.exponential(0.2, (rows, LAYERS)).astype(np.float32)
    near = margins < 0.002 * np.arange(1, LAYERS + 1)
    recorded[near, 0] = (native[near].max(axis=-1) + 1) % EXPERTS
    recorded[-1] = NO_EXPERT
    starts = np.arange(SEQUENCES) * LENGTH
    spans = np.stack([starts, starts + LENGTH, starts, starts], axis=1)
    return routers(native, recorded, margins, spans=spans)


def routing_metrics(step: int) -> dict[str, float]:
    """The sums that every step of such a run has."""
    wave = 0.002 * np.sin(step)
    return {
        "routing/overlap": 0.992 + wave,
        "routing/lowest_sequence": 0.975 + 2 * wave,
        "routing/differ": 0.021 - wave,
        "routing/replay": 1.0,
        "routing/bytes_per_token": float(LAYERS * TOP_K),
    }
