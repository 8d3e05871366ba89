"""Rounds: the groups of one training step, from the stream to the spool and back.

With a staleness of k, the policy that step s begins with plays the round of step s + k, so that every batch
(but the first k) is trained on k updates after it was sampled: PipelineRL's off-policyness (arXiv 2509.19128)
in lockstep, in one process and the same to the last bit whenever it is run.

    step          1        2    3    4    5          k = 2, five steps
    plays         1 2 3    4    5    -    -
    trains on     1        2    3    4    5
    staleness     0        1    2    2    2

What was played and not yet trained on cannot be played again, for its policy is gone: a checkpoint names the
rounds, and the spool keeps their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.pipeline.spool import Spool, address
from ostinato.pipeline.stream import places
from ostinato.protocols import Tasks
from ostinato.rollout.play import Ask, Played, Stage, first_request, play
from ostinato.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All that says which groups these are, beside the names of those who have left the stream."""

    step: int  # that trains on it
    cursor: int  # where in the stream it begins
    retired: int  # how many prompts had left by then
    version: int  # of the policy that plays it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Plays rounds of ``prompts`` groups; ``run_ahead`` hears what the round after will ask for."""

    tasks: Tasks
    stage: Stage
    spool: Spool
    prompts: int
    group_size: int
    seed: int
    run_ahead: Callable[[Sequence[Request]], None] | None = None

    def places(self, round: Round, retired: Sequence[str]) -> list[int]:
        """Indices of its prompts in the stream, which ``retired`` have left in this order; empty when all
        have."""
        return places(self.tasks, round.cursor, self.prompts, frozenset(retired[: round.retired]))

    async def play(
        self, round: Round, retired: Sequence[str], *, since: float, coming: Round | None = None
    ) -> list[Played]:
        """The groups in the order of the stream; what the spool had was there at ``since``. ``coming`` is the
        round after, if there is one, as far as it is known."""
        asks = self._asks(round, retired)
        addresses = [address(ask, self.stage, round.version) for ask in asks]
        taken = {i: self.spool.take(addresses[i], ask, since) for i, ask in enumerate(asks)}
        found = {i: played for i, played in taken.items() if played is not None}
        missing = [i for i in range(len(asks)) if i not in found]

        def keep(index: int, item: Played) -> None:
            self.spool.put(addresses[missing[index]], item.group)

        if self.run_ahead is not None and coming is not None:
            self.run_ahead(self._first_requests(coming, retired))
        fresh = await play(self.stage, [asks[i] for i in missing], keep)
        played = found | dict(zip(missing, fresh, strict=True))
        return [played[i] for i in range(len(asks))]

    def recall(self, round: Round, retired: Sequence[str], *, since: float) -> list[Played] | None:
        """The round as an earlier process played it; None where the spool does not have all of it."""
        asks = self._asks(round, retired)
        taken = [self.spool.take(address(ask, self.stage, round.version), ask, since) for ask in asks]
        there = [played for played in taken if played is not None]
        return there if len(there) == len(taken) else None

    def _asks(self, round: Round, retired: Sequence[str]) -> list[Ask]:
        return [
            Ask(
                prompt=self.tasks.prompt(index),
                seed=(self.seed, round.step, index),
                group_size=self.group_size,
                step=round.step,
            )
            for index in self.places(round, retired)
        ]

    def _first_requests(self, round: Round, retired: Sequence[str]) -> list[Request]:
        """What its first turns will ask of the engine; later ones are not known."""
        made = (
            first_request(self.stage, ask.prompt, (*ask.seed, member))
            for ask in self._asks(round, retired)
            for member in range(ask.group_size)
        )
        return [request for request in made if request is not None]


__all__ = ["Round", "Rounds"]
