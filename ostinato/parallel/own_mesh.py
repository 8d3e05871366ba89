"""Process groups of their own for the ranks of one sampler, beside whatever else a process takes part in.

The driver's process may be rank 0 of a sharded trainer, with torch's default group, and rank 0 of a sampler
with other ranks. So these groups are made one by one from a store, and torch's global state is left alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ostinato.parallel.layout import Layout
from ostinato.parallel.local_store import keep_store

AXES = ("t", "e", "all")  # that ranks with the same rows talk along
_HOST = "127.0.0.1"  # the ranks of a sampler share a host


class OwnMesh:
    """``links.Groups`` of one rank over gloo, all ranks on one host.

    Made on all ranks together: rank 0 first, with ``port`` 0, and the others with the ``port`` that it then
    has. A rank that does not answer for ``timeout_s`` is a RuntimeError in whatever waits for it.
    """

    def __init__(
        self, layout: Layout, rank: int, *, port: int, timeout_s: float, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.rank = layout, rank
        self.device = torch.device(device)
        self._ranks = {axis: layout.group(axis, rank) for axis in AXES}
        self._timeout = timedelta(seconds=timeout_s)
        self._store = keep_store(0, self._timeout) if rank == 0 else self._reached(port)
        self._groups: dict[tuple[int, ...], Any] = {}

    def _reached(self, port: int) -> Any:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            _HOST, port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )

    @property
    def port(self) -> int:
        """Where the ranks meet."""
        return self._store.port

    def connect(self) -> None:
        """Wait for the others, and make the groups; every distinct set of ranks is one."""
        for ranks in dict.fromkeys(self._ranks.values()):
            if len(ranks) > 1:
                name = f"ranks {ranks}"
                store = dist.PrefixStore(name, self._store)  # pyright: ignore[reportPrivateImportUsage]
                self._groups[ranks] = self._gloo(store, ranks.index(self.rank), len(ranks))

    def group(self, axis: str) -> Any:
        return self._groups.get(self._ranks[axis])

    def size(self, axis: str) -> int:
        return len(self._ranks[axis])

    def place(self, axis: str) -> int:
        return self._ranks[axis].index(self.rank)

    def peer(self, axis: str, place: int) -> int:
        return self._ranks[axis][place]

    def _gloo(self, store: Any, place: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]  # type: ignore[attr-defined]
        gloo = dist.ProcessGroupGloo(store, place, size, options)  # type: ignore[attr-defined]
        group, kind = dist.ProcessGroup(store, place, size), dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, gloo)
        return group


__all__ = ["OwnMesh"]
