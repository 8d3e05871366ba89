"""Runs of a study as one JSON line each, of which tables are made.

A run folder is megabytes and does not travel; its line holds the scores, and the compute spent at each of
them on every axis that the ledger has. Results are made from lines alone, whether they come from folders or
from a file.

Folders of a study are named <arm>-s<seed>, the arm in lower-case letters and digits joined by "-"; what
``ostinato train`` appends (-yyyymmdd-hhmmss) may follow.
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
ENDED = (
    "done",
    "collapsed",
    "forgot",
    "solved",
    "spent",
    "enough",
    "callback",
)  # endings that no resuming would change
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
    """Which scores of eval.jsonl are on the curves, and the ends of their scale."""

    split: str = "eval"  # or the name of a downstream set
    metric: str = "pass@1"
    low: float = 0.0
    high: float = 1.0


MEASURE = Measure()


def slug(name: str) -> str:
    """ "CISPO -> DAPO clip" is cispo-dapo-clip; the recipe itself is recipe."""
    return OF_RECIPE if name == REFERENCE else "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def keep(folder: Path, measure: Measure = MEASURE) -> dict[str, Any]:
    """The line of a run. Raises ValueError for one without evaluations or a ledger."""
    data = RunRows(RunFolder.open(folder)).read()
    match = FOLDER.fullmatch(folder.resolve().name)
    found = match["slug"] if match else folder.name
    arms = {slug(name): (name, list(each)) for name, each in data.setting("ablate.arms", {}).items()}
    arm, overrides = arms.get(found, (REFERENCE if found == OF_RECIPE else found, []))
    by_axis, refused = {}, []
    for axis in Axis:
        try:
            by_axis[axis] = read_run(
                folder, axis, measure.split, metric=measure.metric, low=measure.low, high=measure.high
            )
        except ValueError as error:  # its ledger does not know the axis, or worse
            refused.append(error)
    if not by_axis:
        raise refused[0]
    one = next(iter(by_axis.values()))
    return {
        "arm": arm,
        "seed": int(match["seed"]) if match and match["seed"] else data.setting("seed", 0),
        "overrides": overrides,
        "held_out": one.held_out,
        "prompts": prompts(RunFolder(folder), measure.split),
        "judged": scoring_rule(data),
        **asdict(measure),
        "R0": one.R0,
        "R0_stderr": one.R0_stderr,
        "score": one.score.tolist(),
        "stderr": None if one.stderr is None else one.stderr.tolist(),
        "unmeasured": one.unmeasured,
        "compute": {str(axis): each.compute.tolist() for axis, each in by_axis.items()},
        "ended": ended(folder),
        "acted": acted(data),
    }


def prompts(run: RunFolder, split: str) -> str:
    """The hash that the run itself made of the prompts that it was scored on: what a recipe says of them
    stays the same while the file that it names is edited. An arm may sample its answers otherwise (a budget
    of thinking, a temperature) and still answers the same questions. Empty where the run does not say."""
    rows = (row for row in run.eval.rows() if row.get("set", row["split"]) == split)
    found = {row.get("prompts", "") for row in rows}
    return found.pop() if len(found) == 1 else ""


def scoring_rule(data: RunRows) -> str:
    """What turns answers into scores, as JSON."""
    keys = ("functions", "weights", "solved_at")
    return json.dumps({key: data.setting(f"reward.{key}") for key in keys}, default=str)


def acted(data: RunRows) -> dict[str, float]:
    """How often the parts of the recipe acted: each metric of ``ACTED`` that the run has, as the mean over
    its steps, or of its last step."""
    found = {
        name: number(data.metrics[-1], name) if name in AT_THE_END else mean(data.metrics, name)
        for name in ACTED
        if data.metrics
    }
    return {name: value for name, value in found.items() if value is not None}


def ended(folder: Path) -> bool:
    """Has the run in ``folder`` come to an end of its own?"""
    last = next(backwards(RunFolder(folder).ledger), {})
    return last.get("event") == "end" and last.get("why") in ENDED


def backwards(log: Jsonl, most: int = 1 << 18) -> Iterator[dict[str, Any]]:
    """The rows of a log from its end, as many as its last ``most`` bytes hold: a look that costs the same
    however long the log has become."""
    if not log.path.exists():
        return
    with log.path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().split(b"\n")[:-1]  # what follows the last newline is torn
    for line in reversed(lines):
        with suppress(ValueError):  # the first may have lost its beginning
            yield parse_json(line, surrogates=True)


def series_of(row: Row, axis: Axis) -> Series:
    """The scores of a line. Series compare where the prompts are the same, see ``prompts``. Raises ValueError
    where the line does not know ``axis``."""
    name = f"{row['arm']}, seed {row['seed']}"
    compute = row["compute"].get(axis)
    if compute is None:
        known = ", ".join(row["compute"])
        raise ValueError(f"the ledger of {name} does not count {axis}; use --axis with one of {known}")
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


def folders_in(root: Path) -> list[Path]:
    """Run folders right below ``root``, by name."""
    return sorted(path for path in root.iterdir() if (path / "recipe.toml").is_file())


def collect(folders: Iterable[Path], measure: Measure = MEASURE) -> tuple[list[dict[str, Any]], list[str]]:
    """(lines of runs, why others are left out): the recipe first, then its arms in the order in which it
    names them, by seed. Raises ValueError where no run can be read."""
    rows: list[dict[str, Any]] = []
    order, left_out = [OF_RECIPE], list[str]()
    for folder in folders:
        try:
            rows.append(keep(folder, measure))
        except ValueError as error:
            left_out.append(f"{folder.name} is left out: {error}.")
            continue
        named = RunRows(RunFolder.open(folder)).read().setting("ablate.arms", {})
        order += [slug(name) for name in named if slug(name) not in order]
    if not rows:
        raise ValueError(
            " ".join(left_out) or "there is no run folder to read; name a folder that holds runs"
        )
    place = {name: at for at, name in enumerate(order)}
    rows.sort(key=lambda row: (place.get(slug(row["arm"]), len(order)), row["arm"], row["seed"]))
    return rows, left_out


def write_kept(path: Path, rows: Sequence[Row]) -> None:
    atomic_write(path, "".join(f"{to_json(row)}\n" for row in rows).encode())


KEYS = {
    *("arm", "seed", "overrides", "held_out", "prompts", "judged", "split", "metric", "low", "high"),
    *("R0", "R0_stderr", "score", "stderr", "unmeasured", "compute", "ended", "acted"),
}


def read_kept(path: Path, measure: Measure = MEASURE) -> list[dict[str, Any]]:
    """Raises ValueError for a file that ``write_kept`` did not write, and for one of another ``measure``:
    scores that are not in a line cannot be computed from it."""
    rows = []
    for at, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = parse_json(text, surrogates=True)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= KEYS:
            raise ValueError(
                f"line {at} of {path} is no run; give a file that ostinato compare --collect wrote"
            )
        for key, given in asdict(measure).items():
            if row[key] != given:
                raise ValueError(
                    f"line {at} of {path} keeps scores of {key} {row[key]}, and {given} is given; use"
                    f" --{key} {row[key]}, or collect the runs anew"
                )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no runs; give a file that ostinato compare --collect wrote")
    return rows
