"""CUDA graphs: the kernels of a pass launched at once, instead of by Python one after the other.

A graph repeats what was launched while it was captured, on the same memory. So what changes between two
passes lies in tensors that are written in place, and nothing inside is read back: ``engine.pass_graphs``.
Tests have a ``Graph`` that repeats operators on a CPU; ``CudaGraph`` never ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Launches that can be repeated."""

    def capture(self, work: Callable[[], None]) -> None:
        """Remember what ``work`` launches; whether it is run by that is open."""
        ...

    def replay(self) -> None:
        """Launch it again, on the memory that it had."""
        ...


class CudaGraph:
    """By ``torch.cuda.CUDAGraph``; ``pool``: of the memory that is allocated inside."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], None]) -> None:
        # kernels are compiled and libraries take their workspace before, which a capture forbids
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        # a trainer may allocate in a thread of its own meanwhile
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], Graph]:
    """Makes graphs with one pool of memory: only one of them runs at a time, and none reads another's."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
