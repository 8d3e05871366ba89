"""The stream of prompts: which places of it a step takes, and which prompts have left it for good.

The order is the tasks' own, epoch after epoch, and a place is an index into it. A prompt that the policy
solves is sampled in vain: all its answers get equal rewards. ScaleRL's "No-Positive-Resampling" (arXiv
2510.13786, section 4) removes it from all later epochs, which here means that its places are passed over:

    epoch 0      | epoch 1      | epoch 2
    a  b  c  d   | c  a  d  b   | b  d  a  c          steps of two prompts; b leaves after step 1
    [ 1 ]  [ 2 ] | [ 3 ]  [ 4      -  ]  [ 5 ]

The order of the others never changes, nor does the noise of a place, which is addressed by its index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ostinato.protocols import Tasks
from ostinato.rollout.rollout import verdicts
from ostinato.types import Group


def places(tasks: Tasks, cursor: int, count: int, retired: Collection[str]) -> list[int]:
    """The next ``count`` indices of the stream from ``cursor`` on whose prompts (by uid) are not ``retired``.

    The next cursor is the last of them plus 1. Empty when no prompt is left: 2 ``tasks.epoch`` places in a
    row contain every prompt. While fewer are left than are requested, a prompt comes once in each epoch, so
    more than once in a step.
    """
    if not retired:
        return list(range(cursor, cursor + count))
    indices, index, last_there = list[int](), cursor, cursor
    while len(indices) < count:
        if tasks.prompt(index).uid not in retired:
            last_there = index
            indices.append(index)
        elif index - last_there >= 2 * tasks.epoch:
            return []
        index += 1
    return indices


def find_solved(
    groups: Sequence[Group], *, share: float, solved_at: float, retired: Collection[str] = ()
) -> tuple[str, ...]:
    """The uids, in order, of prompts that leave: at least two members of the group have a verdict, and at
    least ``share`` of these a reward of ``solved_at`` or more. Those in ``retired`` are left out."""
    gone: dict[str, None] = {}  # a set that keeps its order
    for group in groups:
        values = verdicts(group)
        judged = values[np.isfinite(values)]
        enough = len(judged) >= 2 and (judged >= solved_at).mean() >= share
        if enough and group.prompt.uid not in retired:
            gone[group.prompt.uid] = None
    return tuple(gone)
