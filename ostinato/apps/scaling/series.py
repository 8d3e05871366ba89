"""A series of evaluations over compute. It is checked here once, so that no fit gets invalid data."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.scaling.curve import Sigmoid, simulate
from ostinato.every import Axis
from ostinato.observe.ledger import read, set_price, spent
from ostinato.run import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """n evaluations of one run on one held-out set, scores scaled to [0, 1].

    ``R0`` is the score before training and is not among the n. Errors are standard errors; with ``R0_stderr``
    of 0 R0 counts as exact.
    """

    name: str
    compute: np.ndarray  # [n] float64, positive, ascending
    score: np.ndarray  # [n] float64
    R0: float
    R0_stderr: float = 0.0
    stderr: np.ndarray | None = None  # [n]
    axis: Axis = Axis.DEVICE_HOURS
    held_out: str = ""  # name of the held-out set: the same for all series that are compared
    unmeasured: int = 0  # evaluations of a run without a score: they are not among the n

    def __post_init__(self) -> None:
        for at, (before, now) in enumerate(zip(self.compute[:-1], self.compute[1:], strict=True), start=1):
            if now == before:
                raise ValueError(
                    f"{self.name} has compute {now:g} twice (evaluations {at} and {at + 1}); keep one of them"
                )
            if now < before:
                raise ValueError(
                    f"{self.name} is unsorted: compute falls from {before:g} to {now:g} at evaluation"
                    f" {at + 1}; sort it, or leave out what a resumed run did again"
                )
        for at, C in enumerate(self.compute, start=1):
            if not 0 < C < math.inf:
                raise ValueError(f"{self.name} has compute {C:g} at evaluation {at}; use positive numbers")
        for at, R in enumerate([self.R0, *self.score]):
            if not 0 <= R <= 1:
                when = f"at evaluation {at}" if at else "before training"
                scores = [self.R0, *self.score]
                is_percent = min(scores) >= 0 and 1 < max(scores) <= 100
                advice = (
                    "percentages: read them with high=100"
                    if is_percent
                    else ("rewards from -1 to 1: read them with low=-1, high=1")
                )
                raise ValueError(f"{self.name} has score {R:g} {when}; scores lie in [0, 1] ({advice})")
        errors = [self.R0_stderr] if self.stderr is None else [self.R0_stderr, *self.stderr]
        if not all(0 <= error < math.inf for error in errors):
            raise ValueError(f"{self.name} has a negative or infinite standard error; leave the column out")

    def __len__(self) -> int:
        return len(self.compute)

    def between(self, first: float = 0.0, last: float = math.inf) -> Series:
        """Return the evaluations with first <= C <= last."""
        return self.take((first <= self.compute) & (self.compute <= last))

    def take(self, selection: np.ndarray | slice) -> Series:
        stderr = None if self.stderr is None else self.stderr[selection]
        return replace(self, compute=self.compute[selection], score=self.score[selection], stderr=stderr)


def series(
    name: str,
    compute: Sequence[float] | np.ndarray,
    score: Sequence[float] | np.ndarray,
    *,
    R0: float | None = None,
    R0_stderr: float = 0.0,
    stderr: Sequence[float] | np.ndarray | None = None,
    axis: Axis = Axis.DEVICE_HOURS,
    held_out: str = "",
    low: float = 0.0,
    high: float = 1.0,
) -> Series:
    """Build a series from plain arrays; scores from ``low`` to ``high`` are mapped to [0, 1], errors with
    them.

    Without ``R0`` the first evaluation has to be that at compute 0. Raises ValueError in words.
    """
    C, R = np.asarray(compute, float), np.asarray(score, float)
    if len(C) != len(R) or (stderr is not None and len(stderr) != len(C)):
        raise ValueError(f"{name} has {len(C)} computes for {len(R)} scores; give one score (and error) each")
    if not low < high:
        raise ValueError(f"{name} has scores from low={low:g} to high={high:g}; use low below high")
    for index in np.flatnonzero(~(np.isfinite(C) & np.isfinite(R))):
        raise ValueError(
            f"{name} has compute {C[index]:g} and score {R[index]:g} in row {index + 1}; leave the row out"
        )
    width = high - low
    R, E = (R - low) / width, None if stderr is None else np.asarray(stderr, float) / width
    initial_score = None if R0 is None else (R0 - low) / width
    initial_error = R0_stderr / width
    if len(C) and C[0] == 0:  # before training
        if initial_score is None:
            initial_score, initial_error = float(R[0]), initial_error if E is None else float(E[0])
        C, R, E = C[1:], R[1:], None if E is None else E[1:]
    if initial_score is None:
        raise ValueError(f"{name} has no evaluation at compute 0; give R0, the score before training")
    return Series(
        name=name,
        compute=C,
        score=R,
        R0=initial_score,
        R0_stderr=initial_error,
        stderr=E,
        axis=axis,
        held_out=held_out,
    )


def require_comparable(*all_series: Series) -> None:
    """Raise ValueError unless all series have the same axis and the same held-out set."""
    first = all_series[0]
    for other in all_series[1:]:
        if other.axis != first.axis:
            raise ValueError(
                f"{first.name} counts compute in {first.axis} and {other.name} in {other.axis}; read both"
                " with the same axis"
            )
        if other.held_out != first.held_out:
            raise ValueError(
                f"{first.name} is scored on {first.held_out or 'an unnamed set'!r} and {other.name} on"
                f" {other.held_out or 'an unnamed set'!r}; scores of different held-out sets do not compare"
            )


def simulate_series(
    curve: Sigmoid,
    compute: Sequence[float] | np.ndarray,
    *,
    sd: float = 0.0042,
    rho: float = 0.45,
    seed: int = 0,
    name: str = "simulated",
) -> Series:
    """Simulate evaluations of a known curve with AR(1) noise, clipped to [0, 1]. The default noise is that of
    published runs."""
    rng = np.random.default_rng(seed)
    C = np.asarray(compute, float)
    noise = simulate(rng, 1, len(C), sd, rho)[0]
    return series(name, C, np.clip(curve.score(C) + noise, 0, 1), R0=curve.R0)


# ---- from files


def read_csv(
    path: Path,
    *,
    compute: str,
    score: str,
    by: Sequence[str] = (),
    stderr: str | None = None,
    R0: float | None = None,
    axis: Axis = Axis.DEVICE_HOURS,
    held_out: str = "",
    low: float = 0.0,
    high: float = 1.0,
) -> list[Series]:
    """Read the series of a CSV file in the order in which they begin, one for each value of the columns
    ``by``.

    Lines that start with # are comments. A row at compute 0 gives R0 where none is given. Raises ValueError
    in words for columns that are not there, cells that are no numbers, and invalid series.
    """
    columns_read = [compute, score, *by, *([] if stderr is None else [stderr])]
    groups: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for line, row in _read_csv_rows(path, columns_read):
        values = tuple(_parse_number(row[name], name, path, line) for name in columns_read if name not in by)
        groups.setdefault(tuple(row[name] for name in by), []).append(values)
    if not groups:
        raise ValueError(f"{path} has no rows below its header; nothing can be fitted")
    all_series = []
    for key, rows in groups.items():
        columns = list(zip(*rows, strict=True))
        all_series.append(
            series(
                " ".join(key) or path.stem,
                columns[0],
                columns[1],
                stderr=None if stderr is None else columns[2],
                R0=R0,
                axis=axis,
                held_out=held_out,
                low=low,
                high=high,
            )
        )
    return all_series


def _read_csv_rows(path: Path, columns_read: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, row) of every row. Raises ValueError for a missing column."""
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        lines = [
            (number, line) for number, line in enumerate(file, start=1) if line.strip() and line[0] != "#"
        ]
    reader = csv.DictReader(line for _, line in lines)
    missing = [name for name in columns_read if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r}; its columns are {', '.join(reader.fieldnames or ())}"
        )
    for row in reader:
        yield lines[reader.line_num - 1][0], {name: row[name] or "" for name in columns_read}


def _parse_number(cell: str, column: str, path: Path, line: int) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"line {line} of {path} has {cell!r} in column {column}; write a number or leave the row out"
        ) from None


def read_run(
    folder: Path,
    axis: Axis = Axis.FLOPS,
    split: str = "eval",
    *,
    metric: str = "pass@1",
    low: float = 0.0,
    high: float = 1.0,
    price: float = 0.0,
    compute: Callable[[Mapping[str, Any]], float] | None = None,
) -> Series:
    """Read the evaluations of one of our runs on the set ``split``, by the compute that its ledger adds up
    (with ``price`` for sessions that have none), or that ``compute`` reads from their rows.

    Compute is that of training, without evaluation. The error of a score is that of these prompts, from the
    spread of their answers; where eval.jsonl does not have it, the largest that a mean of so many answers can
    have, sqrt(R (1 - R) / draws). Evaluations without a score are left out and counted. Raises ValueError in
    words for a run without the set, the axis or a score before training, for a damaged ledger, and where the
    set or engine.weights changed during the run.
    """
    run = RunFolder.open(folder)
    rows = [row for row in run.eval.rows() if row.get("set", row["split"]) == split]
    rows = [row for row in rows if not row.get("exported")]  # not scored by the run's own sampler
    if not rows:
        raise ValueError(f"run {folder.name} has no evaluation of split {split!r}; name one of eval.jsonl")
    unmeasured = [row["step"] for row in rows if row.get(metric) is None]
    if len(unmeasured) == len(rows) or 0 in unmeasured:
        raise ValueError(f"run {folder.name} has no {metric} at step {unmeasured[0]}; use another metric")
    rows = [row for row in rows if row["step"] not in unmeasured]
    steps = [row["step"] for row in rows]
    _require_same_measure(rows, folder.name, split)
    computes = _sum_compute(run, axis, steps, price) if compute is None else [compute(row) for row in rows]
    run_series = series(
        folder.name,
        computes,
        [row[metric] for row in rows],
        stderr=[_estimate_stderr(row, metric, low, high) for row in rows],
        axis=axis,
        held_out=rows[0].get("held_out") or f"{split}, {rows[0]['n'] + rows[0].get('excluded', 0)} prompts",
        low=low,
        high=high,
    )
    return replace(run_series, unmeasured=len(unmeasured))


def _require_same_measure(rows: Sequence[Mapping[str, Any]], name: str, split: str) -> None:
    """Raise ValueError where the held-out set or the engine.weights changed during a run."""
    for row in rows:
        if row.get("held_out") != rows[0].get("held_out"):
            raise ValueError(
                f"run {name} was scored on another {split} set at step {row['step']} than before; "
                "scores of different held-out sets do not compare"
            )
        if (now := row.get("weights")) != (before := rows[0].get("weights")):
            raise ValueError(
                f"run {name} was scored with engine.weights {now!r} at step {row['step']} and with "
                f"{before!r} before; scores of different samplers do not compare"
            )


def _sum_compute(run: RunFolder, axis: Axis, steps: Sequence[int], price: float) -> list[float]:
    """Sum the compute spent up to the end of each of the steps. Raises ValueError for a ledger that is
    damaged or lacks the axis or a step."""
    if axis is Axis.STEPS:
        return [float(step) for step in steps]
    name = run.path.name
    try:
        compute_at = spent(set_price(read(run), price), axis)
    except ValueError as error:
        raise ValueError(f"run {name}: {error}") from None
    for step in steps:
        if step not in compute_at:
            raise ValueError(f"run {name} was evaluated after step {step}, which its ledger lacks")
    return [compute_at[step] for step in steps]


ANSWER_ERRORS = {"pass@1": "answer_stderr", "reward": "reward_answer_stderr"}


def _estimate_stderr(row: Mapping[str, Any], metric: str, low: float, high: float) -> float:
    """Estimate the standard error of one evaluation, in the units of its metric. It is above 0 even if all
    answers agree."""
    draws = row["n"] * (1 if metric == "pass@k" else row.get("samples", 1))
    if (error := row.get(ANSWER_ERRORS.get(metric, ""))) is not None:
        return max(error, (high - low) / (draws + 2))  # where all answers agree, the next may still differ
    R = (row[metric] - low) / (high - low)
    R = (R * draws + 1) / (draws + 2)  # Laplace's rule: the error is above 0 even where all answers are right
    return (high - low) * math.sqrt(max(0.0, R * (1 - R)) / max(1, draws))
