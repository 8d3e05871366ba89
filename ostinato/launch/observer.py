"""The observer of a run: shows it on the screen, and may end it by a forecast or for a better layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ostinato.config import Recipe
from ostinato.launch.forecast import new_forecaster
from ostinato.launch.progress import Monitor
from ostinato.pipeline.signals import in_thread
from ostinato.protocols import MetricWriter
from ostinato.run import RunFolder

if TYPE_CHECKING:
    from ostinato.plan.again import Replanner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObserver:
    """``pipeline.observer.Observer`` of a run with a recipe."""

    monitor: Monitor
    forecaster: Callable[[int], bool] | None
    replanner: Replanner | None

    def on_step(self, row: Mapping[str, float]) -> None:
        self.monitor.step(row)

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.monitor.evaluated(row)

    def should_stop(self, step: int) -> bool:
        return self.forecaster is not None and self.forecaster(step)

    async def should_replan(self, step: int) -> bool:
        return self.replanner is not None and await in_thread(partial(self.replanner, step))

    @property
    def resume(self) -> str:
        """The command that resumes the run under the layout found better; empty without one."""
        return "" if self.replanner is None else self.replanner.command


def new_observer(
    recipe: Recipe, run: RunFolder, monitor: Monitor, writers: Sequence[MetricWriter]
) -> RunObserver:
    replanner = None
    if recipe.parallel.replan:
        from ostinato.plan.again import Replanner

        replanner = Replanner(run)
    forecaster = new_forecaster(recipe, run, writers)
    return RunObserver(monitor=monitor, forecaster=forecaster, replanner=replanner)
