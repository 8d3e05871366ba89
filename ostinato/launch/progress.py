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
    """An ``Observer`` that prints the rows of a run as they come. It is a context in which a terminal has a
    live line, on which steps are shown instead.

    A run of ``num_steps`` steps ends earlier when ``budget`` is spent. ``row``: the last row before this
    start. ``description``: of the work before the first step. ``forecaster`` is called with a step and
    returns whether the rest of the run is not worth its compute; ``callback``: the user's function of a
    step's row."""

    forecaster: Callable[[int], bool] | None = None
    callback: StepCallback | None = None

    def __init__(
        self,
        num_steps: int,
        *,
        row: Row | None = None,
        budget: Every = NEVER,
        console: Console | None = None,
        description: str = "",
    ) -> None:
        self.console = console or Screen()
        self._num_steps, self._budget = num_steps, budget
        self._start_step = int((row or {}).get("step", 0))
        self._start_share = self._compute_share(row or {})
        self._scores: dict[str, str] = {}  # the newest text of each set, the main one first
        self._description = description or "sampling the first step"
        self._start = time.perf_counter()
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Monitor:
        if self.console.is_terminal:
            columns = BarColumn(bar_width=12), TextColumn("{task.description}", markup=False)
            live = Progress(*columns, console=self.console)
            self._task = live.add_task(make_printable(self._description), total=1.0)
            live.update(self._task, completed=self._start_share)
            live.start()
            self._live = live
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, row: Row) -> bool | None:
        """Show a row of metrics.jsonl and call the callback; returns True if that ends the run."""
        share = self._compute_share(row)
        eta = format_remaining_time(time.perf_counter() - self._start, share - self._start_share, 1 - share)
        is_by_steps = share == int(row["step"]) / self._num_steps
        progress_text = f"/{self._num_steps}" if is_by_steps else f" ({share:.0%} of what it may spend)"
        # without a live line the scores were printed as lines of their own
        held_out = "" if self._live is None else "  ".join(self._scores.values())
        parts = describe_step(row, progress_text, held_out, eta)
        if not self._show_text("\n".join(parts), completed=share):
            self.say("  ".join(parts))
        return self.callback(row) if self.callback is not None else None

    def _show_text(self, text: str, completed: float | None = None) -> bool:
        """Put ``text`` on the live line and move its bar to ``completed``; returns False if there is none."""
        if self._live is None or self._task is None:
            return False
        self._live.update(self._task, description=make_printable(text), completed=completed)
        return True

    def _compute_share(self, row: Row) -> float:
        """Return the finished share of the run: the larger one of steps and budget, at most 1."""
        step = int(row.get("step", 0))
        return min(1.0, max(step / self._num_steps, self._budget.share(spent_in_steps(step, row))))

    def on_eval(self, row: Row) -> None:
        """Print a row of eval.jsonl, and keep its scores for the live line, unless the set is the greedy one.
        A row before the first step restarts the clock of the remaining time. The first row of the main set is
        followed by a warning if it has no solved answer."""
        if row["step"] == self._start_step:
            self._start = time.perf_counter()
            self._show_text("further held-out scores, then the first step")
        name = row["set"]
        label, is_first = LABELS.get(name, name), name not in self._scores
        if name != GREEDY_SET:
            self._scores[name] = (
                f"{label} {format_interval(row, 'pass@1')} (reward {_format_number(row, 'reward')})"
            )
        self.say(f"step {row['step']}: {label} {format_scores(row)} on {row['n']} prompts")
        if tasks := row.get("tasks"):
            self.say(
                "  ".join(
                    (
                        "  of them",
                        *(
                            f"{task} {format_interval(task_row, 'pass@1')}"
                            for task, task_row in tasks.items()
                        ),
                    )
                )
            )
        if name == MAIN_SET and is_first and (row.get("reward_max") or 0) > 0 and (reason := unsolved([row])):
            self.say(f"warning      {reason}")

    def should_stop(self, step: int) -> bool:
        return self.forecaster is not None and self.forecaster(step)

    def print_exported(self, row: Row) -> None:
        """Print a row of eval.jsonl of the exported policy, which was sampled with other weights than the
        run's."""
        text = f"held-out {format_scores(row)} on {row['n']} prompts"
        self.say(f"step {row['step']}: the policy as exported, with the model's weights: {text}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe_step(row: Row, progress: str, held_out: str, eta: str) -> tuple[str, str]:
    """Describe a step by two texts, each short enough for a terminal: its rewards, and its speed.
    ``progress`` follows the step's number; ``held_out``: scores, or ""; ``eta``: the remaining time."""
    learning = [f"step {int(row['step'])}{progress}", f"reward {_format_number(row, 'reward')}"]
    learning += [held_out] if held_out else []
    learning += [words for key, words in _ODD_STEPS.items() if row.get(key)]
    if row.get("empty_step") and (reason := describe_unreadable(row)):
        learning[-1] += f": {reason}"
    speed = [
        f"{_format_number(row, 'tokens_per_s', ',.0f')} tok/s",
        describe_pass(row),
        describe_shares(row),
        f"ETA {eta}",
    ]
    return "  ".join(learning), "  ".join(part for part in speed if part)


def describe_pass(row: Row) -> str:
    """Return the tokens per pass with drafts, as "2.31 tok/pass"; empty without drafts."""
    name = "draft/tokens_per_pass"
    return f"{_format_number(row, name, '.2f')} tok/pass" if name in row else ""


def describe_shares(
    row: Row, names: Sequence[str] = ("rollout", "reward", "train", "measure", "other")
) -> str:
    """Return the shares of the step's time, as "rollout 61% reward 2% train 35% other 2%", without those
    below 0.5 %."""
    time_shares = ((name, row.get(f"time/{name}_share") or 0.0) for name in names)
    return " ".join(f"{name} {share:.0%}" for name, share in time_shares if 0.005 <= share < math.inf)


def format_remaining_time(elapsed_s: float, finished_share: float, remaining_share: float) -> str:
    """Return the time for ``remaining_share`` at the pace of ``finished_share`` in ``elapsed_s``, as h:mm:ss
    or m:ss; "?" if nothing is finished."""
    if finished_share <= 0:
        return "?"
    seconds = round(elapsed_s / finished_share * remaining_share)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def format_scores(row: Row) -> str:
    """Return the text of pass@1 with its interval, and of the mean reward."""
    return f"pass@1 {format_interval(row, 'pass@1')}, mean reward {_format_number(row, 'reward')}"


def format_interval(row: Row, name: str) -> str:
    """Return the text of a score with its 95 % interval, as "0.312 [0.256, 0.368]"; "-" without the score."""
    score = estimate(row, name)
    return score.text() if score else "-"


def _format_number(row: Row, name: str, form: str = ".3f") -> str:
    value = row.get(name)
    return "-" if value is None or not math.isfinite(value) else format(value, form)


class TensorBoardWriter:
    """Writes event files in ``<run>/tensorboard``. Raises ValueError if the package is missing."""

    def __init__(self, folder: Path) -> None:
        _import_package("tensorboard", "tensorboard")
        self._events = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()


class ClientWriter:
    """Writes to wandb or trackio, which share ``init`` and ``log``; starts a run of theirs. Raises ValueError
    if the package is missing."""

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
    """Open the writers ``names`` for the run in ``folder``: event files, or a run of wandb or trackio."""
    return [
        TensorBoardWriter(folder) if name == "tensorboard" else ClientWriter(name, folder, recipe)
        for name in names
    ]


def _import_package(package: str, writer: str) -> Any:
    """Import the package of a writer. Raises ValueError if that fails."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f'log.writers has {writer!r} but the package {package!r} is missing; pip install "ostinato[log]"'
        ) from error
