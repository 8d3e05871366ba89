"""The groups of a run by step, in the report's format for samples: read from one step's frames at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostinato.observe.board.tail import Frame, Frames
from ostinato.observe.report.reading import Row
from ostinato.observe.report.samples import Pieces, content, groups_of, listed
from ostinato.render import Renderer


class Samples:
    """Groups of trajectories.jsonl.zst; those of the step that was read last stay in memory."""

    def __init__(self, path: Path, renderer: Renderer | None) -> None:
        self._frames, self._pieces = Frames(path), Pieces(renderer) if renderer else None
        self._kept: list[Frame] = []
        self._groups: list[list[Row]] = []

    def index(self, step: int = -1) -> dict[str, Any]:
        """{"steps": all recorded steps, "groups": those of ``step``, without their answers}. The last step
        is used if ``step`` is not recorded."""
        self._frames.refresh()
        steps = list(dict.fromkeys(frame.step for frame in self._frames.frames))
        chosen = step if step in steps else next(reversed(steps), -1)
        return {"steps": steps, "groups": [listed(rows) for rows in self._of(chosen)]}

    def group(self, step: int, place: int) -> dict[str, Any]:
        """The group at index ``place`` of the step's ``groups``. Raises ValueError if there is none."""
        groups = self._of(step)
        if not 0 <= place < len(groups):
            raise ValueError(f"step {step} has no group {place}")
        return content(groups[place], self._pieces)[0]

    def _of(self, step: int) -> list[list[Row]]:
        frames = [frame for frame in self._frames.frames if frame.step == step]
        if frames != self._kept:
            self._kept = frames
            self._groups = list(groups_of(row for frame in frames for row in self._frames.rows(frame)))
        return self._groups
