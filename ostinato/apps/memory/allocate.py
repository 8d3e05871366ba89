"""How many tokens each masked block gets: the best levels within the room that is left, exactly.

The worth of b tokens of a block of n is concave, u(b) = s (1 - exp(-b / tau)) with tau = 0.3 n: the first
tokens of a block are worth most. Where every number of tokens is allowed, water-filling is the optimum (the
tests have it); over the levels that a block may have it is found by dynamic programming over the room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COMPRESSIBILITY = 0.3  # tau as a share of the tokens of the whole


def utility(score: float, whole: int, tokens: float | np.ndarray) -> float | np.ndarray:
    """What ``tokens`` of a block of ``whole`` tokens and importance ``score`` are worth."""
    return score * -np.expm1(-np.asarray(tokens, np.float64) / (COMPRESSIBILITY * max(whole, 1)))


def allocate(
    scores: Sequence[float], wholes: Sequence[int], options: Sequence[Sequence[int]], room: int
) -> list[int]:
    """The index of one option (a number of tokens) for each block, within ``room`` together and worth most.

    Every block needs an option of 0. Between choices that are worth the same to the last bit, the one with
    more tokens for the earlier block is made. Time and memory: blocks x options x room.
    """
    if any(0 not in mine for mine in options) or room < 0:
        raise ValueError(
            f"a room of {room} tokens for options {[list(mine) for mine in options]}; each needs a 0"
        )
    best = np.zeros(room + 1)  # [c]: of the blocks from the last one back, within c tokens
    choices: list[np.ndarray] = []
    for score, whole, mine in reversed(list(zip(scores, wholes, options, strict=True))):
        worth = np.full((len(mine), room + 1), -np.inf)
        for k, tokens in enumerate(mine):
            if tokens <= room:
                worth[k, tokens:] = best[: room + 1 - tokens] + utility(score, whole, tokens)
        order = np.argsort([-tokens for tokens in mine], kind="stable")
        choices.append(order[np.argmax(worth[order], axis=0)])
        best = worth.max(axis=0)
    chosen, left = [], room
    for choice, mine in zip(reversed(choices), options, strict=True):
        chosen.append(int(choice[left]))
        left -= mine[chosen[-1]]
    return chosen


def uniform(options: Sequence[Sequence[int]], room: int) -> list[int]:
    """The same share for all, without regard to importance: the most that fits, for the ablation. Options are
    in falling order."""
    levels = max(len(mine) for mine in options) if options else 0
    for level in range(levels):
        chosen = [min(level, len(mine) - 1) for mine in options]
        if sum(mine[k] for mine, k in zip(options, chosen, strict=True)) <= room:
            return chosen
    return [len(mine) - 1 for mine in options]


__all__ = ["COMPRESSIBILITY", "allocate", "uniform", "utility"]
