"""The process groups of a layout, as one rank has them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ostinato.parallel.layout import Coords, Layout

AXES = ("d", "t", "p", "c", "f", "e", "r", "s", "dc", "dcf", "rows", "all")


class Mesh:
    """Who is where in a layout, and a process group for each axis on which there are several.

    Made on all ranks together, since torch makes groups together: every distinct set of ranks is one group.
    ``timeout_s`` bounds every collective; None: torch's 30 minutes. Raises ValueError where the ranks that
    were started are not those of the layout.
    """

    def __init__(
        self, layout: Layout, device: torch.device | str = "cpu", *, timeout_s: float | None = None
    ) -> None:
        started = dist.get_world_size() if dist.is_initialized() else 1
        if started != layout.world:
            raise ValueError(
                f"layout {layout} is for {layout.world} ranks, but {started} were started; start "
                f"{layout.world}, or choose another layout"
            )
        self.layout = layout
        self.device = torch.device(device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coords: Coords = layout.coords(self.rank)
        self._ranks = {axis: layout.group(axis, self.rank) for axis in AXES}
        groups: dict[tuple[int, ...], Any] = {}
        # a new group does not take over that of the default group
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for axis in AXES:
            for other in range(layout.world):
                ranks = layout.group(axis, other)
                if len(ranks) > 1 and ranks not in groups:
                    # in the order given, so that a place on the axis is a rank of the group
                    groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        self._groups = {axis: groups.get(ranks) for axis, ranks in self._ranks.items()}

    def group(self, axis: str) -> Any:
        """The process group of an axis; None where this rank is alone on it."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        return len(self._ranks[axis])

    def place(self, axis: str) -> int:
        return self._ranks[axis].index(self.rank)

    def peer(self, axis: str, place: int) -> int:
        """The global rank at a place of an axis."""
        return self._ranks[axis][place]
