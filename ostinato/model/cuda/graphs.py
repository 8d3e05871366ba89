"""CUDA graphs: the kernels of a pass are launched at once, instead of one by one from Python.

A graph repeats the launches that it captured, on the same memory. So values that change between two passes
are in tensors that are written in place, and nothing inside is read back: ``engine.pass_graphs``. Tests have
a ``Graph`` that repeats operators on a CPU; ``CudaGraph`` never ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Launches that can be repeated."""

    def capture(self, work: Callable[[], None]) -> None:
        """Capture the launches of ``work``, which may be run meanwhile."""
        ...

    def replay(self) -> None:
        """Repeat the launches, on the same memory."""
        ...


class CudaGraph:
    """A graph by ``torch.cuda.CUDAGraph``; ``pool``: of the memory that is allocated inside."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], None]) -> None:
        # the first run: compiling kernels and allocating workspaces of libraries is forbidden in a capture
        """Run ``work`` once, and then capture its launches."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        # thread_local, since a trainer may allocate in another thread meanwhile
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        self._graph.replay()


def make_graph_factory() -> Callable[[], Graph]:
    """Return a function that makes graphs. All share a pool of memory, so only one may run at a time, and
    none may read the memory of another."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
