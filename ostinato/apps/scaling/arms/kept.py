"""Runs of a study as one JSON line each, from which tables are made.

A run folder has megabytes and is not copied around; its line has the scores, and the compute spent at each of
them on every axis that the ledger has. Results are made from lines alone, whether they come from folders or
from a file.

Folders of a study are named <arm>-s<seed>, the arm in lower-case letters and digits joined by "-"; the suffix
of ``ostinato train`` (-yyyymmdd-hhmmss) may follow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.scaling.ablation import REFERENCE
from ostinato.apps.scaling.series import Series, read_run
from ostinato.every import Axis
from ostinato.inputs import parse_json
from ostinato.observe.rows import RunRows, mean
from ostinato.observe.stats import number
from ostinato.run import Jsonl, RunFolder, atomic_write, to_json

Row = Mapping[str, Any]
FOLDER = re.compile(r"(?P<slug>.+?)(-s(?P<seed>\d+))?(-\d{8}-\d{6}(-\d+)?)?")
OF_RECIPE = "recipe"  # the slug of the recipe itself
# endings that no resuming would change
ENDED = ("done", "collapsed", "forgot", "solved", "spent", "enough", "callback")
ACTED = {  # of metrics.jsonl: how often the parts of a recipe did something; a run has some of them
    "cispo_clip_ratio": "capped",
    "clip_ratio/region_mean": "clipped",
    "interrupt/rate": "interrupted",
    "completions/clipped_ratio": "cut off",
    "frac_reward_zero_std": "equal rewards",
    "groups/left_share": "still in use",
    "staleness/mean": "updates old",
    "sampling/ess": "ESS",
}
AT_THE_END = {"groups/left_share"}  # the value of the last step; of the others the mean over steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Which scores of eval.jsonl the curves have, and the ends of their scale."""

    split: str = "eval"  # or the name of a downstream set
    metric: str = "pass@1"
    low: float = 0.0
    high: float = 1.0


MEASURE = Measure()


def make_slug(name: str) -> str:
    """Return the name of an arm in folder names: "CISPO -> DAPO clip" is cispo-dapo-clip; that of the recipe
    is recipe."""
    return OF_RECIPE if name == REFERENCE else "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def read_line(folder: Path, measure: Measure = MEASURE) -> dict[str, Any]:
    """Read the line of a run, with compute on every axis that it has. Raises ValueError if it can be read on
    no axis."""
    data = RunRows(RunFolder.open(folder)).read()
    match = FOLDER.fullmatch(folder.resolve().name)
    arm_slug = match["slug"] if match else folder.name
    arms = {
        make_slug(name): (name, list(changes)) for name, changes in data.setting("ablate.arms", {}).items()
    }
    arm, overrides = arms.get(arm_slug, (REFERENCE if arm_slug == OF_RECIPE else arm_slug, []))
    by_axis, errors = {}, []
    for axis in Axis:
        try:
            by_axis[axis] = read_run(
                folder, axis, measure.split, metric=measure.metric, low=measure.low, high=measure.high
            )
        except ValueError as error:  # its ledger lacks the axis, or the run cannot be read
            errors.append(error)
    if not by_axis:
        raise errors[0]
    series = next(iter(by_axis.values()))
    return {
        "arm": arm,
        "seed": int(match["seed"]) if match and match["seed"] else data.setting("seed", 0),
        "overrides": overrides,
        "held_out": series.held_out,
        "prompts": read_prompts_hash(RunFolder(folder), measure.split),
        "judged": format_scoring_rule(data),
        **asdict(measure),
        "R0": series.R0,
        "R0_stderr": series.R0_stderr,
        "score": series.score.tolist(),
        "stderr": None if series.stderr is None else series.stderr.tolist(),
        "unmeasured": series.unmeasured,
        "compute": {str(axis): axis_series.compute.tolist() for axis, axis_series in by_axis.items()},
        "ended": has_own_end(folder),
        "acted": measure_acts(data),
    }


def read_prompts_hash(run: RunFolder, split: str) -> str:
    """Read the hash of the prompts that a run was scored on. The run recorded it itself, since the file that
    a recipe names may be edited. An arm that samples its answers otherwise (a budget of thinking, a
    temperature) has the same hash. "" if the run has no hash, or several."""
    rows = (row for row in run.eval.rows() if row.get("set", row["split"]) == split)
    hashes = {row.get("prompts", "") for row in rows}
    return hashes.pop() if len(hashes) == 1 else ""


def format_scoring_rule(data: RunRows) -> str:
    """Return the settings that turn answers into scores, as JSON."""
    keys = ("functions", "weights", "solved_at")
    return json.dumps({key: data.setting(f"reward.{key}") for key in keys}, default=str)


def measure_acts(data: RunRows) -> dict[str, float]:
    """Measure how often the parts of the recipe acted: each metric of ``ACTED`` that the run has, as the mean
    over its steps or, for ``AT_THE_END``, of its last step."""
    values = {
        name: number(data.metrics[-1], name) if name in AT_THE_END else mean(data.metrics, name)
        for name in ACTED
        if data.metrics
    }
    return {name: value for name, value in values.items() if value is not None}


def has_own_end(folder: Path) -> bool:
    """Whether the run in ``folder`` has come to an end that no resuming would change."""
    last = next(iterate_reversed(RunFolder(folder).ledger), {})
    return last.get("event") == "end" and last.get("why") in ENDED


def iterate_reversed(log: Jsonl, max_bytes: int = 1 << 18) -> Iterator[dict[str, Any]]:
    """Yield the rows of a log from the last one back, out of its last ``max_bytes`` bytes, so that the cost
    does not grow with the log. Torn and damaged rows are skipped. A missing log has no rows."""
    if not log.path.exists():
        return
    with log.path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        lines = file.read().split(b"\n")[:-1]  # anything after the last newline is a torn row
    for line in reversed(lines):
        with suppress(ValueError):  # the first may have lost its beginning
            yield parse_json(line, surrogates=True)


def build_series(row: Row, axis: Axis) -> Series:
    """Build the series of a line's scores, with the hash of its prompts as held-out set. Raises ValueError
    where the line lacks ``axis``."""
    name = f"{row['arm']}, seed {row['seed']}"
    compute = row["compute"].get(axis)
    if compute is None:
        axes = ", ".join(row["compute"])
        raise ValueError(f"the ledger of {name} does not count {axis}; use --axis with one of {axes}")
    return Series(
        name=name,
        compute=np.array(compute, float),
        score=np.array(row["score"], float),
        R0=row["R0"],
        R0_stderr=row["R0_stderr"],
        stderr=None if row["stderr"] is None else np.array(row["stderr"], float),
        axis=axis,
        held_out=row["prompts"],
        unmeasured=row["unmeasured"],
    )


def list_run_folders(root: Path) -> list[Path]:
    """List the run folders directly in ``root``, by name."""
    return sorted(path for path in root.iterdir() if (path / "recipe.toml").is_file())


def collect_lines(
    folders: Iterable[Path], measure: Measure = MEASURE
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (lines of runs, why others are left out): the recipe first, then its arms in the order in which
    it names them, by seed. Raises ValueError if no run can be read."""
    rows: list[dict[str, Any]] = []
    order, left_out = [OF_RECIPE], list[str]()
    for folder in folders:
        try:
            rows.append(read_line(folder, measure))
        except ValueError as error:
            left_out.append(f"{folder.name} is left out: {error}.")
            continue
        arms = RunRows(RunFolder.open(folder)).read().setting("ablate.arms", {})
        order += [make_slug(name) for name in arms if make_slug(name) not in order]
    if not rows:
        raise ValueError(
            " ".join(left_out) or "there is no run folder to read; name a folder that holds runs"
        )
    rank_of = {name: rank for rank, name in enumerate(order)}
    rows.sort(key=lambda row: (rank_of.get(make_slug(row["arm"]), len(order)), row["arm"], row["seed"]))
    return rows, left_out


def write_kept(path: Path, rows: Sequence[Row]) -> None:
    atomic_write(path, "".join(f"{to_json(row)}\n" for row in rows).encode())


KEYS = {
    *("arm", "seed", "overrides", "held_out", "prompts", "judged", "split", "metric", "low", "high"),
    *("R0", "R0_stderr", "score", "stderr", "unmeasured", "compute", "ended", "acted"),
}


def read_kept(path: Path, measure: Measure = MEASURE) -> list[dict[str, Any]]:
    """Read the lines of a file of ``write_kept``. Raises ValueError for another kind of file, and for lines
    of another ``measure``, since other scores cannot be computed from a line."""
    rows = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = parse_json(text, surrogates=True)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= KEYS:
            raise ValueError(
                f"line {line} of {path} is no run; give a file that ostinato compare --collect wrote"
            )
        for key, value in asdict(measure).items():
            if row[key] != value:
                raise ValueError(
                    f"line {line} of {path} keeps scores of {key} {row[key]}, and {value} is given; use"
                    f" --{key} {row[key]}, or collect the runs anew"
                )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no runs; give a file that ostinato compare --collect wrote")
    return rows
