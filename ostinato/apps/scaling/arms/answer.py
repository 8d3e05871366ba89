"""The result of an ablation: the paper's table for the user's own task, for people and as JSON.

All of it is made from kept lines (``kept``), so it comes out the same without the run folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.apps.scaling.ablation import REFERENCE, Ablation, Run, ablate
from ostinato.apps.scaling.answers import Answer, build_study_tables, describe_study, write_study_sentences
from ostinato.apps.scaling.arms.kept import ACTED, Row, build_series
from ostinato.apps.scaling.fit import PARAMETERS
from ostinato.every import Axis
from ostinato.tables import NONE, Table, format_compute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Kept lines of runs, and their comparison."""

    rows: Sequence[Row]
    axis: Axis
    first: float  # compute before which evaluations are left out
    study: Ablation
    left_out: Sequence[str] = ()  # runs that are too short, in words


def compare_runs(rows: Sequence[Row], axis: Axis, first: float = 0.0) -> Compared:
    """Compare runs. Those that are too short for a fit are left out. Raises ValueError in words for runs that
    cannot be compared, for a line without ``axis``, and if no run of the recipe is left."""
    require_same_questions(rows)
    runs = [
        Run(
            arm=row["arm"],
            seed=row["seed"],
            series=build_series(row, axis).between(first),
            ended=row["ended"],
        )
        for row in rows
    ]
    short_series = [run.series for run in runs if len(run.series) < PARAMETERS]
    left_out = [
        f"{series.name} is left out: a fit needs {PARAMETERS} evaluations, it has {len(series)}."
        for series in short_series
    ]
    study = ablate([run for run in runs if len(run.series) >= PARAMETERS])
    return Compared(rows=rows, axis=axis, first=first, study=study, left_out=left_out)


def require_same_questions(rows: Sequence[Row]) -> None:
    """Raise ValueError for runs that do not say on which prompts they were scored, or that were judged by
    different rewards. ``series.require_comparable`` checks that the prompts are the same."""
    for row in rows:
        if not row["prompts"]:
            raise ValueError(
                f"{_label(row)} does not say on which held-out prompts it was scored, so it does not compare;"
                " run it anew, or leave it out"
            )
        if row["judged"] != rows[0]["judged"]:
            raise ValueError(
                f"{_label(row)} is judged by {row['judged']} and {_label(rows[0])} by {rows[0]['judged']};"
                " scores of different rewards do not compare"
            )


def _label(row: Row) -> str:
    return f"{row['arm']}, seed {row['seed']}"


def build_answer(comparison: Compared, notes: Sequence[str] = ()) -> Answer:
    """Build the answer from a comparison, with ``notes`` in front."""
    lead = [*notes, *write_sentences(comparison)]
    tables = [
        *build_study_tables(comparison.study, comparison.axis.unit),
        *_build_acts_tables(comparison.study, comparison.rows),
    ]
    return Answer(result=as_json(comparison) | {"notes": lead}, lead=lead, tables=tables)


def write_sentences(comparison: Compared) -> list[str]:
    """Describe the runs, what is left out or missing, and the study."""
    rows, arms = comparison.rows, comparison.study.arms
    seeds = sorted({row["seed"] for row in rows})
    cut_note = f", evaluations before {format_compute(comparison.first)} left out" if comparison.first else ""
    lines = [
        f"{len(arms) - 1} arms and {REFERENCE}, {len(rows)} runs, seeds {', '.join(map(str, seeds))}; compute"
        f" in {comparison.axis.unit}{cut_note}. Held-out prompts: {rows[0]['prompts']}."
    ]
    lines += comparison.left_out
    recipe = next(row for row in rows if row["arm"] == REFERENCE)
    for name in dict.fromkeys(row["arm"] for row in rows):
        others = [row for row in rows if row["arm"] == name and row["held_out"] != recipe["held_out"]]
        if others:
            lines.append(
                f"{name}, seed {', '.join(str(row['seed']) for row in others)}: held-out prompts are answered"
                f" otherwise than by {_label(recipe)} (length, interruption, temperature or tools differ)."
            )
    lines += [f"{_label(row)} has not ended." for row in rows if not row["ended"]]
    lines += [
        f"{_label(row)}: {row['unmeasured']} evaluations without a score are left out."
        for row in rows
        if row["unmeasured"]
    ]
    for arm in arms:
        if missing_seeds := [seed for seed in seeds if seed not in arm.seeds]:
            lines.append(f"{arm.name} has no run of seed {', '.join(map(str, missing_seeds))} here.")
    return lines + write_study_sentences(comparison.study)


def _build_acts_tables(study: Ablation, rows: Sequence[Row]) -> list[Table]:
    """Build the table of how often the parts of each arm acted, since a part that never acts cannot make a
    difference. There is no table if no run has such a metric."""
    metrics_of = {arm.name: [row["acted"] for row in rows if row["arm"] == arm.name] for arm in study.arms}
    names = [
        name
        for name in ACTED
        if any(name in metrics for run_metrics in metrics_of.values() for metrics in run_metrics)
    ]
    if not names:
        return []

    def format_cell(run_metrics: Sequence[Mapping[str, float]], name: str) -> str:
        values = [metrics[name] for metrics in run_metrics if name in metrics]
        return _format_share(float(np.mean(values)), is_share=name != "staleness/mean") if values else NONE

    cells = [
        (arm, *(format_cell(run_metrics, name) for name in names)) for arm, run_metrics in metrics_of.items()
    ]
    note = (
        "Means over the steps of all seeds: tokens capped or clipped, answers interrupted or cut off, groups"
        " of equal rewards, prompts still in use in the end, age of what is trained on, effective sample size"
        " of the sampler's answers. A part that never acts can make no difference here, whatever it does"
        " elsewhere."
    )
    return [Table(title="What acted", head=[ACTED[name] for name in names], rows=cells, note=note)]


def _format_share(value: float, *, is_share: bool) -> str:
    """Format a share as a percentage, or another number if not ``is_share``. "0" means exactly 0."""
    if not value:
        return "0"
    return f"{value:.3g}" if not is_share else "<0.01%" if value < 5e-5 else f"{value:.2%}"


def as_json(comparison: Compared) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    rows, result = comparison.rows, describe_study(comparison.study)
    for arm in result["arms"]:
        arm_rows = [row for row in rows if row["arm"] == arm["arm"]]
        arm["overrides"] = arm_rows[0]["overrides"] if arm_rows else []
        arm["acted"] = [row["acted"] for row in arm_rows]
    header = {"axis": comparison.axis, "first": comparison.first}
    return header | {"prompts": rows[0]["prompts"], "held_out": rows[0]["held_out"]} | result
