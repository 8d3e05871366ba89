"""The progress of a run for people: a live line on a terminal, plain lines elsewhere; and writers of metrics.

The rows come from the loop with TRL's metric names; everything here is a function of rows, so it is tested
without a terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ostinato.every import NEVER, Every, spent_in_steps
from ostinato.inputs import make_printable
from ostinato.observe.concerns import unsolved
from ostinato.observe.stats import estimate
from ostinato.pipeline.state import describe_unreadable
from ostinato.protocols import MetricWriter
from ostinato.run import GREEDY_SET, MAIN_SET
from ostinato.terminal import Screen

Row = Mapping[str, Any]
StepCallback = Callable[[Row], bool | None]  # gets every row of metrics; True ends the run
LABELS = {MAIN_SET: "held-out", GREEDY_SET: "held-out greedy"}
_ODD_STEPS = {"refused_step": "step refused", "empty_step": "nothing to learn from"}


class Monitor:
    """An ``Observer`` that prints the rows of a run as they come; a context, in which the live line is shown.

    A run of ``total`` steps ends earlier when ``budget`` is spent. ``row``: the last row before this start.
    ``forecaster``: whether the rest of the run is not worth its compute. ``callback``: the user's function of
    a step's row. ``first``: description of the work before the first step.
    """

    forecaster: Callable[[int], bool] | None = None
    callback: StepCallback | None = None

    def __init__(
        self,
        total: int,
        *,
        row: Row | None = None,
        budget: Every = NEVER,
        console: Console | None = None,
        first: str = "",
    ) -> None:
        self.console = console or Screen()
        self._total, self._budget = total, budget
        self._first = int((row or {}).get("step", 0))
        self._first_share = self._share(row or {})
        self._scores: dict[str, str] = {}  # the last of each set, the main one first
        self._doing = first or "sampling the first step"
        self._start = time.perf_counter()
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Monitor:
        if self.console.is_terminal:
            columns = BarColumn(bar_width=12), TextColumn("{task.description}", markup=False)
            live = Progress(*columns, console=self.console)
            self._task = live.add_task(make_printable(self._doing), total=1.0)
            live.update(self._task, completed=self._first_share)
            live.start()
            self._live = live
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, row: Row) -> bool | None:
        """Show a row of metrics.jsonl; True if the callback ends the run."""
        share = self._share(row)
        eta = remaining(time.perf_counter() - self._start, share - self._first_share, 1 - share)
        by_steps = share == int(row["step"]) / self._total
        progress_text = f"/{self._total}" if by_steps else f" ({share:.0%} of what it may spend)"
        held_out = "" if self._live is None else "  ".join(self._scores.values())  # lines above have said it
        parts = step_parts(row, progress_text, held_out, eta)
        if not self._show_text("\n".join(parts), completed=share):
            self.say("  ".join(parts))
        return self.callback(row) if self.callback is not None else None

    def _show_text(self, text: str, completed: float | None = None) -> bool:
        """Put ``text`` on the live line; False without one."""
        if self._live is None or self._task is None:
            return False
        self._live.update(self._task, description=make_printable(text), completed=completed)
        return True

    def _share(self, row: Row) -> float:
        """The finished share of the run, by steps or budget, up to 1."""
        step = int(row.get("step", 0))
        return min(1.0, max(step / self._total, self._budget.share(spent_in_steps(step, row))))

    def on_eval(self, row: Row) -> None:
        """Print a row of eval.jsonl."""
        if row["step"] == self._first:  # before the first step: its time does not count for the pace
            self._start = time.perf_counter()
            self._show_text("further held-out scores, then the first step")
        name = row["set"]
        label, first = LABELS.get(name, name), name not in self._scores
        if name != GREEDY_SET:
            self._scores[name] = f"{label} {interval(row, 'pass@1')} (reward {_number(row, 'reward')})"
        self.say(f"step {row['step']}: {label} {scores(row)} on {row['n']} prompts")
        if tasks := row.get("tasks"):
            self.say(
                "  ".join(
                    (
                        "  of them",
                        *(f"{task} {interval(task_row, 'pass@1')}" for task, task_row in tasks.items()),
                    )
                )
            )
        if name == MAIN_SET and first and (row.get("reward_max") or 0) > 0 and (reason := unsolved([row])):
            self.say(f"warning      {reason}")

    def should_stop(self, step: int) -> bool:
        return self.forecaster is not None and self.forecaster(step)

    def exported(self, row: Row) -> None:
        """Print a row of eval.jsonl that was scored with the model's weights, of a run that samples with
        others."""
        scored = f"held-out {scores(row)} on {row['n']} prompts"
        self.say(f"step {row['step']}: the policy as exported, with the model's weights: {scored}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def step_parts(row: Row, of: str, held_out: str, eta: str) -> tuple[str, str]:
    """A step as two texts, each short enough for a terminal: its rewards, and its speed."""
    learned = [f"step {int(row['step'])}{of}", f"reward {_number(row, 'reward')}"]
    learned += [held_out] if held_out else []
    learned += [words for key, words in _ODD_STEPS.items() if row.get(key)]
    if row.get("empty_step") and (reason := describe_unreadable(row)):
        learned[-1] += f": {reason}"
    took = [f"{_number(row, 'tokens_per_s', ',.0f')} tok/s", per_pass(row), shares(row), f"ETA {eta}"]
    return "  ".join(learned), "  ".join(part for part in took if part)


def per_pass(row: Row) -> str:
    """Tokens per pass with drafts, as "2.31 tok/pass"; empty without drafts."""
    name = "draft/tokens_per_pass"
    return f"{_number(row, name, '.2f')} tok/pass" if name in row else ""


def shares(row: Row, names: Sequence[str] = ("rollout", "reward", "train", "measure", "other")) -> str:
    """Shares of the step's time, as "rollout 61% reward 2% train 35% other 2%"; those of 0 % are left out."""
    time_shares = ((name, row.get(f"time/{name}_share") or 0.0) for name in names)
    return " ".join(f"{name} {share:.0%}" for name, share in time_shares if 0.005 <= share < math.inf)


def remaining(elapsed_s: float, done: float, left: float) -> str:
    """Time for ``left`` at the pace of ``done`` in ``elapsed_s``, as h:mm:ss or m:ss; "?" before any."""
    if done <= 0:
        return "?"
    seconds = round(elapsed_s / done * left)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def scores(row: Row) -> str:
    """Text of pass@1 with its interval, and the mean reward."""
    return f"pass@1 {interval(row, 'pass@1')}, mean reward {_number(row, 'reward')}"


def interval(row: Row, name: str) -> str:
    """Text of a score with its 95 % interval, as "0.312 [0.256, 0.368]"."""
    score = estimate(row, name)
    return score.text() if score else "-"


def _number(row: Row, name: str, form: str = ".3f") -> str:
    value = row.get(name)
    return "-" if value is None or not math.isfinite(value) else format(value, form)


class TensorBoardWriter:
    """Writes event files in ``<run>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        _import_package("tensorboard", "tensorboard")
        self._events = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()


class ClientWriter:
    """Writes to wandb or trackio, which share ``init`` and ``log``."""

    def __init__(self, package: str, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._client = _import_package(package, package)
        options = {"dir": str(folder)} if package == "wandb" else {}
        self._client.init(project="ostinato", name=folder.name, config=dict(recipe), **options)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._client.log(dict(metrics), step=step)


def check_writers(names: Sequence[str]) -> None:
    """Raises ValueError for a writer whose package is missing; called before there is a run folder."""
    for name in names:
        _import_package(name, name)


def open_writers(names: Sequence[str], folder: Path, recipe: Mapping[str, Any]) -> list[MetricWriter]:
    """The writers of ``log.writers`` for the run in ``folder``."""
    return [
        TensorBoardWriter(folder) if name == "tensorboard" else ClientWriter(name, folder, recipe)
        for name in names
    ]


def _import_package(package: str, writer: str) -> Any:
    """The imported package of a writer. Raises ValueError if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f'log.writers has {writer!r} but the package {package!r} is missing; pip install "ostinato[log]"'
        ) from error
