"""A drafter that proposes what a script says, whatever it costs: oracle, random and adversarial drafts.

It stands where ``HistoryDrafter`` stands, for tests of exactness.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ostinato.types import DraftQuery, Drafts, Request, SampledTokens

Script = Callable[[Request, np.ndarray], np.ndarray]


@dataclass(slots=True, kw_only=True)
class _Open:
    request: Request
    tokens: list[int]


@dataclass(slots=True)
class ScriptedDrafter:
    """Proposes ``script(request, tokens so far)``: [d] int token ids, up to a negative id or ``length``. Only
    ``room`` and the largest draft that the pass may hold (``len(seconds) - 1``) limit it: cost does not.
    """

    script: Script
    length: int = 8
    _open: dict[int, _Open] = field(default_factory=dict)
    _opened: int = 0

    def open(self, request: Request) -> int:
        """A sequence begins; the handle under which it is continued."""
        self._opened += 1
        self._open[self._opened] = _Open(request=request, tokens=[int(token) for token in request.tokens])
        return self._opened

    def propose(self, running: DraftQuery) -> Drafts:
        """The script's tokens for every sequence, in order, until the pass is full."""
        left, counts = len(running.seconds) - 1, []
        tokens: list[int] = []
        for handle, room in zip(running.handles.tolist(), running.room.tolist(), strict=True):
            draft = self._draft(handle, min(int(room), self.length))[:left]
            tokens += draft
            counts.append(len(draft))
            left -= len(draft)
        return Drafts(counts=np.array(counts, np.int32), tokens=np.array(tokens, np.int32))

    def observe(self, emitted: SampledTokens) -> None:
        """Appends what was really sampled."""
        start = 0
        for handle, count, ended in zip(
            emitted.handles.tolist(), emitted.counts.tolist(), emitted.ended.tolist(), strict=True
        ):
            self._open[handle].tokens += emitted.tokens[start : start + count].tolist()
            start += count
            if ended:
                del self._open[handle]

    def _draft(self, handle: int, depth: int) -> list[int]:
        sequence = self._open[handle]
        output = self.script(sequence.request, np.array(sequence.tokens, np.int32))
        return list(itertools.takewhile(lambda token: token >= 0, output.tolist()))[: max(depth, 0)]
