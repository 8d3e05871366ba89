"""What an ablation answers: the paper's table for the user's own task, as text, JSON, HTML, Markdown and SVG.

Everything is made of kept lines (``kept``), so it comes out the same without the run folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.ablate.kept import ACTED, Row, series_of
from ostinato.ablate.plots import (
    GREY,
    Band,
    Panel,
    Points,
    forests_svg,
    markdown,
    panels_svg,
    write_between,
)
from ostinato.axis import Axis
from ostinato.observe.report.charts import Chart, Section
from ostinato.observe.report.facts import Line, Table
from ostinato.observe.report.scaling import (
    COLORS,
    NONE,
    Course,
    Forest,
    Stretch,
    compute_text,
    curve_chart,
    places,
)
from ostinato.scaling.ablation import FAMILY, REFERENCE, Ablation, Arm, Run, Verdict, ablate
from ostinato.scaling.fit import PARAMETERS
from ostinato.scaling.gates import TOLD, Assessment
from ostinato.scaling.posterior import Interval
from ostinato.scaling.seeds import ENOUGH, FLOOR
from ostinato.scaling.views import Answer, line, middle, span, table

BEGIN = "<!-- results: written by `ostinato ablate --page` -->"
END = "<!-- end of results -->"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Kept lines of runs, and what they come to."""

    rows: Sequence[Row]
    axis: Axis
    first: float  # compute before which evaluations are left out
    found: Ablation
    left_out: Sequence[str] = ()  # runs that are too short, in words

    @property
    def unit(self) -> str:
        return self.axis.unit


def compared(rows: Sequence[Row], axis: Axis, first: float = 0.0) -> Compared:
    """Raises ValueError in words for runs that do not compare; those too short for a fit are left out."""
    require_same_questions(rows)
    runs = [
        Run(
            arm=row["arm"],
            seed=row["seed"],
            series=series_of(row, axis).between(first),
            ended=row["ended"],
        )
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
    """For terminal, JSON and HTML; ``notes`` are told first."""
    return Answer(
        title="Leave-one-out",
        kind="ablation",
        result=as_json(of) | {"notes": [*notes, *sentences(of)]},
        lead=[*notes, *sentences(of)],
        tables=tables(of),
        forests=lambda: forests(of.found),
        sections=lambda: [Section(title="Curves", charts=_charts(of.found, of.unit))],
    )


# -- as text


def verdict(arm: Arm) -> str:
    """ "moves A (down)", "moves only B (up) and C_mid (down)", "no difference seen"."""
    if not arm.moves:
        return str(arm.verdict)
    ways = [f"{name} ({'down' if arm.lower[name] > 0.5 else 'up'})" for name in arm.moves]
    return f"moves {'only ' if arm.verdict is Verdict.MOVES_EFFICIENCY else ''}{' and '.join(ways)}"


def sentences(of: Compared) -> list[str]:
    found, rows = of.found, of.rows
    arms, seeds = found.arms, sorted({row["seed"] for row in rows})
    cut = f", evaluations before {compute_text(of.first)} left out" if of.first else ""
    told = [
        f"{len(arms) - 1} arms and {REFERENCE}, {len(rows)} runs, seeds {', '.join(map(str, seeds))}; compute"
        f" in {of.unit}{cut}. Held-out prompts: {rows[0]['prompts']}.",
    ]
    told += of.left_out
    recipe = next(row for row in rows if row["arm"] == REFERENCE)
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name and row["held_out"] != recipe["held_out"]]
        if own:
            told.append(
                f"{name}, seed {', '.join(str(row['seed']) for row in own)}: held-out prompts are answered"
                f" otherwise than by {_name(recipe)} (length, interruption, temperature or tools differ)."
            )
    told += [f"{_name(row)} has not ended." for row in rows if not row["ended"]]
    told += [
        f"{_name(row)}: {row['unmeasured']} evaluations without a score are left out."
        for row in rows
        if row["unmeasured"]
    ]
    for arm in arms:
        if missing := [seed for seed in seeds if seed not in arm.seeds]:
            told.append(f"{arm.name} has no run of seed {', '.join(map(str, missing))} here.")
        if arm.reason:
            told.append(f"{arm.name} is not ranked: {arm.reason}.")
    tau, freedom = found.spread["A"], sum(len(arm.seeds) - 1 for arm in arms if arm.told)
    others = ", so the three runs of the paper are counted too" if freedom < ENOUGH else ""
    told.append(
        f"From seed to seed A has a standard deviation of {tau.median:.3f} {span(tau)}, by {freedom} degrees"
        f" of freedom of all arms together{others}."
    )
    return told


def rule(found: Ablation) -> str:
    """How a verdict is come to, in words."""
    return (
        f"Intervals: 90 %, of the mean over seeds, the spread between seeds in them. A choice moves A where"
        f" P(A lower) is below {found.tail:.2%} or above {1 - found.tail:.2%}: the chance that any of"
        f" {len(found.arms) - 1} arms is said to where none does is {FAMILY:.0%} at most. Where it does not,"
        f" and the medians of A are within {FLOOR:g}, the same is asked of B and of C_mid with A held at the"
        " recipe's, each by half of these tails, so that the chance of both together is as large again. B is"
        " not known where the first evaluations are already at the ceiling. No difference seen is not none:"
        " the interval says how large it may be."
    )


def tables(of: Compared) -> list[Table]:
    known = [_efficiency(of.found, of.unit)] if any(arm.steep for arm in of.found.arms) else []
    return [
        _ceilings(of.found, of.unit),
        *known,
        *_acted(of.found, of.rows),
        _costs(of.found, of.rows),
    ]


def _both(one: Interval | None, form: str = "{:.3f}") -> str:
    return NONE if one is None else f"{middle(one, form)} {span(one, form)}"


def _chance(arm: Arm, name: str) -> str:
    """Draws are finite: they show no probability beyond 0.1 %."""
    p = arm.lower.get(name)
    return NONE if p is None else "<0.1%" if p < 0.001 else ">99.9%" if p > 0.999 else f"{p:.1%}"


def _score(arm: Arm, common: float) -> str:
    """Where a run of the arm did not get as far as the others, its own compute stands with it."""
    return _both(arm.reached) + (f" at {compute_text(arm.reached_at)}" if arm.reached_at < common else "")


def _ceilings(found: Ablation, unit: str) -> Table:
    lines = [
        line(
            arm.name,
            "",
            str(len(arm.seeds)),
            _both(arm.A),
            _both(arm.A_less, "{:+.3f}"),
            _chance(arm, "A"),
            _score(arm, found.common),
            verdict(arm),
        )
        for arm in found.arms
    ]
    columns = ("runs", "A", "less the recipe's", "P(A lower)", f"score at {compute_text(found.common)}")
    note = (
        f"{rule(found)} Score at {compute_text(found.common)} {unit}, which all runs that ended and may be"
        " told have reached: as measured just before, no curve."
    )
    return table("Arm", (*columns, "verdict"), lines, note)


def _efficiency(found: Ablation, unit: str) -> Table:
    held = "" if found.shared_A is None else f" at A = {found.shared_A:.3f}"
    lines = [
        line(
            arm.name,
            "",
            _both(arm.B, "{:.2f}"),
            _both(arm.B_shared, "{:.2f}"),
            _chance(arm, "B"),
            _both(arm.C_mid, ""),
            _both(arm.C_mid_ratio, "{:.2f}"),
            _chance(arm, "C_mid"),
        )
        for arm in found.arms
    ]
    columns = ("B", f"B{held}", "P(B lower)", "C_mid", "over the recipe's", "P(C_mid lower)")
    note = (
        f"C_mid in {unit}: compute of half of the gain; its ratio too is at that A. A dash: A is further than"
        f" {FLOOR:g} from the recipe's, or B is not known."
    )
    return table("Arm", columns, lines, note)


def _acted(found: Ablation, rows: Sequence[Row]) -> list[Table]:
    """How often the parts of each arm did something: one that never does cannot make a difference."""
    each = {arm.name: [row["acted"] for row in rows if row["arm"] == arm.name] for arm in found.arms}
    names = [name for name in ACTED if any(name in one for some in each.values() for one in some)]
    if not names:
        return []

    def cell(some: Sequence[Mapping[str, float]], name: str) -> str:
        values = [one[name] for one in some if name in one]
        return _share(float(np.mean(values)), of_one=name != "staleness/mean") if values else NONE

    lines = [line(arm, "", *(cell(some, name) for name in names)) for arm, some in each.items()]
    note = (
        "Means over the steps of all seeds: tokens capped or clipped, answers interrupted or cut off, groups"
        " of equal rewards, prompts still asked in the end, age of what is trained on, effective sample size"
        " of the sampler's answers. A part that never acts can make no difference here, whatever it does"
        " elsewhere."
    )
    return [table("What acted", [ACTED[name] for name in names], lines, note)]


def _share(value: float, *, of_one: bool) -> str:
    """ "0" is none at all."""
    if not value:
        return "0"
    return f"{value:.3g}" if not of_one else "<0.01%" if value < 5e-5 else f"{value:.2%}"


def _costs(found: Ablation, rows: Sequence[Row]) -> Table:
    def cells(name: str, some: Sequence[Row]) -> Line:
        each = [row["cost"] for row in some]
        flops, useful = (sum(cost[key] or 0 for cost in each) for key in ("flops", "useful"))
        hours, tokens = (
            sum(cost["compute"].get(axis, 0.0) for cost in each) for axis in ("device-hours", "tokens")
        )
        share = f"{useful / flops:.1%}" if flops else NONE
        spent = (compute_text(flops), share, compute_text(tokens), f"{hours:.2f}")
        apart = compute_text(sum(cost["evaluation"]["flops"] for cost in each))
        return line(name, "", *spent, apart, str(sum(cost["restarts"] for cost in each)))

    lines = [cells(arm.name, [row for row in rows if row["arm"] == arm.name]) for arm in found.arms]
    columns = ("FLOP", "useful", "tokens sampled", "device-hours", "FLOP of evaluation", "restarts")
    note = "Training of all seeds together; evaluation is counted apart and in no compute above."
    return table("Cost", columns, [*lines, cells("all", rows)], note)


# -- as JSON


def as_json(of: Compared) -> dict[str, Any]:
    found, rows = of.found, of.rows
    return {
        "axis": of.axis,
        "first": of.first,
        "prompts": rows[0]["prompts"],
        "held_out": rows[0]["held_out"],
        "common_compute": found.common,
        "shared_A": found.shared_A,
        "tail": found.tail,
        "seed_spread": {name: asdict(each) for name, each in found.spread.items()},
        "rule": rule(found),
        "arms": [_arm_json(arm, rows) for arm in found.arms],
    }


def _arm_json(arm: Arm, rows: Sequence[Row]) -> dict[str, Any]:
    mine = [row for row in rows if row["arm"] == arm.name]
    intervals = ("A", "B", "C_mid", "B_shared", "C_mid_ratio", "A_less", "reached")
    return {
        "arm": arm.name,
        "overrides": mine[0]["overrides"] if mine else [],
        "acted": [row["acted"] for row in mine],
        "seeds": arm.seeds,
        "standing": arm.standing,
        "reason": arm.reason,
        **{name: None if (one := getattr(arm, name)) is None else asdict(one) for name in intervals},
        "reached_at": arm.reached_at,
        "lower": dict(arm.lower),
        "verdict": verdict(arm),
        "runs": [_run_json(seed, one) for seed, one in zip(arm.seeds, arm.assessments, strict=True)],
    }


def _run_json(seed: int, found: Assessment) -> dict[str, Any]:
    ratio = found.ratio if found.standing in TOLD else None
    return {"seed": seed, "standing": found.standing, "C_max_over_C_mid": ratio, "flags": found.flags}


# -- as plots


def forests(found: Ablation) -> list[Forest]:
    """A of every arm; B, and C_mid over the recipe's, at the ceiling of the recipe."""
    shown = (
        ("A", "A", "Ceiling; score.", "{:.3f}"),
        ("B_shared", "B at the recipe's A", "Steepness in ln C.", "{:.2f}"),
        (
            "C_mid_ratio",
            "C_mid over the recipe's",
            "Compute of half of the gain, at the recipe's A.",
            "{:.2f}",
        ),
    )
    made = []
    for key, title, note, form in shown:
        pairs = [(arm.name, one) for arm in found.arms if (one := getattr(arm, key)) is not None]
        stretches = tuple(
            Stretch(name=name, low=one.low, high=one.high, middle=one.median, text=_both(one, form))
            for name, one in pairs
        )
        if stretches:
            made.append(Forest(title=title, note=f"{note} Medians and 90 % intervals.", rows=stretches))
    return made


def _mean_curve(arm: Arm, at: np.ndarray) -> np.ndarray | None:
    """[5, m]: the mean of the seeds' curves at 5, 25, 50, 75 and 95 %; None where one has
    no curve."""
    if any(each.silent for each in arm.assessments):
        return None
    scores = np.mean([one.score(at) for one in arm.known], axis=0)
    return np.quantile(scores, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)


def _charts(found: Ablation, unit: str) -> list[Chart]:
    """For the HTML page: every arm over the recipe."""
    compute = [one.series.compute for arm in found.arms for one in arm.known]
    at = places(compute, 1.5 * max(float(each[-1]) for each in compute))
    base = _courses(found.arms[0], at, COLORS[0])
    note = "Evaluations of each seed; band: 90 and 50 % of the mean of their curves."
    charts = []
    for number, arm in enumerate(found.arms):
        courses = base if arm.name == REFERENCE else [*base, *_courses(arm, at, COLORS[1])]
        charts.append(replace(curve_chart(courses, unit, note), key=f"curve-{number}", title=arm.name))
    return charts


def _courses(arm: Arm, at: np.ndarray, color: str) -> list[Course]:
    """The band of the arm, and the points of each of its seeds: at equal steps they stand side by side."""
    nothing = np.empty(0)
    band = Course(
        name=arm.name,
        compute=nothing,
        score=nothing,
        window=(0.0, 0.0),
        places=at,
        quantiles=_mean_curve(arm, at),
        told=arm.told,
        color=color,
    )
    points = [
        replace(
            band,
            name=f"{arm.name}, seed {seed}",
            compute=one.series.compute,
            score=one.series.score,
            window=(float(one.series.compute[0]), float(one.series.compute[-1])),
            quantiles=None,
        )
        for seed, one in zip(arm.seeds, arm.known, strict=True)
    ]
    return [band, *points]


def curves_svg(found: Ablation, unit: str) -> str:
    """A panel for each arm, over the recipe."""
    compute = [one.series.compute for arm in found.arms for one in arm.known]
    at = np.geomspace(min(map(np.min, compute)), max(map(np.max, compute)), 60)
    bands = [_band(arm, at) for arm in found.arms]
    recipe = [] if bands[0] is None else [replace(bands[0], color=GREY)]
    panels = [
        _panel(arm, [*(recipe if number else []), *([] if band is None else [band])])
        for number, (arm, band) in enumerate(zip(found.arms, bands, strict=True))
    ]
    return panels_svg(panels, "every arm (blue) over the recipe (grey); bands: 90 % of the mean curve", unit)


def _panel(arm: Arm, bands: Sequence[Band]) -> Panel:
    """Seeds are told apart by filled and hollow points."""
    points = [
        Points(compute=one.series.compute, score=one.series.score, filled=number % 2 == 0)
        for number, one in enumerate(arm.known)
    ]
    return Panel(title=arm.name, bands=bands, points=points, note="" if arm.told else "not identified")


def _band(arm: Arm, at: np.ndarray) -> Band | None:
    quantiles = _mean_curve(arm, at)
    if quantiles is None:
        return None
    middle_at = quantiles[2] if arm.told else None
    return Band(compute=at, low=quantiles[0], middle=middle_at, high=quantiles[4])


# -- a page for docs


def write_page(path: Path, of: Compared) -> None:
    """``path``.md, of which only what stands between its marks is written anew, and ``path``-*.svg beside."""
    stem, drawn = path.with_suffix("") if path.suffix == ".md" else path, forests(of.found)
    images = {"curves": curves_svg(of.found, of.unit)}
    if drawn:
        images["forest"] = forests_svg(drawn, "medians and 90 % intervals")
    parts = ["\n".join(f"- {sentence}" for sentence in sentences(of))]
    parts += [markdown(one) for one in tables(of)]
    write_between(stem, "# Leave-one-out\n\n", (BEGIN, END), parts, images)


__all__ = ["Compared", "answer", "as_json", "compared", "verdict", "write_page"]
