"""The metrics of a run over its steps, in bounded memory, as the report's charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.observe.report.charts import figure, held_out, sections, to_plain
from ostinato.observe.report.mismatch import gap_chart
from ostinato.observe.report.reading import Row, RunData, number, numbers
from ostinato.observe.report.timeline import pipeline_charts

PLACES = 400  # points along the steps; with more, two neighbours become one

Place = tuple[int, Counter[str], Counter[str]]  # its last step, sums by metric, number of values by metric


class Curves:
    """The rows of metrics.jsonl. For a run of more steps than ``places`` (an even number) only the means
    over 2, 4, 8 ... steps are kept."""

    def __init__(self, places: int = PLACES) -> None:
        self.last: Mapping[str, float] = {}  # the last row
        self.each = 1  # steps per place
        self.names: set[str] = set()
        self._most, self._rows = places, 0
        self._places: list[Place] = []

    def add(self, row: Row) -> None:
        """Add the next row, in order of steps; a row without a step is ignored."""
        if number(row, "step") is None:
            return
        self.last = numbers(row)
        self.names |= self.last.keys() - {"step"}
        one = (int(self.last["step"]), Counter(self.last), Counter(dict.fromkeys(self.last, 1)))
        if self._rows % self.each:
            one = _joined(self._places.pop(), one)
        elif len(self._places) == self._most:
            self.each *= 2
            pairs = zip(self._places[::2], self._places[1::2], strict=True)
            self._places = [_joined(*pair) for pair in pairs]
        self._places.append(one)
        self._rows += 1

    def rows(self) -> list[dict[str, float]]:
        """The mean over the steps of each place; its "step" is the last of them."""
        return [
            {name: value / counts[name] for name, value in sums.items()} | {"step": step}
            for step, sums, counts in self._places
        ]


def _joined(one: Place, other: Place) -> Place:
    """Two neighbouring places merged; updates ``one``."""
    for had, more in zip(one[1:], other[1:], strict=True):
        had.update(more)
    return other[0], one[1], one[2]


def charts(curves: Curves, data: RunData, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The report's charts that have data, the held-out score first, then one chart for each of the ``chosen``
    metrics."""
    rows = curves.rows()
    joined = f" Each point joins {curves.each} steps." if curves.each > 1 else ""
    data = replace(data, metrics=rows)
    drawn = [
        *(chart for section in sections(data) for chart in section.charts),
        gap_chart(data),
        *pipeline_charts(data),
        *(figure(rows, name, "", "", {name: "value"}, key=f"metric {name}") for name in chosen),
    ]
    found = [held_out(data), *(replace(one, note=f"{one.note}{joined}".strip()) for one in drawn)]
    return [to_plain(one) for one in found if not one.empty]
