"""``ostinato scale validate RUN RUN ...``: would our own curves have been foretold from their first half?

Each run is fitted on the first half of its compute, and the mean score of its last fifth is foretold; beside
it stands what was measured. Made of kept lines (``cli.kept``), so the page comes out without the run folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.axis import Axis
from ostinato.cli.kept import MEASURE, Measure, Row, keep, read_kept, series_of, slug
from ostinato.cli.scale_answers import Answer
from ostinato.cli.scale_views import line, table
from ostinato.observe.report.charts import Chart, Section
from ostinato.observe.report.facts import Table
from ostinato.observe.report.scaling import Course, Forest, Stretch, compute_text, curve_chart, places
from ostinato.report.study_plots import Band, Panel, Points, markdown, panels_svg, write_between
from ostinato.scaling import validate
from ostinato.scaling.gates import TOLD, Assessment, assess
from ostinato.scaling.posterior import Posterior, posterior
from ostinato.scaling.series import Series

HALF = 0.5  # of the compute of a run is fitted
BEGIN = "<!-- results: written by `ostinato scale validate --page` -->"
END = "<!-- end of results -->"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """One run: its forecast from the first half, and what is known of it at its end."""

    arm: str
    seed: int
    whole: Series  # without what was left out
    half: Posterior
    assessment: Assessment  # of the half
    ratio: float  # median of C_end / C_mid, by all of the run
    row: validate.Row
    ended: bool  # has the run?

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def told(self) -> bool:
        return self.assessment.standing in TOLD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tested:
    """All runs."""

    laws: Sequence[Law]
    axis: Axis
    first: float  # compute before which evaluations are left out
    left_out: Sequence[str] = ()  # runs that are too short, in words

    @property
    def unit(self) -> str:
        return self.axis.unit


def read_sources(sources: Iterable[Path], measure: Measure = MEASURE) -> list[Row]:
    """Kept lines of run folders and of files of lines."""
    rows: list[Row] = []
    for source in sources:
        if not source.is_dir() and source.suffix != ".jsonl":
            raise ValueError(f"{source} is no run folder and no .jsonl of kept runs; give these, or one CSV")
        rows += [keep(source, measure)] if source.is_dir() else read_kept(source, measure)
    return rows


def tested(rows: Sequence[Row], axis: Axis, first: float = 0.0) -> Tested:
    """A run whose first half has fewer than 5 evaluations is left out; raises ValueError where all are."""
    found, left_out = list[Law](), list[str]()
    for kept in rows:
        whole = series_of(kept, axis).between(first=first)
        forecasts = validate.backtest([whole], (HALF,)) if len(whole) else []
        if not forecasts:
            left_out.append(
                f"{whole.name} is left out: the first half of its compute has fewer than 5 evaluations."
            )
            continue
        half = posterior(whole.between(last=HALF * float(whole.compute[-1])))
        found.append(
            Law(
                arm=kept["arm"],
                seed=kept["seed"],
                whole=whole,
                half=half,
                assessment=assess(half),
                ratio=float(np.median(whole.compute[-1] / posterior(whole).C_mid)),
                row=forecasts[0],
                ended=kept["ended"],
            )
        )
    if not found:
        raise ValueError(
            "no run has 5 evaluations in the first half of its compute; evaluate more often, or lower --cut"
        )
    return Tested(laws=found, axis=axis, first=first, left_out=left_out)


def answer(of: Tested) -> Answer:
    found = of.laws
    return Answer(
        title="Foretold from the first half",
        kind="validation",
        result={
            "axis": of.axis,
            "first": of.first,
            "left_out": of.left_out,
            "summaries": [{"of": kind, **asdict(validate.summary(some))} for kind, some in _kinds(found)],
            "rows": [_as_json(law) for law in found],
        },
        lead=sentences(of),
        tables=[_runs(found, of.unit)],
        forests=lambda: _forests(found),
        sections=lambda: [Section(title="Curves", charts=_charts(found, of.unit))],
    )


def _kinds(found: Sequence[Law]) -> list[tuple[str, list[validate.Row]]]:
    """Runs that have an interval, and those of them that have a point too. One that has neither, because its
    curve refutes the model or has not begun, is in no count: no score of it was foretold."""
    shown = [law for law in found if not law.assessment.silent]
    kinds = [("all", [law.row for law in shown]), ("told", [law.row for law in shown if law.told])]
    return [(kind, some) for kind, some in kinds if some]


def _as_json(law: Law) -> dict[str, Any]:
    row = law.row
    foretold = row.foretold if law.told else row.foretold.ends()
    return {
        "arm": law.arm,
        "seed": law.seed,
        "evaluations": row.evaluations,
        "standing": law.assessment.standing,
        "reason": law.assessment.reason,
        "foretold": None if law.assessment.silent else asdict(foretold),
        "measured": row.final,
        "ended": law.ended,
        "covered": None if law.assessment.silent else row.covered,
        "error": row.error if law.told else None,
        "C_end_over_C_mid": law.ratio,
    }


def sentences(of: Tested) -> list[str]:
    told = list(of.left_out)
    told += [f"{law.name} has not ended: what it has is taken for all." for law in of.laws if not law.ended]
    told += [
        f"{law.name}: {law.whole.unmeasured} evaluations without a score are left out."
        for law in of.laws
        if law.whole.unmeasured
    ]
    told += [
        f"{law.name} has no forecast and is in no count: {law.assessment.reason}."
        for law in of.laws
        if law.assessment.silent
    ]
    for kind, some in _kinds(of.laws):
        sums = validate.summary(some)
        hits = sum(row.covered for row in some)
        kind = "runs have an interval" if kind == "all" else "of them may be told"
        told.append(
            f"{len(some)} {kind}: {hits} of {len(some)} scores inside the 90 % interval, median width"
            f" {sums.median_width:.3f}, median error {sums.median_error:.4f}, largest"
            f" {sums.largest_error:.3f}."
        )
    cut = f", evaluations before {compute_text(of.first)} left out" if of.first else ""
    how = f"Fitted on the first half of the compute ({of.unit}{cut}); measured: mean of the last fifth."
    return [*told, f"{how} The interval is that of the curve: noise of what was measured counts against it."]


def _runs(found: Sequence[Law], unit: str) -> Table:
    lines = []
    for law in found:
        row, silent = law.row, law.assessment.silent
        foretold = f"{row.foretold.median:.3f}" if law.told else "-"
        ends = "-" if silent else f"[{row.foretold.low:.3f}, {row.foretold.high:.3f}]"
        lines.append(
            line(
                law.name,
                "" if law.ended else "not ended",
                f"{row.evaluations} up to {compute_text(law.half.series.compute[-1])}",
                str(law.assessment.standing),
                f"{foretold} {ends}",
                f"{row.final:.3f}",
                f"{row.foretold.median - row.final:+.3f}" if law.told else "-",
                "-" if silent else "yes" if row.covered else "no",
                f"{law.ratio:.1f}",
            )
        )
    columns = ("fitted", "standing", "foretold", "measured", "error", "inside", "end / C_mid")
    return table("Run", columns, lines, f"Scores, 0 to 1; compute in {unit}; intervals 90 %.")


def _forests(found: Sequence[Law]) -> list[Forest]:
    stretches = tuple(
        Stretch(
            name=law.name,
            low=law.row.foretold.low,
            high=law.row.foretold.high,
            middle=law.row.foretold.median if law.told else None,
            text=f"measured {law.row.final:.3f}",
            seen=law.row.final,
        )
        for law in found
        if not law.assessment.silent
    )
    note = "90 % intervals from the first half; a stroke is what was then measured, a dot the forecast told."
    return [Forest(title="Final score", note=note, rows=stretches)] if stretches else []


# -- plots


def _quantiles(law: Law, at: np.ndarray) -> np.ndarray | None:
    if law.assessment.silent:
        return None
    return np.quantile(law.half.score(at), [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)


def _charts(found: Sequence[Law], unit: str) -> list[Chart]:
    return [_chart(law, number, unit) for number, law in enumerate(found)]


def _chart(law: Law, number: int, unit: str) -> Chart:
    compute = law.whole.compute
    at = places([compute], float(compute[-1]))
    course = Course(
        name=law.arm,
        compute=compute,
        score=law.whole.score,
        window=(float(compute[0]), float(law.half.series.compute[-1])),
        places=at,
        quantiles=_quantiles(law, at),
        told=law.told,
    )
    chart = curve_chart([course], unit, "Bands: 90 and 50 %, from the first half alone.")
    return replace(chart, key=f"law-{number}", title=law.name)


def plots(found: Sequence[Law], unit: str) -> dict[str, str]:
    """An SVG for each recipe, a panel for each of its seeds, by the slug of the recipe."""
    by_arm: dict[str, list[Law]] = {}
    for law in found:
        by_arm.setdefault(law.arm, []).append(law)
    title = "{}: filled points are fitted, hollow ones came later; band: 90 % from the first half"
    return {
        slug(arm): panels_svg([_panel(law) for law in some], title.format(arm), unit)
        for arm, some in by_arm.items()
    }


def _panel(law: Law) -> Panel:
    compute, score = law.whole.compute, law.whole.score
    at = np.geomspace(compute[0], compute[-1], 80)
    quantiles, end = _quantiles(law, at), float(law.half.series.compute[-1])
    bands = []
    if quantiles is not None:
        middle = quantiles[2] if law.told else None
        bands = [Band(compute=at, low=quantiles[0], middle=middle, high=quantiles[4])]
    early = compute <= end
    return Panel(
        title=f"seed {law.seed}",
        bands=bands,
        points=[
            Points(compute=compute[early], score=score[early]),
            Points(compute=compute[~early], score=score[~early], filled=False),
        ],
        edge=end,
        edge_name="fitted up to here",
        note="" if law.told else str(law.assessment.standing),
    )


def write_page(path: Path, of: Tested) -> None:
    """``path``.md, of which only what stands between its marks is written anew, and a plot for each recipe,
    ``path``-*.svg, beside it."""
    stem = path.with_suffix("") if path.suffix == ".md" else path
    parts = ["\n".join(f"- {sentence}" for sentence in sentences(of)), markdown(_runs(of.laws, of.unit))]
    write_between(stem, "# Our own law\n\n", (BEGIN, END), parts, plots(of.laws, of.unit))
