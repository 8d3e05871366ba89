"""Bytes of tensors that are alive, and their peak, by watching every operation that makes one.

For what an allocator's statistics give on a GPU: a CPU has none, and the resident set of a process keeps what
was freed. Storages are counted, so views cost nothing; what an operator takes and frees within itself is not
seen. One thread, whose backward passes run in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes(weights) as live: step()``, then ``live.peak``; ``weights`` are there before."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in before:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._see(value)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of tensors."""
    found: dict[int, UntypedStorage] = {
        one.untyped_storage()._cdata: one.untyped_storage() for one in tensors
    }
    return sum(one.nbytes() for one in found.values())


__all__ = ["LiveBytes", "storages"]
