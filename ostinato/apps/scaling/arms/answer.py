"""The result of an ablation: the paper's table for the user's own task, for people and as JSON.

Everything is made of kept lines (``kept``), so it comes out the same without the run folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.apps.scaling.ablation import REFERENCE, Ablation, Run, ablate
from ostinato.apps.scaling.answers import Answer, study_json, study_sentences, study_tables
from ostinato.apps.scaling.arms.kept import ACTED, Row, series_of
from ostinato.apps.scaling.fit import PARAMETERS
from ostinato.every import Axis
from ostinato.tables import NONE, Table, compute_text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Kept lines of runs, and what they come to."""

    rows: Sequence[Row]
    axis: Axis
    first: float  # compute before which evaluations are left out
    found: Ablation
    left_out: Sequence[str] = ()  # runs that are too short, in words


def compare_runs(rows: Sequence[Row], axis: Axis, first: float = 0.0) -> Compared:
    """Raises ValueError in words for runs that do not compare; those too short for a fit are left out."""
    require_same_questions(rows)
    runs = [
        Run(arm=row["arm"], seed=row["seed"], series=series_of(row, axis).between(first), ended=row["ended"])
        for row in rows
    ]
    short = [run.series for run in runs if len(run.series) < PARAMETERS]
    left_out = [
        f"{one.name} is left out: a fit needs {PARAMETERS} evaluations, it has {len(one)}." for one in short
    ]
    found = ablate([run for run in runs if len(run.series) >= PARAMETERS])
    return Compared(rows=rows, axis=axis, first=first, found=found, left_out=left_out)


def require_same_questions(rows: Sequence[Row]) -> None:
    """Raises ValueError for runs of which it is not known that they answered the same prompts, or whose
    answers were judged otherwise. That the prompts are the same is looked at with the curves."""
    for row in rows:
        if not row["prompts"]:
            raise ValueError(
                f"{_name(row)} does not say on which held-out prompts it was scored, so it does not compare;"
                " run it anew, or leave it out"
            )
        if row["judged"] != rows[0]["judged"]:
            raise ValueError(
                f"{_name(row)} is judged by {row['judged']} and {_name(rows[0])} by {rows[0]['judged']};"
                " scores of different rewards do not compare"
            )


def _name(row: Row) -> str:
    return f"{row['arm']}, seed {row['seed']}"


def answer(of: Compared, notes: Sequence[str] = ()) -> Answer:
    """``notes`` come first."""
    lead = [*notes, *sentences(of)]
    tables = [*study_tables(of.found, of.axis.unit), *_acts_table(of.found, of.rows)]
    return Answer(result=as_json(of) | {"notes": lead}, lead=lead, tables=tables)


def sentences(of: Compared) -> list[str]:
    rows, arms = of.rows, of.found.arms
    seeds = sorted({row["seed"] for row in rows})
    cut = f", evaluations before {compute_text(of.first)} left out" if of.first else ""
    lines = [
        f"{len(arms) - 1} arms and {REFERENCE}, {len(rows)} runs, seeds {', '.join(map(str, seeds))}; compute"
        f" in {of.axis.unit}{cut}. Held-out prompts: {rows[0]['prompts']}."
    ]
    lines += of.left_out
    recipe = next(row for row in rows if row["arm"] == REFERENCE)
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name and row["held_out"] != recipe["held_out"]]
        if own:
            lines.append(
                f"{name}, seed {', '.join(str(row['seed']) for row in own)}: held-out prompts are answered"
                f" otherwise than by {_name(recipe)} (length, interruption, temperature or tools differ)."
            )
    lines += [f"{_name(row)} has not ended." for row in rows if not row["ended"]]
    lines += [
        f"{_name(row)}: {row['unmeasured']} evaluations without a score are left out."
        for row in rows
        if row["unmeasured"]
    ]
    for arm in arms:
        if missing := [seed for seed in seeds if seed not in arm.seeds]:
            lines.append(f"{arm.name} has no run of seed {', '.join(map(str, missing))} here.")
    return lines + study_sentences(of.found)


def _acts_table(found: Ablation, rows: Sequence[Row]) -> list[Table]:
    """How often the parts of each arm did something: one that never does cannot make a difference."""
    each = {arm.name: [row["acted"] for row in rows if row["arm"] == arm.name] for arm in found.arms}
    names = [name for name in ACTED if any(name in one for some in each.values() for one in some)]
    if not names:
        return []

    def cell(some: Sequence[Mapping[str, float]], name: str) -> str:
        values = [one[name] for one in some if name in one]
        return _share(float(np.mean(values)), of_one=name != "staleness/mean") if values else NONE

    acts = [(arm, *(cell(some, name) for name in names)) for arm, some in each.items()]
    note = (
        "Means over the steps of all seeds: tokens capped or clipped, answers interrupted or cut off, groups"
        " of equal rewards, prompts still in use in the end, age of what is trained on, effective sample size"
        " of the sampler's answers. A part that never acts can make no difference here, whatever it does"
        " elsewhere."
    )
    return [Table(title="What acted", head=[ACTED[name] for name in names], rows=acts, note=note)]


def _share(value: float, *, of_one: bool) -> str:
    """ "0" is none at all."""
    if not value:
        return "0"
    return f"{value:.3g}" if not of_one else "<0.01%" if value < 5e-5 else f"{value:.2%}"


def as_json(of: Compared) -> dict[str, Any]:
    rows, found = of.rows, study_json(of.found)
    for arm in found["arms"]:
        mine = [row for row in rows if row["arm"] == arm["arm"]]
        arm["overrides"] = mine[0]["overrides"] if mine else []
        arm["acted"] = [row["acted"] for row in mine]
    given = {"axis": of.axis, "first": of.first}
    return given | {"prompts": rows[0]["prompts"], "held_out": rows[0]["held_out"]} | found
