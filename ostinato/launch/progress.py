"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, a table at the end.

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
from ostinato.inputs import printable
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
    """An ``Observer`` that shows the rows of a run as they come. A context: the live line ends with it.

    A run of ``total`` steps ends earlier where ``budget`` is spent. ``row``: the last before this start.
    ``forecaster``: is the rest of the run not worth its compute? ``callback``: what a user does with the row
    of a step. ``first``: what is done before a step.
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
            self._task = live.add_task(printable(self._doing), total=1.0)
            live.update(self._task, completed=self._first_share)
            live.start()
            self._live = live
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, row: Row) -> bool | None:
        """A row of metrics.jsonl. True: the callback ends the run."""
        share = self._share(row)
        eta = remaining(time.perf_counter() - self._start, share - self._first_share, 1 - share)
        by_steps = share == int(row["step"]) / self._total
        of = f"/{self._total}" if by_steps else f" ({share:.0%} of what it may spend)"
        parts = step_parts(row, of, "  ".join(self._scores.values()), eta)
        if not self._describe("\n".join(parts), completed=share):
            self.say("  ".join(parts))
        return self.callback(row) if self.callback is not None else None

    def _describe(self, text: str, completed: float | None = None) -> bool:
        """On the live line; False where there is none."""
        if self._live is None or self._task is None:
            return False
        self._live.update(self._task, description=printable(text), completed=completed)
        return True

    def _share(self, row: Row) -> float:
        """How much of the run is done."""
        step = int(row.get("step", 0))
        return min(1.0, max(step / self._total, self._budget.share(spent_in_steps(step, row))))

    def on_eval(self, row: Row) -> None:
        """A row of eval.jsonl."""
        if row["step"] == self._first:  # scored before the first step: no part of the pace
            self._start = time.perf_counter()
            self._describe("further held-out scores, then the first step")
        name = row["set"]
        label, first = LABELS.get(name, name), name not in self._scores
        if name != GREEDY_SET:
            self._scores[name] = f"{label} {interval(row, 'pass@1')} (reward {_number(row, 'reward')})"
        self.say(f"step {row['step']}: {label} {scores(row)} on {row['n']} prompts")
        if tasks := row.get("tasks"):
            self.say(
                "  ".join(("  of them", *(f"{one} {interval(its, 'pass@1')}" for one, its in tasks.items())))
            )
        if name == MAIN_SET and first and (row.get("reward_max") or 0) > 0 and (why := unsolved([row])):
            self.say(f"warning      {why}")

    def should_stop(self, step: int) -> bool:
        return self.forecaster is not None and self.forecaster(step)

    def exported(self, row: Row) -> None:
        """A row of eval.jsonl with the model's weights, of a run that samples with others."""
        scored = f"held-out {scores(row)} on {row['n']} prompts"
        self.say(f"step {row['step']}: the policy as exported, with the model's weights: {scored}")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def step_parts(row: Row, of: str, held_out: str, eta: str) -> tuple[str, str]:
    """One step in two halves, each short enough for a terminal: what was learned, and what it took."""
    learned = [f"step {int(row['step'])}{of}", f"reward {_number(row, 'reward')}"]
    learned += [held_out] if held_out else []
    learned += [words for key, words in _ODD_STEPS.items() if row.get(key)]
    if row.get("empty_step") and (unread := describe_unreadable(row)):
        learned[-1] += f": {unread}"
    took = [f"{_number(row, 'tokens_per_s', ',.0f')} tok/s", per_pass(row), shares(row), f"ETA {eta}"]
    return "  ".join(learned), "  ".join(part for part in took if part)


def per_pass(row: Row) -> str:
    """What drafts gave: "2.31 tok/pass"; nothing where none are made."""
    name = "draft/tokens_per_pass"
    return f"{_number(row, name, '.2f')} tok/pass" if name in row else ""


def shares(row: Row, names: Sequence[str] = ("rollout", "reward", "train")) -> str:
    """Where the seconds of the step went: "rollout 61% reward 2% train 35%"."""
    known = [(name, row.get(f"time/{name}_share")) for name in names]
    return " ".join(
        f"{name} {share:.0%}" for name, share in known if share is not None and math.isfinite(share)
    )


def remaining(elapsed_s: float, done: float, left: float) -> str:
    """Minutes and seconds for what is ``left`` at the pace so far, in the unit of ``done``."""
    if done <= 0:
        return "?"
    seconds = round(elapsed_s / done * left)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def scores(row: Row) -> str:
    """pass@1 with its interval, and the mean reward beside it."""
    return f"pass@1 {interval(row, 'pass@1')}, mean reward {_number(row, 'reward')}"


def interval(row: Row, name: str) -> str:
    """A score with its 95 % interval: "0.312 [0.256, 0.368]"."""
    score = estimate(row, name)
    return score.text() if score else "-"


def _number(row: Row, name: str, form: str = ".3f") -> str:
    value = row.get(name)
    return "-" if value is None or not math.isfinite(value) else format(value, form)


class TensorBoardWriter:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        _need("tensorboard", "tensorboard")
        self._events = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()


class ClientWriter:
    """wandb and trackio, which share ``init`` and ``log``."""

    def __init__(self, package: str, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._client = _need(package, package)
        where = {"dir": str(folder)} if package == "wandb" else {}
        self._client.init(project="ostinato", name=folder.name, config=dict(recipe), **where)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._client.log(dict(metrics), step=step)


def check_writers(names: Sequence[str]) -> None:
    """Raises ValueError for a writer whose package is missing: to be known before there is a run folder."""
    for name in names:
        _need(name, name)


def open_writers(names: Sequence[str], folder: Path, recipe: Mapping[str, Any]) -> list[MetricWriter]:
    """The writers of ``log.writers`` for the run in ``folder``."""
    return [
        TensorBoardWriter(folder) if name == "tensorboard" else ClientWriter(name, folder, recipe)
        for name in names
    ]


def _need(package: str, writer: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f'log.writers has {writer!r} but the package {package!r} is missing; pip install "ostinato[log]"'
        ) from error
