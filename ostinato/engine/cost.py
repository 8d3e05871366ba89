"""What a pass costs: T(rows, attended positions), measured when the engine starts and refined by every pass.

A pass of few rows waits for the weights and costs nearly the same for 1 or 16 rows; a pass of many rows is
bound by arithmetic. Whether a draft token is worth its row depends on the position of the engine between the
two, so the table is measured on the running engine and never guessed.

    T(rows, attended) = overhead + base(rows) + slope * attended

``overhead`` is the time of the engine outside the model, learnt in the first passes. ``attended`` is the sum
over the rows of the positions they see. ``base`` is piecewise linear over the knots. Knots are close together
where kernels begin another tile of rows: a 17th row can cost as much as the next 15, and a table that
averages over that step makes it look cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

KNOTS = (
    1,
    2,
    4,
    8,
    9,
    12,
    16,
    17,
    24,
    32,
    33,
    48,
    49,
    64,
    65,
    96,
    128,
    129,
    192,
    256,
    257,
    384,
    512,
    1024,
    2048,
)
MEASURED = (1, 4, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 128, 256)
_STEP_SHARE = 0.08  # weight of a new timing against the table
_WINDOW = 32  # passes whose overhead is remembered
_RATIO_BOUNDS = (
    0.6,
    1.6,
)  # a timing outside this band of the table is clipped to it: another process interfered


class CostTable:
    """Predicts the seconds of a pass: linear between two knots, and with the last slope beyond the last."""

    def __init__(self, base: Sequence[float], slope: float = 0.0) -> None:
        """``base``: seconds of a pass of KNOTS[i] rows that attend to nothing."""
        if len(base) != len(KNOTS):
            raise ValueError(
                f"the cost table has {len(base)} entries; give one for each of {len(KNOTS)} knots"
            )
        self._knots = np.array(KNOTS, np.float64)
        self._base = np.maximum.accumulate(np.array(base, np.float64))
        self._slope = slope
        self._overhead, self._num_passes = 0.0, 0
        self._overheads: deque[float] = deque(maxlen=_WINDOW)  # seconds outside the model

    @classmethod
    def measure(cls, run: Callable[[int, int], float], limit_s: float = 0.25, repeats: int = 3) -> CostTable:
        """Make a table from ``run(rows, context)``, which returns the seconds of a pass of ``rows`` rows
        that see ``context`` positions each.

        The measurement ends at the first number of rows, after the second, whose pass takes longer than
        ``limit_s``; larger passes are extrapolated.
        """
        run(1, 16)  # the first pass makes buffers and touches pages, so it is not timed
        rows, seconds = [], []
        for knot in MEASURED:
            rows.append(knot)
            seconds.append(min(run(knot, 16) for _ in range(repeats)))
            if len(rows) > 2 and seconds[-1] > limit_s:
                break
        short_s, long_s = (min(run(8, context) for _ in range(repeats)) for context in (16, 512))
        slope = max(0.0, long_s - short_s) / (8 * (512 - 16))
        knots = np.array(KNOTS, np.float64)
        base = np.interp(knots, rows, seconds)
        # the slope beyond the last row is taken over several knots: a single knot may add no tile
        half_index = next(i for i in range(len(rows)) if 2 * rows[i] >= rows[-1])
        per_row = max(0.0, seconds[-1] - seconds[half_index - 1]) / (rows[-1] - rows[half_index - 1])
        base += np.maximum(0.0, knots - rows[-1]) * per_row - slope * knots * 16
        return cls(np.maximum(base, 1e-6).tolist(), slope)

    def predict_seconds(self, rows: np.ndarray | int, attended: np.ndarray | float) -> np.ndarray:
        """Predict the seconds of passes of ``rows`` rows that see ``attended`` positions in all."""
        rows = np.asarray(rows, np.float64)
        base = np.interp(rows, self._knots, self._base)
        per_row = (self._base[-1] - self._base[-2]) / (self._knots[-1] - self._knots[-2])
        extrapolated_s = np.maximum(0.0, rows - self._knots[-1]) * per_row
        return self._overhead + base + extrapolated_s + self._slope * attended

    def observe(self, rows: int, attended: float, seconds: float) -> None:
        """Move the table towards the ``seconds`` that a pass has taken: the overhead in every fourth pass,
        the knots around ``rows`` after the first _WINDOW passes. The other knots are then raised or lowered
        as far as needed for seconds that never fall with the number of rows."""
        predicted = float(self.predict_seconds(rows, attended))
        self._overheads.append(seconds - (predicted - self._overhead))
        self._num_passes += 1
        if self._num_passes % 4 == 0:  # by the median: some passes are slow because they are the first
            self._overhead = max(0.0, float(np.median(self._overheads)))
        if self._num_passes < _WINDOW:
            return  # the first passes measure the engine more than the model
        predicted = float(self.predict_seconds(rows, attended))
        low, high = _RATIO_BOUNDS
        change = (min(max(seconds / predicted, low), high) - 1.0) * predicted * _STEP_SHARE
        right_knot = int(np.searchsorted(self._knots, rows))
        if right_knot == 0 or right_knot == len(self._knots) or self._knots[right_knot] == rows:
            self._base[min(right_knot, len(self._knots) - 1)] += change
        else:
            left_knot = right_knot - 1
            weight = (rows - self._knots[left_knot]) / (self._knots[right_knot] - self._knots[left_knot])
            self._base[left_knot] += change * (1 - weight)
            self._base[right_knot] += change * weight
        # Knots that are never visited must not contradict those that are.
        middle = min(right_knot, len(self._knots) - 1)
        self._base[: middle + 1] = np.minimum(self._base[: middle + 1], self._base[middle])
        self._base[middle:] = np.maximum(self._base[middle:], self._base[middle])
