"""A drafter that proposes what a script says, whatever it costs: oracle, random and adversarial drafts.

It stands where ``HistoryDrafter`` stands, for tests of exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Proposes ``script(request, tokens so far)``: [d] int token ids, or [leaves, d] for a tree.

    The rows of a tree are merged where they begin alike; a negative id ends a row. At most ``length`` tokens
    deep and, with ``tree`` off or where one leaf is asked for, only the first row. With ``tree`` on, a script
    of one row gets a decoy (the id before it) beside each of its tokens, as far as leaves are allowed. Only
    ``room`` and the largest draft that the pass may hold (``len(seconds) - 1``) limit it: cost does not.
    """

    script: Script
    length: int = 8
    tree: bool = False
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
        parents: list[int] = []
        for handle, room in zip(running.handles.tolist(), running.room.tolist(), strict=True):
            rows = self._rows(handle, min(int(room), self.length), running.leaves)
            nodes = _merged(rows)[:left]  # parents stand first, so any prefix is a tree
            tokens += [token for token, _ in nodes]
            parents += [parent for _, parent in nodes]
            counts.append(len(nodes))
            left -= len(nodes)
        return Drafts(
            counts=np.array(counts, np.int32),
            tokens=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
        )

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

    def _rows(self, handle: int, depth: int, leaves: int) -> list[list[int]]:
        sequence = self._open[handle]
        said = np.asarray(self.script(sequence.request, np.array(sequence.tokens, np.int32)))
        rows = [_until_negative(row)[: max(depth, 0)] for row in np.atleast_2d(said).tolist()]
        if not self.tree or leaves <= 1:
            return rows[:1]
        if len(rows) == 1:
            rows += [[*rows[0][:at], _other(token)] for at, token in enumerate(rows[0])]
        return rows[:leaves]


def _other(token: int) -> int:
    return token - 1 if token else 1  # never beyond the vocabulary


def _until_negative(row: Sequence[int]) -> list[int]:
    end = next((at for at, token in enumerate(row) if token < 0), len(row))
    return [int(token) for token in row[:end]]


def _merged(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(token, parent) of the tree whose paths are ``rows``, the first row first."""
    nodes: list[tuple[int, int]] = []
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for row in rows:
        at = -1
        for token in row:
            if (at, token) not in index:
                index[at, token] = len(nodes)
                nodes.append((token, at))
            at = index[at, token]
    return nodes


__all__ = ["Script", "ScriptedDrafter"]
