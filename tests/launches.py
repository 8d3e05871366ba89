"""What a pass launches, counted and recorded on a CPU: operators of torch, and kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

READS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "is_nonzero")  # each waits for the card
COPIES = {
    Tensor.cpu,
    Tensor.tolist,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
}  # and these
ALLOCATIONS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
)

Launch = Callable[[], object]


@contextmanager
def kernels(seen: Callable[[str, Launch], None]) -> Iterator[None]:
    """``seen(name, launch)`` of every kernel that is launched in Triton's interpreter inside."""
    launch = GridExecutor.__call__

    def launched(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                launch(self, *args, **kwargs)

        again()
        seen(self.fn.__name__, again)

    with patch.object(GridExecutor, "__call__", launched):
        yield


class Copies(TorchFunctionMode):
    """The names of the methods that copy to the host: on a CPU they are no operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """The names of all that a card would be given inside, in order; views and allocations are no launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._copies = Copies()
        self._kernels = kernels(lambda name, _: self.names.append(name))

    def __enter__(self) -> Launches:
        self._kernels.__enter__()
        self._copies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._copies.__exit__(*args)
        self._kernels.__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        written = any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
        fresh = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        view = all(x.untyped_storage().data_ptr() in inputs for x in fresh)
        if name not in ALLOCATIONS and (written or not view):
            self.names.append(name)
        return result

    @property
    def reads(self) -> list[str]:
        """What waits for the card."""
        return [name for name in self.names if name in READS] + self._copies.names


class Recorded(TorchDispatchMode):
    """A ``Graph`` without a card: it does again what was launched while it was captured, to the same memory.

    Nothing of Python runs in a replay, so a number, a shape or a tensor that was looked up in the captured
    pass stays as it was, as in a graph of CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Launch] = []
        self.replays = 0

    def capture(self, work: Callable[[], None]) -> None:
        with kernels(lambda _, launch: self._launches.append(launch)), self:
            work()

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            for launch in self._launches:
                launch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        assert func.overloadpacket.__name__ not in READS, f"{func} waits for the card"

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        if func.overloadpacket.__name__ not in ALLOCATIONS:
            self._launches.append(again)
        return result
