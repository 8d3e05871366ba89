"""From held-out scores over costs to what a share of the attainable gain has cost. Pure.

A run is {"scores": [s_0 .. s_K], cost: [0 .. c_K]}, at its start and at each of its K checkpoints, for every
cost of ``COSTS``. The curve of a run is the non-decreasing one that is nearest to its scores (isotonic
regression), with straight lines between. The attainable gain is that of the contender whose curves end
highest, as a mean over its seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab import paired
from ostinato.model.flops import FlopModel, Work

COSTS = ("wall_s", "from_start_s", "device_s", "flops", "peak_mb")
SHARES = (0.25, 0.5, 0.75, 0.9)

Run = Mapping[str, Any]


def rising(scores: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the least squared distance: neighbours that violate it are pooled."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for score in scores:
        mean, count = float(score), 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (before * others + mean * count) / (others + count), others + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def cost_of(run: Run, cost: str, target: float) -> float | None:
    """What the run has spent when its curve reaches ``target``; None where it never does."""
    scores, spent = rising(run["scores"]), run[cost]
    for at, score in enumerate(scores):
        if score >= target:
            if not at:
                return spent[0]
            share = (target - scores[at - 1]) / (score - scores[at - 1])
            return spent[at - 1] + share * (spent[at] - spent[at - 1])
    return None


def attainable(runs: Mapping[str, Sequence[Run]]) -> tuple[float, float]:
    """(score before training, the highest mean end of a contender's curves)."""
    before = statistics.fmean(run["scores"][0] for of in runs.values() for run in of)
    return before, max(statistics.fmean(rising(run["scores"])[-1] for run in of) for of in runs.values())


def geometric(values: Sequence[float]) -> dict[str, Any] | None:
    """Geometric mean with its 90 % interval over seeds; None of nothing."""
    if not values:
        return None
    low, mean, high = paired.geometric(values, 0.9)
    return {"mean": mean, "interval": [low, high], "n": len(values)}


def compared(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """By share and cost: what each has spent on the way there, and theirs over ours of the same seed. A run
    that never gets there is counted in ``of`` and not in ``n``; where theirs does not and ours does, its
    whole cost is a lower bound and ``at_least`` counts it."""
    before, best = attainable({"ours": ours, "trl": theirs})
    found: dict[str, Any] = {"before": before, "best": best, "shares": {}}
    for share in SHARES:
        target = before + share * (best - before)
        row: dict[str, Any] = {"target": target}
        for cost in COSTS:
            spent = [[cost_of(run, cost, target) for run in runs] for runs in (ours, theirs)]
            pairs = list(zip(*spent, theirs, strict=True))
            bounded = [(a, run[cost][-1] if b is None else b) for a, b, run in pairs if a]
            row[cost] = {
                "ours": geometric([x for x in spent[0] if x]),
                "trl": geometric([x for x in spent[1] if x]),
                "ratio": geometric([b / a for a, b in bounded]),
                "at_least": sum(b is None and a is not None for a, b, _ in pairs),
                "of": len(pairs),
            }
        found["shares"][str(share)] = row
    return found


def compute(model: FlopModel, groups: Sequence[tuple[int, Sequence[int]]]) -> float:
    """FLOPs that a step requires whose groups are (prompt tokens, tokens of each answer), all trained on: as
    ``pipeline.account.compute_rollout_work`` and a packed batch have it."""
    total = 0.0
    for prompt, answers in groups:
        sampled, answered = sum(answers), [n for n in answers if n]
        seen = sum(n * prompt + n * (n - 1) // 2 for n in answers)  # by all rows that draw a token
        sampling = Work(prompt - 1 + sampled, _causal(prompt - 1) + seen, sampled)
        rows, pairs = sampled - len(answered), seen - prompt * len(answered)
        training = Work(prompt + rows, _causal(prompt) + pairs, sampled) if answered else Work()
        total += model.forward(sampling) + model.forward(training) + model.backward(training)
    return total


def _causal(rows: int) -> int:
    return rows * (rows + 1) // 2
