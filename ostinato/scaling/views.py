"""From what the library knows of a curve to what terminal and page show of it.

The rule of what may be told is applied here, once: intervals of a curve that is not identified have no
median, and of one that refutes the model there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ostinato.observe.ledger import priced, read, summary
from ostinato.observe.report.charts import Section
from ostinato.observe.report.facts import Line, Table
from ostinato.observe.report.ledger import section, tables, torn
from ostinato.observe.report.ledger import section as ledger_section
from ostinato.observe.report.reading import read_run
from ostinato.observe.report.scaling import (
    NONE,
    Course,
    Forest,
    compute_text,
    curve_chart,
    cutoff_chart,
    places,
    residual_chart,
)
from ostinato.run import RunFolder
from ostinato.scaling.fit import by_cutoff
from ostinato.scaling.gates import TOLD, Assessment, assess
from ostinato.scaling.posterior import Interval, Posterior, interval, posterior
from ostinato.scaling.reading import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """For people, for machines, and for a page, whose charts are made only when it is wanted."""

    title: str
    kind: str
    result: Mapping[str, Any]  # the JSON object; NaN and infinity become null
    lead: Sequence[str] = ()
    alarms: Sequence[str] = ()
    tables: Sequence[Table] = ()
    forests: Callable[[], Sequence[Forest]] = tuple
    sections: Callable[[], Sequence[Section]] = list
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A window, its posterior, and what may be said of it."""

    window: Window
    posterior: Posterior
    assessment: Assessment

    @classmethod
    def of(cls, window: Window) -> Known:
        """Raises ValueError for fewer than 3 evaluations."""
        found = posterior(window.fitted)
        return cls(window=window, posterior=found, assessment=assess(found))

    @property
    def told(self) -> bool:
        """May a point be told?"""
        return self.assessment.standing in TOLD

    @property
    def name(self) -> str:
        return self.window.whole.name

    def shown(self, draws: np.ndarray, level: float = 0.9) -> Interval | None:
        """The interval of ``draws``, as much of it as may be told."""
        if self.assessment.silent:
            return None
        return interval(draws, level) if self.told else interval(draws, level).ends()

    def parameters(self) -> dict[str, Interval | None]:
        """A, B and C_mid, as much of them as may be told: no median of B and C_mid where they are the
        prior's."""
        draws = {"A": self.posterior.A, "B": self.posterior.B, "C_mid": self.posterior.C_mid}
        found = {name: self.shown(each) for name, each in draws.items()}
        if not self.assessment.steep:
            found |= {name: one and one.ends() for name, one in found.items() if name != "A"}
        return found


# -- as text


def span(found: Interval | None, form: str = "{:.3f}") -> str:
    """ "[0.597, 0.622]"; ``form`` of "" is for compute."""
    if found is None:
        return NONE
    return f"[{_text(found.low, form)}, {_text(found.high, form)}]"


def middle(found: Interval | None, form: str = "{:.3f}") -> str:
    """The median, or a dash where it may not be told."""
    if found is None or math.isnan(found.median):
        return NONE
    return _text(found.median, form)


def _text(value: float, form: str) -> str:
    return form.format(value) if form and math.isfinite(value) else compute_text(value)


def table(title: str, columns: Sequence[str], lines: Sequence[Line], note: str = "") -> Table:
    return Table(title=title, head=columns, rows=lines, note=note)


def line(name: str, note: str, *cells: str) -> Line:
    return f"{name}\n{note}", *cells


def standing_sentences(known: Known) -> list[str]:
    """Whether the curve is identified and why, what was fitted, and what else is odd about it."""
    found, series, window = known.assessment, known.posterior.series, known.window
    left_out = len(window.whole.between(last=math.nextafter(float(series.compute[0]), 0)))
    ends = f"{compute_text(series.compute[0])} to {compute_text(series.compute[-1])} {window.unit}"
    parts = [f"{left_out} before left out"] * bool(left_out)
    parts += [f"{series.unmeasured} without a score left out"] * bool(series.unmeasured)
    parts += [f"{len(window.later)} later held against the fit"] * bool(len(window.later))
    sentences = [
        f"{known.name} is {found.standing}: {found.reason}.",
        f"Fitted: {', '.join([f'{len(series)} evaluations from {ends}', *parts])}.",
    ]
    if window.run is not None and torn(RunFolder.open(window.run)):
        sentences.append("The last line of its ledger was torn by a kill and is not counted.")
    if window.cut is not None:
        sentences.append(f"Cut: {window.cut.reason}.")
    if found.flags:
        sentences.append(f"Flags: {', '.join(found.flags)}.")
    return sentences


def cut_tables(known: Known) -> list[Table]:
    """The sweep of --cut auto, where it made one."""
    cut, unit = known.window.cut, known.window.unit
    if cut is None or not cut.sweep or not known.told:
        return []
    lines = [
        line(
            compute_text(one.first),
            unit,
            str(one.evaluations),
            f"{one.A:.3f} ± {one.sd:.3f}",
            f"{one.moved:.1f}",
            "chosen" if one.first == cut.first else "",
        )
        for one in cut.sweep
    ]
    note = (
        "A and its sd with the noise of real runs; moved: how far the ceilings of later cuts lie from that of"
        " this one, in sd of the difference."
    )
    return [table("Cut at", ("evaluations", "A", "moved", ""), lines, note)]


# -- as charts


def course(known: Known, at: np.ndarray) -> Course:
    """The run and its curve at the places ``at``."""
    series, whole = known.posterior.series, known.window.whole
    quantiles = None
    if not known.assessment.silent:
        quantiles = np.quantile(known.posterior.score(at), [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    return Course(
        name=known.name,
        compute=whole.compute,
        score=whole.score,
        window=(float(series.compute[0]), float(series.compute[-1])),
        places=at,
        quantiles=quantiles,
        told=known.told,
    )


def curve_sections(known: Known, last: float = 0.0) -> list[Section]:
    """The curve (up to compute ``last``, or twice what is measured), what the ceiling hangs on, ledger."""
    compute = known.window.whole.compute
    at = places([compute], max(last, 2 * float(compute[-1])))
    note = "Held-out score, 0 to 1; bands: what is known of the curve, without the noise of evaluations."
    if known.assessment.silent:
        note = f"No curve is drawn: {known.assessment.reason}."
    elif not known.told:
        note = f"Not identified, so no median: {known.assessment.reason}."
    sections = [
        Section(title="Curve", charts=[curve_chart([course(known, at)], known.window.unit, note)]),
        *diagnostics(known),
    ]
    if known.window.run is not None:
        costs = ledger_section(read_run(RunFolder.open(known.window.run)).ledger)
        sections += [costs] if costs is not None else []
    return sections


def diagnostics(known: Known) -> list[Section]:
    """Residuals and A by cut-off; nothing where no point may be told, for each has one."""
    if not known.told:
        return []
    found, series = known.posterior, known.posterior.series
    cuts = by_cutoff(series)
    first, A = np.array([cut.first for cut in cuts]), np.array([cut.A for cut in cuts])
    charts = [
        residual_chart(series.compute, found.fit.residuals, found.sd, known.window.unit),
        *([cutoff_chart(first, A, known.window.unit)] if len(cuts) > 1 else []),
    ]
    return [Section(title="What the ceiling hangs on", charts=charts)]


# -- the ledger


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
        lead += ["The last line of its ledger was torn by a kill and is not counted."] * torn(run)
        lead += sums[name].notes

    def sections() -> list[Section]:
        made = [section(found, name if len(rows) > 1 else "") for name, found in rows.items()]
        return [one for one in made if one is not None]

    return Answer(
        title=" and ".join(names),
        kind="ledger",
        result={"runs": [{"run": name, **asdict(one)} for name, one in sums.items()]},
        lead=lead,
        tables=tables(sums),
        sections=sections,
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Of the folders; numbered where two are alike."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]
