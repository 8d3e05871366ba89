"""The search of native/blocks.cpp, slowly: sorting a block, and finding the places of a context in it.

A span is (low, high): the places [low, high) of ``Block.order``, whose suffixes begin with the same tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.history.blocks import EDGE_STEP, END, NARROW, PROBS, Block

DEPTH = 64  # tokens after which two suffixes count as equal

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """One occurrence of a next token."""

    token: int  # END at the end of a document
    edge: float  # its interval [edge, edge + prob) when it was sampled;
    prob: float  # 0 where it was context, which nobody sampled
    reward: int  # of its document, -1, 0 or 1


class PlainStore:
    """``history.store.Store`` without compiled code."""

    pointer = 0

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Block] = {}

    def add(self, key: int, block: Block) -> None:
        self._blocks[key, block.step] = block

    def drop(self, key: int, step: int) -> None:
        del self._blocks[key, step]

    def sort(self, key: int, step: int) -> None:
        if not (block := self._blocks[key, step]).is_sorted:
            sort(block)


def sort(block: Block) -> None:
    """Fill in ``order``."""
    codes = (block.text + 1).astype(">u4").tobytes()  # big-endian: bytes compare as numbers, and END is least
    ends = np.repeat(block.starts[1:], np.diff(block.starts)).tolist()
    inside = np.flatnonzero(block.text != END).tolist()
    block.order[:] = sorted(inside, key=lambda start: codes[4 * start : 4 * min(start + DEPTH, ends[start])])
    block.is_sorted = True


def find(block: Block, context: Sequence[int]) -> Span:
    """The places that begin with ``context``, at most DEPTH tokens."""
    order, tokens, n = block.order, block.tokens, len(context)

    def head(place: int) -> list[int]:
        position = order[place]
        return (tokens[position : position + n] + tokens.dtype.type(1)).tolist()

    wanted = [int(token) + 1 for token in context]
    low = bisect_left(range(block.size), wanted, key=head)
    return low, bisect_right(range(block.size), wanted, lo=low, key=head)


def narrow(block: Block, span: Span, depth: int, token: int) -> Span:
    """The places of ``span`` whose token at ``depth`` is ``token``; ``depth`` is below DEPTH, or the span is
    one place, since deeper tokens are in no order."""
    tokens = [next_at(block, place, depth).token for place in range(*span)]
    return span[0] + bisect_left(tokens, token), span[0] + bisect_right(tokens, token)


def longest(block: Block, context: Sequence[int], least: int) -> tuple[int, Span]:
    """Length and places of the longest suffix of ``context``, of ``least`` to DEPTH - 1 tokens, that occurs
    with a token (not END) after it; 0 and no place where there is none."""
    for length in range(min(len(context), DEPTH - 1), least - 1, -1):
        span = find(block, context[len(context) - length :])
        if any(next_at(block, place, length).token != END for place in range(*span)):
            return length, span
    return 0, (0, 0)


def next_at(block: Block, place: int, depth: int) -> Next:
    """The token ``depth`` after the one at ``place``; it must not lie behind the END of its document."""
    position = int(block.order[place]) + depth
    token = int(block.tokens[position])
    return Next(
        token=END if token == NARROW and not block.wide else token,
        edge=float(block.edges[position]) * EDGE_STEP,
        prob=float(PROBS[block.probs[position]]),
        reward=int(block.rewards[np.searchsorted(block.starts[1:], position, side="right")]),
    )
