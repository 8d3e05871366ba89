"""What ``ostinato scale`` answers about two runs, and about curves that are not measured yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ostinato.axis import Axis
from ostinato.cli.scale_answers import Answer, about
from ostinato.cli.scale_reading import Side
from ostinato.cli.scale_views import Known, course, line, middle, span, standing_sentences, table
from ostinato.observe.report.charts import Chart, Section
from ostinato.observe.report.facts import Table
from ostinato.observe.report.scaling import (
    COLORS,
    NONE,
    Course,
    Forest,
    Stretch,
    compute_text,
    curve_chart,
    places,
    slope_chart,
    width_chart,
)
from ostinato.scaling.compare import Comparison, compare
from ostinato.scaling.curve import Sigmoid, linearised
from ostinato.scaling.plan import Pilot, plan_pilot, simulated
from ostinato.scaling.posterior import Interval
from ostinato.scaling.seeds import FLOOR
from ostinato.scaling.series import Series

# -- two runs


def versus(windows: tuple[Side, Side], at: float | None, floor: float) -> Answer:
    """Which ceiling is higher, which score at compute ``at``, where one overtakes the other."""
    one, other = ([Known.of(window) for window in side] for side in windows)
    posteriors = [[known.posterior for known in side] for side in (one, other)]
    found = compare(*posteriors, at=at, floor=floor)
    runs, unit = [*one, *other], one[0].window.unit
    return Answer(
        title=f"{found.names[0]} against {found.names[1]}",
        kind="comparison",
        result=_compared(one, other, found),
        lead=[
            *(sentence for known in runs for sentence in standing_sentences(known)),
            _between(found, floor) if not found.reason else f"Not ranked: {found.reason}.",
        ],
        tables=[_side_by_side(runs, found), *([] if found.reason else [_ranks(found, unit)])],
        forests=lambda: _forests(runs),
        sections=lambda: _beside(one, other, found),
    )


def _compared(one: Sequence[Known], other: Sequence[Known], found: Comparison) -> dict[str, Any]:
    plain = {key: value for key, value in asdict(found).items() if key != "assessments"}
    runs = [about(known) | {"side": side} for side, each in enumerate((one, other)) for known in each]
    return {"runs": runs, **plain}


def _between(found: Comparison, floor: float) -> str:
    half = f"A is taken to differ from seed to seed by ± {found.between:.3f} (90 %)"
    if max(found.seeds) == 1:
        return f"{half}, for each side has one seed; give several with commas to have it measured."
    return f"{half}, by the {sum(found.seeds)} runs given{' and --floor' * (floor > 0)}."


def _side_by_side(runs: Sequence[Known], found: Comparison) -> Table:
    shown = [known.parameters() for known in runs]
    unit = runs[0].window.unit

    def cells(name: str, form: str) -> list[str]:
        return [f"{middle(each[name], form)} {span(each[name], form)}" for each in shown]

    lines = [
        line("standing", "", *(known.assessment.standing for known in runs)),
        line("A", "score; median, 90 %", *cells("A", "{:.3f}")),
        line("B", "no unit; median, 90 %", *cells("B", "{:.2f}")),
        line("C_mid", f"{unit}; median, 90 %", *cells("C_mid", "")),
    ]
    if found.at is not None:
        scores = [known.shown(known.posterior.score(found.at)) for known in runs]
        texts = [f"{middle(each)} {span(each)}" for each in scores]
        lines.append(line(f"score at {compute_text(found.at)}", "score; median, 90 %", *texts))
    return table("Run", [known.name for known in runs], lines)


def _ranks(found: Comparison, unit: str) -> Table:
    def chance(p: float | None) -> str:
        return NONE if p is None else f"{p:.0%}"

    lines = [
        line("has the higher ceiling", "", chance(found.higher_A), ""),
        line("its ceiling less the other's", "score; median, 90 %", "", _signed(found.difference)),
    ]
    if found.at is not None:
        lines.append(line(f"scores higher at {compute_text(found.at)}", "", chance(found.higher_score), ""))
    note = "Ceilings include how far runs differ by their seed alone."
    if (shared := found.shared) is None:
        note += f" Neither crossings nor slopes: B and C_mid of {found.unknown} are not known."
    else:
        where = f"{middle(found.crossover, '')} {span(found.crossover, '')}"
        lines.append(line("the curves cross", f"{unit}; median, 90 %", chance(found.crosses), where))
        slopes = f"{shared.B[0]:.2f} against {shared.B[1]:.2f}"
        lines.append(line(f"B with A = {shared.A:.3f}", "no unit; least squares", "", slopes))
        if shared.apart > FLOOR:
            note += f" B at an equal A says little here: their own A are {shared.apart:.3f} apart."
    return table(f"{found.names[0]} against {found.names[1]}", ("probability", "is"), lines, note)


def _signed(found: Interval | None) -> str:
    return f"{middle(found, '{:+.3f}')} {span(found, '{:+.3f}')}"


def _forests(runs: Sequence[Known]) -> list[Forest]:
    """A and B of all runs that have an interval."""
    forests = []
    for name, note, form in (("A", "Ceiling; score.", "{:.3f}"), ("B", "Steepness in ln C.", "{:.2f}")):
        rows = [
            _stretch(known.name, found, form)
            for known in runs
            if (found := known.parameters()[name]) is not None
        ]
        if rows:
            note = f"{note} 90 % intervals; a dot is the median, where one may be told."
            forests.append(Forest(title=name, note=note, rows=tuple(rows)))
    return forests


def _stretch(name: str, found: Interval, form: str) -> Stretch:
    told = not np.isnan(found.median)
    text = f"{middle(found, form)} {span(found, form)}" if told else span(found, form)
    middle_at = found.median if told else None
    return Stretch(name=name, low=found.low, high=found.high, middle=middle_at, text=text)


def _beside(one: Sequence[Known], other: Sequence[Known], found: Comparison) -> list[Section]:
    runs = [*one, *other]
    colors = [color for side, color in zip((one, other), COLORS, strict=False) for _ in side]
    compute = [known.window.whole.compute for known in runs]
    at = places(compute, max(found.at or 0.0, 2 * max(float(each[-1]) for each in compute)))
    note = (
        "Bands: 90 and 50 % of the curve, without the noise of evaluations. Seeds of a side share a colour."
    )
    courses = [replace(course(known, at), color=color) for known, color in zip(runs, colors, strict=True)]
    sections = [Section(title="Curves", charts=[curve_chart(courses, runs[0].window.unit, note)])]
    if found.shared is not None:
        A = found.shared.A
        logits = [linearised(known.window.whole.score, known.window.whole.R0, A) for known in runs]
        slopes = slope_chart(courses, logits, A, runs[0].window.unit)
        sections.append(Section(title="Steepness", charts=[slopes]))
    return sections


# -- curves that are not measured yet


def pilot(guess: Sigmoid, every: float, width: float, first: float, axis: Axis) -> Answer:
    """The shortest run that is expected to know the ceiling to ``width``."""
    found, unit = plan_pilot(guess, every, width, first=first), axis.unit
    if not found.lengths:
        raise ValueError(f"--every is {every:g}; fewer than 5 evaluations fit into 12 C_mid; use less")
    if found.compute is None:
        longest = f"{compute_text(12 * guess.C_mid)} {unit}"
        lead = f"No pilot up to {longest} knows A to {width:g}; evaluate more often."
    else:
        lead = (
            f"{compute_text(found.compute)} {unit} ({found.compute / guess.C_mid:.1f} C_mid) are expected to"
            f" tell A to {width:g} (width of the 90 % interval)."
        )
    return Answer(
        title="Pilot",
        kind="plan",
        result=asdict(guess) | asdict(found) | {"every": every, "first": first, "axis": axis},
        lead=[lead],
        tables=[_lengths(found, guess, unit)],
        sections=lambda: [Section(title="Pilots", charts=[width_chart(found.lengths, width, unit)])],
    )


def _lengths(found: Pilot, guess: Sigmoid, unit: str) -> Table:
    lines = [
        line(
            f"{compute_text(C)} {unit}",
            "",
            f"{C / guess.C_mid:.1f}",
            f"{reached:.3f}",
            "enough" if reached <= found.width else "",
        )
        for C, reached in found.lengths
    ]
    return table("Length", ("C / C_mid", "expected 90 % width of A", f"wanted: {found.width:g}"), lines)


def imagine(truth: Sigmoid, compute: np.ndarray, sd: float, rho: float, seed: int, axis: Axis) -> Answer:
    """Evaluations of a known curve with noise."""
    drawn, unit = simulated(truth, compute, sd=sd, rho=rho, seed=seed), axis.unit
    scores = truth.score(compute)
    lines = [
        line(compute_text(C), unit, f"{measured:.4f}", f"{exact:.4f}")
        for C, measured, exact in zip(compute, drawn.score, scores, strict=True)
    ]
    return Answer(
        title="Simulated run",
        kind="simulation",
        result=asdict(truth)
        | {"axis": axis, "sd": sd, "rho": rho, "seed": seed}
        | {"compute": compute, "score": drawn.score, "curve": scores},
        tables=[table("Compute", ("measured", "without noise"), lines)],
        sections=lambda: [Section(title="Curve", charts=[_drawn(truth, drawn, unit)])],
    )


def _drawn(truth: Sigmoid, drawn: Series, unit: str) -> Chart:
    at = places([drawn.compute], 2 * float(drawn.compute[-1]))
    ends = (float(drawn.compute[0]), float(drawn.compute[-1]))
    shown = Course(
        name=drawn.name,
        compute=drawn.compute,
        score=drawn.score,
        window=ends,
        places=at,
        quantiles=np.tile(truth.score(at), (5, 1)),
        told=True,
    )
    return curve_chart([shown], unit, "The curve, and evaluations of it with noise.")


def csv_of(answer: Answer) -> str:
    """The simulated evaluations as ``scale fit`` reads them, R0 in the row of compute 0."""
    result = answer.result
    rows = [(0.0, result["R0"]), *zip(result["compute"], result["score"], strict=True)]
    return "compute,score\n" + "".join(f"{float(C)!r},{float(R)!r}\n" for C, R in rows)
