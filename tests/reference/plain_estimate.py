"""P(a draft token is accepted): the twin of native/estimate.h, bit for bit.

A logistic model of what is known about a candidate, learnt online from all those whose place was reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.history.drafter import FEATURES, INITIAL_WEIGHTS
from ostinato.history.rules import Source

LABELS_PER_STEP = 64  # of the Newton method
DAMPING = 8.0  # added to the curvature
MEMORY = 0.98  # of the curvature, from step to step: about 3000 labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What supports a candidate: its best occurrence, and how often it came after this context."""

    u: float  # log-odds of the uniform of the coming position
    edge: float  # the interval of its best occurrence, [edge, edge + prob)
    prob: float  # 0: not known
    count: int  # occurrences of this token ...
    total: int  # ... and of all tokens, after this context
    votes: float  # its share of the occurrences whose interval holds u
    reward: int  # of its best occurrence: -1, 0 or 1
    age: int  # of the block, 0 for the newest
    length: int  # tokens of context that agree
    source: Source


def log_odds(x: float) -> float:
    """log(x / (1 - x)), of x kept away from 0 and 1."""
    x = min(max(x, 1e-6), 1 - 1e-6)
    return math.log(x / (1 - x))


def margin(u: float, edge: float, prob: float) -> float:
    """How far u (in log-odds) lies inside [edge, edge + prob), in log-odds, at most 6; negative: outside.

    Drift of a policy moves the edges by factors, so that 0.001 is far from 0.01, and 0.5 near 0.509.
    """
    low = 6.0 if edge <= 0 else u - log_odds(edge)
    high = 6.0 if edge + prob >= 1 else log_odds(edge + prob) - u
    return min(max(min(low, high), -6.0), 6.0)


def features(about: Evidence) -> list[float]:
    """[FEATURES], each of the order of 1."""
    share = math.log(about.count / (about.total - about.count + 0.5)) / 4
    length = math.log2(1.0 + about.length) / 4
    x = [0.0] * FEATURES
    x[0] = 1.0
    x[5] = length
    x[6], x[7], x[8] = (float(about.source is s) for s in (Source.SIBLING, Source.OWN, Source.OTHER))
    x[9] = about.age / 2
    x[11] = float(about.reward)
    if about.prob > 0:
        inside = margin(about.u, about.edge, about.prob)
        x[1] = max(inside, 0.0) / 4
        x[2] = max(-inside, 0.0) / 4
        x[3] = float(inside > 0)
        x[4] = about.votes
        x[10] = share
        x[15] = length if inside > 0 else 0.0
    else:
        x[12], x[13], x[14] = 1.0, share, length
    return x


class Estimator:
    """Logistic regression by damped Newton steps on the log loss of every LABELS_PER_STEP labels, with a
    curvature that fades: an online Newton step (Hazan, Agarwal and Kale 2007) with forgetting."""

    def __init__(self, weights: Sequence[float] = INITIAL_WEIGHTS) -> None:
        self.weights = list(weights)
        self._gradient = [0.0] * FEATURES
        self._curvature = [[0.0] * FEATURES for _ in range(FEATURES)]  # lower half
        self._labels = 0

    def probability(self, x: Sequence[float]) -> float:
        """P(accepted) of a candidate with these features."""
        total = 0.0
        for weight, value in zip(self.weights, x, strict=True):
            total += weight * value
        return 1 / (1 + math.exp(-min(max(total, -12.0), 12.0)))

    def learn(self, x: Sequence[float], p: float, accepted: bool) -> None:
        """A candidate that was given ``p`` was accepted, or was not."""
        slope = p * (1 - p)
        for i in range(FEATURES):
            self._gradient[i] += (accepted - p) * x[i]
            for j in range(i + 1):
                self._curvature[i][j] += slope * x[i] * x[j]
        self._labels += 1
        if self._labels == LABELS_PER_STEP:
            self._step()

    def _step(self) -> None:
        """weights += (curvature + DAMPING)^-1 gradient."""
        factor = _cholesky(self._curvature)
        move = _solve(factor, self._gradient)
        self.weights = [weight + change for weight, change in zip(self.weights, move, strict=True)]
        self._gradient = [0.0] * FEATURES
        self._curvature = [[MEMORY * value for value in row] for row in self._curvature]
        self._labels = 0


def _cholesky(lower: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lower factor of the matrix plus DAMPING; written out, since LAPACK would sum in another order."""
    factor = [[0.0] * FEATURES for _ in range(FEATURES)]
    for i in range(FEATURES):
        for j in range(i + 1):
            total = lower[i][j] + (DAMPING if i == j else 0.0)
            for k in range(j):
                total -= factor[i][k] * factor[j][k]
            factor[i][j] = math.sqrt(total) if i == j else total / factor[j][j]
    return factor


def _solve(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of factor factor^T x = right."""
    x = [0.0] * FEATURES
    for i in range(FEATURES):
        total = right[i]
        for k in range(i):
            total -= factor[i][k] * x[k]
        x[i] = total / factor[i][i]
    for i in range(FEATURES - 1, -1, -1):
        total = x[i]
        for k in range(i + 1, FEATURES):
            total -= factor[k][i] * x[k]
        x[i] = total / factor[i][i]
    return x
