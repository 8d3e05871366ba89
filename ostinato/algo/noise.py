"""Addressed randomness: a uniform is a pure function of (seed path, position), never of call order.

A counter-based hash (the splitmix64 finaliser, Steele et al., OOPSLA 2014) turns a seed path such as
(run seed, step, prompt, sample) into a 64-bit key, and (key, position) into a number in (0, 1). So the
batch around a request, its preemption or the number of workers cannot change a token. The values are
pinned by a test: with a change to this file, no earlier run could be reproduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import SupportsIndex, overload

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps 0 away from the fixed point of the mixer
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ULP = 2.0**-52


def key(seed: Iterable[SupportsIndex]) -> int:
    """The 64-bit key of a seed path; sensitive to order and length: (1, 2), (2, 1), (1, 2, 0) all differ.

    Raises ValueError for a part outside signed 64 bits, since it would share its key with another one.
    """
    parts = [index(part) for part in seed]  # a float would make the seed depend on rounding
    state = _mix_bits(len(parts) + _GOLDEN)
    for part in parts:
        if not -(1 << 63) <= part < 1 << 63:
            raise ValueError(f"seed part {part} does not fit in 64 signed bits; use a smaller integer")
        state = _mix_bits(state ^ _mix_bits(part + _GOLDEN))
    return state


@overload
def uniform(key: int, position: int) -> float: ...
@overload
def uniform(key: np.ndarray, position: int | np.ndarray) -> np.ndarray: ...
@overload
def uniform(key: int, position: np.ndarray) -> np.ndarray: ...
def uniform(key: int | np.ndarray, position: int | np.ndarray) -> float | np.ndarray:
    """Float64 in the open interval (0, 1), with 52 random bits; arrays (uint64 keys) broadcast.

    Both ends are excluded, so log(u), log1p(-u) and an inverse CDF are always finite.
    """
    if isinstance(key, np.ndarray) or isinstance(position, np.ndarray):
        return _draw_uniform_array(np.asarray(key, dtype=np.uint64), np.asarray(position))
    return ((_mix_bits(index(key) ^ _mix_bits(index(position) + _GOLDEN)) >> 12) + 0.5) * _ULP


def _mix_bits(value: int) -> int:
    """The splitmix64 finaliser of a 64-bit integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _draw_uniform_array(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``uniform`` of uint64 keys and integer positions, broadcast."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point; 0-d arrays would warn
        bits = _mix_bits_of_array(keys ^ _mix_bits_of_array(positions.astype(np.uint64) + np.uint64(_GOLDEN)))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _ULP


def _mix_bits_of_array(values: np.ndarray) -> np.ndarray:
    """``_mix_bits`` of uint64 values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
