"""What the commands of ``ostinato scale`` answer about a run: sentences, tables, one JSON object, charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

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
    slope_chart,
    width_chart,
)
from ostinato.scaling import gates
from ostinato.scaling.compare import Comparison, compare
from ostinato.scaling.curve import Sigmoid, linearised
from ostinato.scaling.cut import Cut
from ostinato.scaling.decide import Terms, decide, forecast, reach
from ostinato.scaling.fit import CutOff, by_cutoff, spread
from ostinato.scaling.forms import ORIGINS, Choice, choose, rival, rival_sentence
from ostinato.scaling.gates import Drift, Truncation, drift
from ostinato.scaling.plan import Pilot, plan_pilot, simulated
from ostinato.scaling.posterior import Interval
from ostinato.scaling.reading import Side, Window
from ostinato.scaling.seeds import FLOOR
from ostinato.scaling.series import Series
from ostinato.scaling.views import (
    Answer,
    Known,
    course,
    curve_sections,
    cut_tables,
    line,
    middle,
    span,
    standing_sentences,
    table,
)

ALARM = 10  # exit code of a watch that raises one: as that of a decision to stop


def about(known: Known) -> dict[str, Any]:
    """What every JSON object about one curve begins with."""
    series, found = known.posterior.series, known.assessment
    return {
        "series": known.name,
        "axis": series.axis,
        "held_out": series.held_out,
        "evaluations": len(series),
        "window": [float(series.compute[0]), float(series.compute[-1])],
        "R0": series.R0,
        "R0_stderr": series.R0_stderr,
        "standing": found.standing,
        "reason": found.reason,
        "flags": list(found.flags),
        "cut": None if (cut := known.window.cut) is None else _cut_json(known, cut),
        "C_max_over_C_mid": found.ratio if found.steep else None,
        **{name: _json(one) for name, one in known.parameters().items()},
    }


def _cut_json(known: Known, cut: Cut) -> dict[str, Any]:
    return asdict(cut) if known.told else asdict(cut) | {"sweep": []}


def _json(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)


# -- fit


def fit(window: Window) -> Answer:
    """The curve, the interval of its ceiling, other laws, stability by cut-off, and later evaluations."""
    known = Known.of(window)
    cuts = by_cutoff(window.fitted) if known.told else []
    forms = choose(window.fitted) if known.told else []
    after = _drift(known)
    sentences = standing_sentences(known)
    sentences += [rival_sentence(forms)] if rival(forms) else []
    if len(cuts) > 1:
        sentences.append(f"A moves by {spread(cuts):.3f} over {len(cuts)} cut-offs.")
    return Answer(
        title=known.name,
        kind="fit",
        result=about(known) | _fitted(known, cuts, forms, after),
        lead=sentences + ([_later(after)] if after is not None else []),
        alarms=_alarms(after),
        tables=[_parameters(known), *([_laws(forms)] if forms else []), *cut_tables(known)],
        sections=lambda: curve_sections(known),
    )


def _fitted(
    known: Known, cuts: Sequence[CutOff], forms: Sequence[Choice], after: Drift | None
) -> dict[str, Any]:
    found = known.posterior.fit
    curve = found.curve
    least = _steep(known, {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid})
    least |= {"sse": found.sse, "sd": found.residual_sd}
    return {
        "least_squares": least if known.told else None,
        "by_cutoff": [_steep(known, asdict(cut)) for cut in cuts],
        "laws": [
            {
                "form": one.form,
                "error": one.error,
                "by_origin": dict(zip(map(str, ORIGINS), one.by_origin, strict=False)),
                "parameters": one.law and _steep(known, one.law.parameters),
            }
            for one in forms
        ],
        "later": None if after is None else _drift_json(after),
    }


def _steep(known: Known, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without B and C_mid, where they are not known."""
    unknown = () if known.assessment.steep else ("B", "C_mid")
    return {name: None if name in unknown else value for name, value in parameters.items()}


def _parameters(known: Known) -> Table:
    unit, curve = known.window.unit, known.posterior.fit.curve
    A = f"{curve.A:.4f}" if known.told else NONE
    B, C_mid = (f"{curve.B:.3f}", compute_text(curve.C_mid)) if known.assessment.steep else (NONE, NONE)
    shown, series = known.parameters(), known.posterior.series
    error = f" ± {series.R0_stderr:.3f}" if series.R0_stderr else ""
    kinds = (
        ("A", "score; the ceiling", "{:.3f}", A),
        ("B", "no unit; steepness in ln C", "{:.2f}", B),
        ("C_mid", f"{unit}; half of the gain", "", C_mid),
    )
    lines = [
        line(name, note, middle(shown[name], form), span(shown[name], form), least)
        for name, note, form, least in kinds
    ]
    lines.append(line("R0", "score; before training", f"{series.R0:.3f}{error}", "measured", NONE))
    return table(known.name, ("median", "90 % interval", "least squares"), lines)


def _laws(forms: Sequence[Choice]) -> Table:
    """All forms, the best first; the ceiling of a law that has none is 1."""

    def error(one: float | None) -> str:
        return NONE if one is None or not math.isfinite(one) else f"{one:.4f}"

    lines = []
    for one in forms:
        by_origin = [error(each) for each in one.by_origin or [None] * len(ORIGINS)]
        ceiling = NONE if one.law is None else f"{one.law.parameters.get('A', 1.0):.3f}"
        lines.append(line(one.form, "score", error(one.error), *by_origin, ceiling))
    note = (
        "Error: root mean square over what came after so many of the evaluations, by a law fitted to those"
        " before. Forecasts are by the posterior whatever comes first."
    )
    note += "".join(f" No {one.form}: {one.reason}." for one in forms if one.reason)
    origins = [f"from {origin:.0%}" for origin in ORIGINS]
    return table("Law", ("rolling-origin error", *origins, "ceiling"), lines, note)


def _drift(known: Known) -> Drift | None:
    """Of the evaluations after the window; None without any, or without a forecast."""
    later = known.window.later
    return drift(known.posterior.series, later) if known.told and len(later) else None


def _later(after: Drift) -> str:
    verdict = "no alarm" if after.alarm is None else f"alarm at compute {compute_text(after.alarm)}"
    return (
        f"{len(after.compute)} later evaluations: z from {after.z.min():+.1f} to {after.z.max():+.1f},"
        f" {verdict}."
    )


def _alarms(after: Drift | None) -> list[str]:
    if after is None or after.alarm is None:
        return []
    return [f"From compute {compute_text(after.alarm)} on, the run falls short of its forecast."]


def _drift_json(after: Drift) -> dict[str, Any]:
    return asdict(after) | {"evaluations": len(after.compute)}


# -- forecast and decide


def foretell(window: Window, at: Sequence[float], targets: Sequence[float]) -> Answer:
    """Scores at given computes, and computes at which given scores are reached."""
    for target in targets:
        if not 0 < target < 1:
            raise ValueError(f"--target is {target:g}; use a score between 0 and 1")
    known = Known.of(window)
    scores = [forecast(known.posterior, C) for C in at]
    reached = [reach(known.posterior, T) for T in targets]
    now, unit = float(window.fitted.compute[-1]), window.unit
    rival_law = rival_sentence(choose(window.fitted)) if known.told else ""
    lines = []
    for one in scores:
        gain = known.shown(known.posterior.gain(now, one.compute))
        cells = (middle(one.score), span(one.score), span(one.measured), span(gain, "{:+.3f}"))
        lines.append(line(f"{compute_text(one.compute)} {unit}", "score", *cells))
    of_score = table(
        "Score at",
        ("median", "90 % interval", "of one evaluation", f"gain on {compute_text(now)}"),
        lines,
    )
    lines = []
    for one in reached:
        chance = NONE if one.probability is None else f"{one.probability:.0%}"
        times = span(_times(one.compute, now), "{:.2g}x")
        lines.append(
            line(f"{one.target:.3f}", unit, chance, middle(one.compute, ""), span(one.compute, ""), times)
        )
    of_compute = table(
        "Target", ("P(A above it)", "compute, median", "90 % interval", "of what is spent"), lines
    )
    return Answer(
        title=known.name,
        kind="forecast",
        result=about(known)
        | {
            "at": [
                {"compute": one.compute, "score": _json(one.score), "measured": _json(one.measured)}
                for one in scores
            ],
            "targets": [
                {"target": one.target, "probability": one.probability, "compute": _json(one.compute)}
                for one in reached
            ],
            "rival": rival_law or None,
        },
        lead=[*standing_sentences(known), *([rival_law] if rival_law else [])],
        tables=[*([of_score] if scores else []), *([of_compute] if reached else []), *cut_tables(known)],
        sections=lambda: curve_sections(known, max(at, default=0.0)),
    )


def _times(found: Interval | None, now: float) -> Interval | None:
    if found is None:
        return None
    return Interval(low=found.low / now, median=found.median / now, high=found.high / now)


def judge(window: Window, terms: Terms) -> Answer:
    """Go on, stop, or undecided; the exit code says which."""
    known = Known.of(window)
    found = decide(known.posterior, terms)
    left = terms.budget - float(window.fitted.compute[-1])
    price = terms.price * left
    rows: list[Line] = [
        line(
            "gain of the rest",
            "score",
            middle(found.gain),
            span(found.gain),
            f"{terms.min_gain:.3f}",
            f"{price:.3f}",
        )
    ]
    columns = ("median", "80 % interval", "least gain", "price of the rest")
    note = f"From {compute_text(terms.budget - left)} to {compute_text(terms.budget)} {window.unit}."
    return Answer(
        title=known.name,
        kind="decision",
        result=about(known)
        | {
            "action": found.action,
            "exit_code": found.action.exit_code,
            "why": found.reason,
            "gain": _json(found.gain),
            "settled": found.settled,
            "rival": found.rival or None,
            **asdict(terms),
        },
        lead=[
            f"{found.action.capitalize()}: {found.reason}.",
            *standing_sentences(known),
            *([found.rival] if found.rival else []),
        ],
        tables=[table(known.name, columns, rows, note), *cut_tables(known)],
        sections=lambda: curve_sections(known, terms.budget),
        exit_code=found.action.exit_code,
    )


# -- watch


def watch(window: Window, truncated: float | None = None) -> Answer:
    """The first forecast that could be told against all that came after it, and the share of truncated
    answers where it is known. The exit code of an alarm is that of a stop."""
    known = Known.of(window)
    after = gates.watch(window.fitted)
    cut = Truncation.FINE if truncated is None else gates.truncation(truncated)
    alarms = _alarms(after)
    if cut is Truncation.ALARM:
        alarms.append(f"{truncated:.0%} of the answers are truncated; runs above 15 % did not recover.")
    if known.assessment.refuted:
        alarms.append(f"The curve is refuted: {known.assessment.reason}.")
    sentences = standing_sentences(known)
    if after is None:
        sentences.append("No forecast could be told yet that later evaluations could be held against.")
    elif after.exceeds is not None:
        sentences.append(f"Better than foretold from compute {compute_text(after.exceeds)} on; fit again.")
    if cut is Truncation.WARN:
        sentences.append(f"{truncated:.0%} of the answers are truncated; above 15 % is an alarm.")
    return Answer(
        title=known.name,
        kind="watch",
        result=about(known)
        | {
            "alarms": alarms,
            "drift": None if after is None else _drift_json(after),
            "truncated": truncated,
            "truncation": None if truncated is None else cut,
        },
        lead=sentences,
        alarms=alarms,
        tables=[_watched(known, after, truncated), *cut_tables(known)],
        sections=lambda: curve_sections(known),
        exit_code=ALARM if alarms else 0,
    )


def _watched(known: Known, after: Drift | None, truncated: float | None) -> Table:
    lines = []
    if after is not None:
        limits, series = gates.LIMITS, known.posterior.series
        held = series.compute[len(series) - len(after.compute) - 1]
        lines += [
            line("forecast told at", known.window.unit, compute_text(held), ""),
            line("evaluations since", "", f"{len(after.compute)}", ""),
            line("last score", "", f"{series.score[-1]:.3f}", f"foretold {after.forecast[-1]:.3f}"),
            line("largest shortfall", "sd", f"{-after.innovation.min():.1f}", f"{limits.single:g}"),
            line("CUSUM below", "sd", f"{after.below.max():.1f}", f"{limits.sum:g}"),
            line("CUSUM above", "sd", f"{after.above.max():.1f}", f"{limits.sum:g}"),
        ]
    if truncated is not None:
        lines.append(line("truncated", "share of answers", f"{truncated:.1%}", "10 % warns, 15 % alarms"))
    return table(known.name, ("is", "compared with"), lines)


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
