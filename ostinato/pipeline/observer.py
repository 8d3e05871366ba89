"""The two seams of the loop beside engine and trainer: what gets its rows, and its workers elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """Receives what a run reports, and may end it early."""

    def on_step(self, row: Mapping[str, float], /) -> bool | None:
        """A row of metrics.jsonl. True ends the run after this step."""

    def on_eval(self, row: Mapping[str, Any], /) -> None:
        """A row of eval.jsonl."""

    def should_stop(self, step: int, /) -> bool:
        """After a score of the main set at ``step``: is the rest of the run not worth its compute?"""
        return False


class Workers(Protocol):
    """The processes and threads that compute for a loop."""

    def progress(self) -> float:
        """Grows with every token sampled and every microbatch trained on."""
        return 0.0

    def extra_metrics(self) -> Mapping[str, float]:
        """More for each row of metrics: of workers, and of what was published."""
        return {}

    def trainer_consistent(self) -> bool:
        """Does the trainer still have its last state, to be saved, after a step that failed?"""
        return False


class Silent(Observer):
    """An observer that shows nothing and never ends a run."""


class InProcess(Workers):
    """The workers of a loop that computes everything itself."""
