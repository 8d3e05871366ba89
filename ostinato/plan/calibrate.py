"""What a plan said against what was measured, and the factors by which its terms are put right.

A plan's seconds of a step are a sum over terms, t_k. Measured steps m_i of several configurations give
factors f_k by ridge regression, every step weighing by its relative error:

    minimise  sum_i ((m_i - sum_k f_k t_ik) / m_i)^2  +  strength * sum_k (f_k / f - 1)^2   f_k in bounds

where f is the one factor that fits best. So terms that no measurement tells apart move together, and one step
alone moves all of its terms alike. Factors are kept per machine, beside other measured facts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.files import cache_folder, read_cached
from ostinato.plan.roofline import Efficiency
from ostinato.run import atomic_write

STRENGTH = 0.02  # one measured step outweighs the prior of a term that is a seventh of it
LOW, HIGH = 0.05, 50.0  # factors beyond mean that the model is wrong, not its efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured configuration: ``terms`` of its plan in seconds, "phase/term", and what they really
    took."""

    name: str
    terms: Mapping[str, float]
    seconds: float

    @property
    def predicted(self) -> float:
        return sum(self.terms.values())

    def under(self, factors: Mapping[str, float]) -> float:
        """Seconds that the plan says with ``factors``."""
        return sum(seconds * factors.get(term, 1.0) for term, seconds in self.terms.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors by "phase/term", and how far measured steps were from the plan with them: the median and the
    largest relative error over ``observations``. ``efficiency``: fields of ``roofline.Efficiency`` with which
    the terms were made, where they are not its defaults."""

    factors: Mapping[str, float]
    median: float
    worst: float
    observations: int
    efficiency: Mapping[str, float] = field(default_factory=dict)


def calibrate(observed: Sequence[Observation], strength: float = STRENGTH) -> Calibration:
    """Fit the factors. Raises ValueError for a measurement that is no positive time, or none at all."""
    if not observed:
        raise ValueError("nothing was measured; give at least one step with its plan")
    if odd := [one.name for one in observed if one.seconds <= 0 or one.predicted <= 0]:
        raise ValueError(f"{odd[0]} took or was planned to take no time; leave it out")
    names = sorted({term for one in observed for term in one.terms})
    relative = np.array([[one.terms.get(name, 0.0) / one.seconds for name in names] for one in observed])
    solved = _bounded_ridge(relative, strength)
    factors = {name: float(factor) for name, factor in zip(names, solved, strict=True)}
    median, worst = errors(observed, factors)
    return Calibration(factors=factors, median=median, worst=worst, observations=len(observed))


def errors(observed: Sequence[Observation], factors: Mapping[str, float]) -> tuple[float, float]:
    """(median, largest) relative error of the plan with ``factors``."""
    off = np.abs([one.under(factors) / one.seconds - 1 for one in observed])
    return float(np.median(off)), float(off.max())


def _bounded_ridge(relative: np.ndarray, strength: float) -> np.ndarray:
    """The minimum over f of |1 - A f|^2 + strength |f / scale - 1|^2 with LOW <= f <= HIGH. What would leave
    the bounds is held there, one at a time, and the others are solved anew.

    ``scale`` is the one factor that fits best: where all is off (other hardware), the prior is of
    proportions.
    """
    target = np.ones(len(relative))
    whole = relative.sum(axis=1)
    scale = float(np.clip((whole @ target) / (whole @ whole), LOW, HIGH))
    matrix = relative * scale  # of f / scale, which is near 1
    free, solved = np.ones(matrix.shape[1], bool), np.ones(matrix.shape[1])
    for _ in range(matrix.shape[1] + 1):
        rest = target - matrix[:, ~free] @ solved[~free]
        a = matrix[:, free]
        left = a.T @ a + strength * np.eye(a.shape[1])
        solved[free] = np.linalg.solve(left, a.T @ rest + strength)
        bound = np.clip(solved, LOW / scale, HIGH / scale)
        outside = free & (bound != solved)
        if not outside.any():
            break
        worst = int(np.argmax(np.where(outside, np.abs(np.log(np.maximum(solved, 1e-9) / bound)), -1)))
        solved[worst], free[worst] = bound[worst], False
    return np.clip(solved * scale, LOW, HIGH)


def kept_file(machine: str) -> Path:
    """Of a kind of device: ``~/.cache/ostinato/plan-<hash>.json``; XDG_CACHE_HOME is honoured."""
    name = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return cache_folder() / f"plan-{name}.json"


def keep(calibration: Calibration, file: Path) -> None:
    """Write what was found."""
    atomic_write(file, json.dumps(as_json(calibration), indent=2))


def as_json(calibration: Calibration) -> dict[str, Any]:
    """As ``parsed`` reads it."""
    return {
        "factors": dict(calibration.factors),
        "median": calibration.median,
        "worst": calibration.worst,
        "observations": calibration.observations,
        "efficiency": dict(calibration.efficiency),
    }


def kept(file: Path) -> Calibration | None:
    """What was found earlier; None where there is nothing that can be read, or of another version: without
    the efficiencies that its terms were made with, or with others than there are now."""
    return read_cached(file, parsed)


def parsed(read: Mapping[str, Any]) -> Calibration:
    """What ``as_json`` told. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
    factors = {str(name): float(factor) for name, factor in read["factors"].items()}
    if not all(0 < factor < math.inf for factor in factors.values()):
        raise ValueError("a factor is not positive and finite")
    return Calibration(
        factors=factors,
        median=float(read["median"]),
        worst=float(read["worst"]),
        observations=int(read["observations"]),
        efficiency=_known(read["efficiency"]),
    )


def _known(read: Mapping[str, Any]) -> dict[str, float]:
    """Fields of ``Efficiency``. Raises ValueError for one that there is not."""
    names = {one.name for one in fields(Efficiency)}
    if other := [name for name in read if name not in names]:
        raise ValueError(f"efficiency has {other[0]!r}, which is none of {', '.join(sorted(names))}")
    return {name: value if isinstance(value, bool) else float(value) for name, value in read.items()}


__all__ = [
    "Calibration",
    "Observation",
    "as_json",
    "calibrate",
    "errors",
    "keep",
    "kept",
    "kept_file",
    "parsed",
]
