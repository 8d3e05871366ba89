"""Groups in flight: from the stream to the rollouts, to the spool and back.

With a staleness of k, the policy that step s begins with plays the round of step s + k, so that every batch
(but the first k) is trained on k updates after it was sampled: PipelineRL's off-policyness (arXiv 2509.19128)
in lockstep, in one process and the same to the last bit whenever it is run.

    step          1        2    3    4    5          k = 2, five steps
    plays         1 2 3    4    5    -    -
    trains on     1        2    3    4    5
    staleness     0        1    2    2    2

Groups played but not yet trained on cannot be played again, since their policy is gone: a checkpoint names
them, and the spool keeps them. Where and when a group is played changes nothing but the policy in flight: its
noise is addressed by its admission.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ostinato.pipeline.spool import Spool, address
from ostinato.protocols import Tasks
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, RolloutResult, rollout_group, verdicts
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


class Admission(NamedTuple):
    """Identifies a group, and its age. A checkpoint has one for each group in flight."""

    round: int  # the step that trains on it if nothing intervenes: a part of its seed
    place: int  # of its prompt in the stream; no place is taken twice
    step: int  # how many were finished when it was admitted
    version: int  # of the policy that was published then
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Plays groups of ``group_size``, ``prompts`` in a round."""

    tasks: Tasks
    stage: RolloutContext
    spool: Spool
    prompts: int
    group_size: int
    seed: int
    staleness: int = 0

    def places(self, cursor: int, retired: Iterable[str], count: int = 0) -> list[int]:
        """Stream indices of the next ``count`` prompts (0: a round of them), without ``retired`` ones; empty
        when all have left."""
        return places(self.tasks, cursor, count or self.prompts, frozenset(retired))

    async def play(
        self, admission: Admission, *, since: float, generated: Callable[[], None] = lambda: None
    ) -> RolloutResult:
        """Play the group, or read it from the spool, with ``since`` as its times. ``generated`` is called
        when the last answer is sampled and only the verdict is missing."""
        result = self.recall(admission, admission.version, since=since)
        if result is not None:
            return result
        ask = self._ask(admission)
        played = await rollout_group(self.stage, ask, generated)
        self.spool.put(self.address(admission), played.group, until=admission.step + self.staleness + 1)
        return played

    def recall(self, admission: Admission, version: int, *, since: float) -> RolloutResult | None:
        """The group as an earlier process played it; None where the spool does not have it, or where it has
        tokens of a policy later than ``version``, which does not exist in this run, or not yet."""
        return self.spool.take(self.address(admission), self._ask(admission), since, newest=version)

    def uid(self, admission: Admission) -> str:
        """The uid of its prompt."""
        return self.tasks.prompt(admission.place).uid

    def address(self, admission: Admission) -> str:
        return address(self._ask(admission), self.stage, admission.version)

    def _ask(self, admission: Admission) -> RolloutRequest:
        return RolloutRequest(
            prompt=self.tasks.prompt(admission.place),
            seed=(self.seed, admission.round, admission.place),
            group_size=self.group_size,
            step=admission.round,
        )
