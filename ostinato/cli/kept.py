"""Runs of a study as one JSON line each: what tables, pages and plots of them are made of.

A run folder is megabytes and does not travel; its line holds the scores, the compute spent at each of them on
every axis that the ledger knows, and the sums of the ledger. Answers are made from lines alone, whether they
come from folders or from a file, so both give the same page byte for byte.

Folders of a study are named <arm>-s<seed>, the arm in lower-case letters and digits joined by "-"; what
``ostinato train`` appends (-yyyymmdd-hhmmss) may follow.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.ledger import read, summary
from ostinato.report.reading import RunData
from ostinato.report.reading import read_run as run_rows
from ostinato.run import Jsonl, RunFolder, atomic_write, to_json
from ostinato.scaling.ablation import REFERENCE
from ostinato.scaling.series import Axis, Series, read_run

Row = Mapping[str, Any]
FOLDER = re.compile(r"(?P<slug>.+?)(-s(?P<seed>\d+))?(-\d{8}-\d{6}(-\d+)?)?")
OF_RECIPE = "recipe"  # the slug of the recipe itself
ENDED = ("done", "collapsed", "solved", "enough")  # endings that no resuming would change


def slug(name: str) -> str:
    """ "CISPO -> DAPO clip" is cispo-dapo-clip; the recipe itself is recipe."""
    return OF_RECIPE if name == REFERENCE else "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def keep(folder: Path, split: str = "eval", metric: str = "pass@1") -> dict[str, Any]:
    """The line of a run. Raises ValueError for one without evaluations or a ledger."""
    data = run_rows(RunFolder.open(folder))
    match = FOLDER.fullmatch(folder.resolve().name)
    found = match["slug"] if match else folder.name
    arms = {slug(name): (name, list(each)) for name, each in data.setting("ablate.arms", {}).items()}
    arm, overrides = arms.get(found, (REFERENCE if found == OF_RECIPE else found, []))
    by_axis, refused = {}, []
    for axis in Axis:
        try:
            by_axis[axis] = read_run(folder, axis, split, metric=metric)
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
        "prompts": prompts(data),
        "metric": metric,
        "R0": one.R0,
        "R0_stderr": one.R0_stderr,
        "score": one.score.tolist(),
        "stderr": None if one.stderr is None else one.stderr.tolist(),
        "compute": {str(axis): each.compute.tolist() for axis, each in by_axis.items()},
        "ended": ended(folder),
        "cost": cost(folder),
    }


def prompts(data: RunData) -> str:
    """A hash of what decides the held-out prompts and how answers to them are judged, not of how these are
    sampled: an arm that changes that (a budget of thinking, a temperature) answers the same questions."""
    task = {key: value for key, value in data.setting("task", {}).items() if key != "n_train"}
    asked = {key: data.setting(f"eval.{key}") for key in ("n", "split")}
    judged = {key: data.setting(f"reward.{key}") for key in ("functions", "weights", "solved_at")}
    text = json.dumps([task, asked, judged], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cost(folder: Path) -> dict[str, Any]:
    """What the run took in all, from its ledger: evaluation apart."""
    sums = summary(read(RunFolder.open(folder)))
    return {
        "compute": dict(sums.compute),
        "flops": sum(sums.flops.values()),
        "useful": sums.useful,
        "wasted": dict(sums.wasted),
        "tokens": dict(sums.tokens),
        "dropped": dict(sums.dropped),
        "evaluation": {"flops": sums.evaluation.flops, "seconds": sums.evaluation.seconds},
        "restarts": sums.restarts,
    }


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
            yield json.loads(line)


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
    )


def folders_in(root: Path) -> list[Path]:
    """Run folders right below ``root``, by name."""
    return sorted(path for path in root.iterdir() if (path / "recipe.toml").is_file())


def collect(
    folders: Iterable[Path], split: str = "eval", metric: str = "pass@1"
) -> tuple[list[dict[str, Any]], list[str]]:
    """(lines of runs, why others are left out): the recipe first, then its arms in the order in which it
    names them, by seed. Raises ValueError where no run can be read."""
    rows: list[dict[str, Any]] = []
    order, left_out = [OF_RECIPE], list[str]()
    for folder in folders:
        try:
            rows.append(keep(folder, split, metric))
        except ValueError as error:
            left_out.append(f"{folder.name} is left out: {error}.")
            continue
        named = run_rows(RunFolder.open(folder)).setting("ablate.arms", {})
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


KEYS = {"arm", "seed", "overrides", "held_out", "prompts", "R0", "score", "compute", "ended", "cost"}


def read_kept(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError for a file that ``write_kept`` did not write."""
    rows = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= KEYS:
            raise ValueError(
                f"line {number} of {path} is no run; give a file that ostinato ablate --collect wrote"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no runs; give a file that ostinato ablate --collect wrote")
    return rows
