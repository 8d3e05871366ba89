"""What a memory could keep if it knew what is alive: the ceiling without the questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.forgetting.contenders import Count
from lab.forgetting.policy import GONE, Rules, offered
from lab.forgetting.words import WordPolicy, written
from lab.forgetting.world import History, words_of
from ostinato.apps.memory.blocks import Block, MemoryState
from ostinato.apps.memory.keep import Candidate


@dataclass(slots=True)
class Knowing:
    """In the place of ``Trained``: it keeps the facts that no turn has replaced so far, the newest first, in
    the shortest form of ``words`` that still has them."""

    found: History
    words: WordPolicy
    count: Count
    rules: Rules
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    shortest: dict[int, int] = field(default_factory=dict)  # level by turn, 0: verbatim

    def came(self, block: Block) -> None:
        turn = self.found.turns[block.turn]
        if turn.fact is None:
            return
        self.newest[turn.fact.subject, turn.fact.relation] = turn.idx
        rooms = offered(turn.speaker, turn.text, block.whole, self.count, self.rules.least)
        whole = [
            level
            for level in range(1, GONE)
            if rooms[level] and turn.fact.words <= {*words_of(written(self.words, turn, rooms[level]))}
        ]
        self.shortest[turn.idx] = max(whole, default=0)

    def _alive(self, block: Block) -> bool:
        fact = self.found.turns[block.turn].fact
        return fact is not None and self.newest[fact.subject, fact.relation] == block.turn

    def importance(self, state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
        return [
            one.tokens * (1.0 + (one.level >= self.shortest[one.turn])) + 1e-3 * one.turn
            if self._alive(one)
            else 1e-6 * one.tokens
            for one in blocks
        ]

    def decide(self, state: MemoryState, candidates: Sequence[Candidate], room: int) -> Sequence[int]:
        chosen = []
        for one in candidates:
            best = self.shortest.get(one.block.turn, 0)
            at = one.levels.index(best) if best in one.levels else 0
            chosen.append(at if self._alive(one.block) else len(one.levels) - 1)
        return chosen


__all__ = ["Knowing"]
