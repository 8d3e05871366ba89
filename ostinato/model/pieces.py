"""Where the part of a tensor that ``share.placed`` names lies, block by block. No torch here.

A part is a product of spans, one tuple of ranges for each dimension, so it falls into solid blocks::

    spans ((0..2, 6..8), (0..4,)) of a whole [8, 4]       whole[0:2, 0:4] is part[0:2, 0:4]
                                                          whole[6:8, 0:4] is part[2:4, 0:4]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ostinato.model.share import Spans

Box = tuple[slice, ...]


def blocks(spans: Sequence[Spans]) -> Iterator[tuple[Box, Box]]:
    """(where in the whole, where in the part) of every solid block of a part, in the order of the part."""
    by_dimension = []
    for kept in spans:
        places, start = [], 0
        for span in kept:
            places.append((slice(span.start, span.stop), slice(start, start + len(span))))
            start += len(span)
        by_dimension.append(places)
    for block in product(*by_dimension):
        yield tuple(whole for whole, _ in block), tuple(part for _, part in block)


def is_whole(spans: Sequence[Spans], shape: Sequence[int]) -> bool:
    """Is the part all of ``shape``, in its own order?"""
    return all(kept == (range(size),) for kept, size in zip(spans, shape, strict=True))


__all__ = ["Box", "blocks", "is_whole"]
