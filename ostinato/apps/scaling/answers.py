"""What the commands of ``ostinato scale`` answer: sentences, tables, one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ostinato.apps.scaling import contrast
from ostinato.apps.scaling.ablation import Run, ablate
from ostinato.apps.scaling.decide import Terms, decide, forecast, reach
from ostinato.apps.scaling.forms import ORIGINS, Choice, choose, rival_sentence
from ostinato.apps.scaling.posterior import Interval
from ostinato.apps.scaling.reading import Window
from ostinato.apps.scaling.views import TORN, Answer, Known, middle, span, standing_sentences
from ostinato.observe.ledger import priced, read, summary
from ostinato.observe.report import ledger as ledger_report
from ostinato.observe.report.facts import NONE, Table, compute_text
from ostinato.run import RunFolder


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
        "C_max_over_C_mid": found.ratio if found.steep else None,
        **{name: _json(one) for name, one in known.parameters().items()},
    }


def _json(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)


# -- fit


def fit(window: Window) -> Answer:
    """The curve, the interval of its ceiling, and other laws."""
    known = Known.of(window)
    forms = choose(window.fitted) if known.ranked else []
    return Answer(
        result=about(known) | _fitted(known, forms),
        lead=[*standing_sentences(known), *filter(None, [rival_sentence(forms)])],
        tables=[_parameters(known)],
    )


def _fitted(known: Known, forms: Sequence[Choice]) -> dict[str, Any]:
    found = known.posterior.fit
    curve = found.curve
    least = _steep(known, {"A": curve.A, "B": curve.B, "C_mid": curve.C_mid})
    least |= {"sse": found.sse, "sd": found.residual_sd}
    return {
        "least_squares": least if known.ranked else None,
        "laws": [
            {
                "form": one.form,
                "error": one.error,
                "by_origin": dict(zip(map(str, ORIGINS), one.by_origin, strict=False)),
                "parameters": one.law and _steep(known, one.law.parameters),
            }
            for one in forms
        ],
    }


def _steep(known: Known, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without B and C_mid, where they are not known."""
    unknown = () if known.assessment.steep else ("B", "C_mid")
    return {name: None if name in unknown else value for name, value in parameters.items()}


def _parameters(known: Known) -> Table:
    unit, curve = known.window.unit, known.posterior.fit.curve
    A = f"{curve.A:.4f}" if known.ranked else NONE
    B, C_mid = (f"{curve.B:.3f}", compute_text(curve.C_mid)) if known.assessment.steep else (NONE, NONE)
    shown, series = known.parameters(), known.posterior.series
    error = f" ± {series.R0_stderr:.3f}" if series.R0_stderr else ""
    kinds = (
        ("A", "score; the ceiling", "{:.3f}", A),
        ("B", "no unit; steepness in ln C", "{:.2f}", B),
        ("C_mid", f"{unit}; half of the gain", "", C_mid),
    )
    lines = [
        (f"{name}\n{note}", middle(shown[name], form), span(shown[name], form), least)
        for name, note, form, least in kinds
    ]
    lines.append(("R0\nscore; before training", f"{series.R0:.3f}{error}", "measured", NONE))
    return Table(title=known.name, head=("median", "90 % interval", "least squares"), rows=lines)


# -- forecast and decide


def forecasts(window: Window, at: Sequence[float], targets: Sequence[float]) -> Answer:
    """Scores at given computes, and computes at which given scores are reached."""
    for target in targets:
        if not 0 < target < 1:
            raise ValueError(f"--target is {target:g}; use a score between 0 and 1")
    known = Known.of(window)
    scores = [forecast(known.posterior, C) for C in at]
    reached = [reach(known.posterior, T) for T in targets]
    now, unit = float(window.fitted.compute[-1]), window.unit
    rival_law = rival_sentence(choose(window.fitted)) if known.ranked else ""
    lines = []
    for one in scores:
        gain = known.assessment.shown(known.posterior.gain(now, one.compute))
        cells = (middle(one.score), span(one.score), span(one.measured), span(gain, "{:+.3f}"))
        lines.append((f"{compute_text(one.compute)} {unit}\nscore", *cells))
    columns = ("median", "90 % interval", "of one evaluation", f"gain on {compute_text(now)}")
    of_score = Table(title="Score at", head=columns, rows=lines)
    lines = []
    for one in reached:
        chance = NONE if one.probability is None else f"{one.probability:.0%}"
        lines.append((f"{one.target:.3f}\n{unit}", chance, middle(one.compute, ""), span(one.compute, "")))
    head = ("P(A above it)", "compute, median", "90 % interval")
    of_compute = Table(title="Target", head=head, rows=lines)
    return Answer(
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
        tables=[*([of_score] if scores else []), *([of_compute] if reached else [])],
    )


def judge(window: Window, terms: Terms) -> Answer:
    """Go on, stop, or undecided; the exit code says which."""
    known = Known.of(window)
    found = decide(known.posterior, terms)
    left = terms.budget - float(window.fitted.compute[-1])
    least, price = f"{terms.min_gain:.3f}", f"{terms.price * left:.3f}"
    rows = [("gain of the rest\nscore", middle(found.gain), span(found.gain), least, price)]
    columns = ("median", "80 % interval", "least gain", "price of the rest")
    note = f"From {compute_text(terms.budget - left)} to {compute_text(terms.budget)} {window.unit}."
    return Answer(
        result=about(known)
        | {
            "action": found.action,
            "exit_code": found.action.exit_code,
            "why": found.reason,
            "gain": _json(found.gain),
            "rival": found.rival or None,
            **asdict(terms),
        },
        lead=[
            f"{found.action.capitalize()}: {found.reason}.",
            *standing_sentences(known),
            *([found.rival] if found.rival else []),
        ],
        tables=[Table(title=known.name, head=columns, rows=rows, note=note)],
        exit_code=found.action.exit_code,
    )


# -- several runs


def compare(windows: Sequence[Window]) -> Answer:
    """Each run against the first: an ablation of one seed an arm."""
    found = ablate(
        [Run(arm=one.whole.name, seed=0, series=one.fitted) for one in windows],
        reference=windows[0].whole.name,
    )
    return Answer(
        result=contrast.as_json(found),
        lead=contrast.sentences(found),
        tables=contrast.tables(found, windows[0].unit),
    )


def books(runs: Sequence[RunFolder], price: float = 0.0) -> Answer:
    """The sums of their ledgers, with ``price`` for a device-hour of sessions that have none. Raises
    ValueError for a run without a ledger, or with one that is damaged."""
    names = _names(runs)
    rows = {name: priced(read(run), price) for name, run in zip(names, runs, strict=True)}
    for name, found in rows.items():
        if not found:
            raise ValueError(f"run {name} has no row in ledger.jsonl; it has finished no step yet")
    sums = {name: summary(found) for name, found in rows.items()}
    lead = []
    for name, run in zip(names, runs, strict=True):
        lead.append(f"{name}: {sums[name].steps} steps, started {_times(sums[name].sessions)}.")
        lead += [TORN] * ledger_report.torn(run)
        lead += sums[name].notes
    result = {"runs": [{"run": name, **asdict(one)} for name, one in sums.items()]}
    return Answer(result=result, lead=lead, tables=ledger_report.tables(sums))


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Of the folders; numbered where two are alike."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]
