"""The metrics of a run over its steps, in bounded memory, as charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.observe.report.charts import MAX_POINTS, Chart, Series, Values, held_out, ready, to_plain
from ostinato.observe.report.reading import Row, RunData, number, numbers

PLACES = MAX_POINTS  # along the steps, before two become one


class Curves:
    """Columns of metrics.jsonl. A run of more steps than ``places`` is kept as the means of 2, 4, 8 ... steps
    each."""

    def __init__(self, places: int = PLACES) -> None:
        self.last: Mapping[str, float] = {}  # row
        self.each = 1  # steps to a place
        self._most = places
        self._rows = 0
        self._steps: list[int] = []  # the last one of each place
        self._sums: dict[str, list[float]] = {}
        self._counts: dict[str, list[float]] = {}  # of the rows that had a value

    def add(self, row: Row) -> None:
        """The next row, in order of steps; what has no step is left out."""
        if number(row, "step") is None:
            return
        self.last = numbers(row)
        if self._rows % self.each == 0:
            if len(self._steps) == self._most:
                self._halve()
            self._steps.append(0)
        self._rows += 1
        self._steps[-1] = int(self.last["step"])
        for name, value in self.last.items():
            sums, counts = self._sums.setdefault(name, []), self._counts.setdefault(name, [])
            missing = len(self._steps) - len(sums)
            sums += [0.0] * missing
            counts += [0.0] * missing
            sums[-1] += value
            counts[-1] += 1

    def _halve(self) -> None:
        """Two places become one."""
        self.each *= 2
        self._steps = self._steps[1::2]
        for columns in (self._sums, self._counts):
            for name, values in columns.items():
                columns[name] = [sum(values[i : i + 2]) for i in range(0, len(values), 2)]

    @property
    def names(self) -> list[str]:
        return sorted(self._sums.keys() - {"step"})

    @property
    def steps(self) -> Sequence[int]:
        return self._steps

    def column(self, name: str) -> Values:
        """One value for each of ``steps``; None where no row had one."""
        pairs = zip(self._sums.get(name, ()), self._counts.get(name, ()), strict=True)
        known = [value / count if count else None for value, count in pairs]
        return known + [None] * (len(self._steps) - len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart of metrics: what its lines are called, by metric."""

    title: str
    lines: Mapping[str, str]
    note: str = ""
    unit: str = ""
    low: float | None = None
    log: bool = False
    stacked: bool = False
    spread: str = ""  # a metric: the band around the first line


COLORS = ("--blue", "--teal", "--orange", "--purple", "--red", "--gold", "--pink", "--grey")
TIMES = {f"time/{name}_s": name for name in ("rollout", "train", "reward", "measure", "other")}
PANELS = (
    Panel(
        title="Reward",
        lines={"reward": "reward"},
        spread="reward_std",
        note="Training answers; band: ± their standard deviation.",
    ),
    Panel(title="Loss", lines={"loss": "loss"}),
    Panel(title="Entropy", lines={"entropy": "entropy"}, unit="nats", low=0.0),
    Panel(
        title="Sampler against trainer",
        lines={"sampling/kl_k3": "k3"},
        unit="nats",
        log=True,
        note="KL estimate per trained token.",
    ),
    Panel(
        title="Staleness",
        lines={"staleness/mean": "mean", "staleness/max": "max"},
        unit="steps",
        low=0.0,
        note="Age of the policy that sampled what was trained on.",
    ),
    Panel(title="Speed", lines={"tokens_per_s": "sampled"}, unit="tokens/s", low=0.0),
    Panel(
        title="Answer length",
        lines={"completions/mean_length": "mean", "completions/max_length": "longest"},
        unit="tokens",
        low=0.0,
    ),
    Panel(title="Time per step", lines=TIMES, unit="s", stacked=True),
    Panel(title="Idle time", lines={"pipeline/bubble_share": "all workers"}, unit="%", low=0.0),
    Panel(title="Queue", lines={"queue/running": "in play", "queue/ready": "ready"}, unit="groups", low=0.0),
)


def charts(curves: Curves, data: RunData, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """What there is to draw of the panels, the held-out score (rows in ``data``) second, and then ``chosen``
    metrics, one to a chart."""
    drawn = [_chart(curves, panel) for panel in PANELS]
    if data.evals:
        drawn.insert(1, held_out(data))
    named = {name: Panel(title=name, lines={name: "value"}) for name in chosen}
    drawn += [replace(_chart(curves, panel), key=f"metric {name}") for name, panel in named.items()]
    return [{**to_plain(chart), "note": chart.note} for chart in map(ready, drawn) if not chart.empty]


def _chart(curves: Curves, panel: Panel) -> Chart:
    series = list(_series(curves, panel))
    joined = f"Each point joins {curves.each} steps." if curves.each > 1 else ""
    return Chart(
        key=panel.title,
        title=panel.title,
        note=f"{panel.note} {joined}".strip(),
        unit=panel.unit,
        steps=list(curves.steps),
        series=series,
        stacked=panel.stacked,
        log=panel.log and any(value and value > 0 for one in series for value in one.values),
        low=panel.low,
    )


def _series(curves: Curves, panel: Panel) -> Iterator[Series]:
    spread = curves.column(panel.spread) if panel.spread else []
    for (metric, label), color in zip(panel.lines.items(), COLORS, strict=False):
        values = curves.column(metric)
        low, high = (
            [None if v is None or s is None else v + sign * s for v, s in zip(values, spread, strict=True)]
            if spread
            else None
            for sign in (-1, 1)
        )
        yield Series(label=label, values=values, color=color, low=low, high=high)
