"""Lengths of answers where only their mean and their limit are known: a lognormal, cut off at the limit."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

from ostinato.inputs import parse_json

SPREAD = 0.8  # of ln length: reasoning answers before they are cut off; measured lengths are better
NUMBER = 256


def lognormal_lengths(
    mean: float, most: int, *, spread: float = SPREAD, number: int = NUMBER
) -> tuple[int, ...]:
    """``number`` equally likely quantiles of a lognormal, none above ``most``, whose mean is ``mean`` within
    a token. Raises ValueError for a mean that the limit does not leave room for."""
    if not 1 <= mean <= most:
        raise ValueError(f"answer-tokens is {mean:g}; use 1 to max-answer ({most})")
    normal = NormalDist()
    shape = [math.exp(spread * normal.inv_cdf((index + 0.5) / number)) for index in range(number)]

    def lengths(scale: float) -> list[float]:
        return [min(most, max(1.0, scale * one)) for one in shape]

    low, high = 1e-6, most / shape[0]
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sum(lengths(middle)) < mean * number else (low, middle)
    return tuple(max(1, round(one)) for one in lengths(high))


def read_lengths(path: Path) -> tuple[int, ...]:
    """Measured lengths: a JSON list of positive whole numbers. Raises ValueError, in one sentence."""
    try:
        read = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"answers is {path}, which cannot be read ({error}); give a JSON list") from error
    if not isinstance(read, list) or not read or not all(isinstance(n, int) and n > 0 for n in read):
        raise ValueError(f"answers is {path}; it must hold a JSON list of lengths in tokens")
    return tuple(read)


__all__ = ["NUMBER", "SPREAD", "lognormal_lengths", "read_lengths"]
