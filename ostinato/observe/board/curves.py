"""The metrics of a run over its steps, in bounded memory, as the report's charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.observe.report.charts import Chart, Lines, figure, held_out, reward, speed, times, to_plain
from ostinato.observe.report.reading import Row, RunData, number, numbers

PLACES = 400  # along the steps, before two become one

Place = tuple[int, Counter[str], Counter[str]]  # its last step, sums by metric, rows that had a value


class Curves:
    """The rows of metrics.jsonl. Of a run of more steps than ``places`` (an even number) the means of 2, 4,
    8 ... steps each are kept."""

    def __init__(self, places: int = PLACES) -> None:
        self.last: Mapping[str, float] = {}  # row
        self.each = 1  # steps to a place
        self.names: set[str] = set()
        self._most, self._rows = places, 0
        self._places: list[Place] = []

    def add(self, row: Row) -> None:
        """The next row, in order of steps; what has no step is left out."""
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
        """The mean of each place; its step is the last one that it joins."""
        return [
            {name: value / counts[name] for name, value in sums.items()} | {"step": step}
            for step, sums, counts in self._places
        ]


def _joined(one: Place, other: Place) -> Place:
    """Two places as one."""
    for had, more in zip(one[1:], other[1:], strict=True):
        had.update(more)
    return other[0], one[1], one[2]


QUEUE: Lines = {"queue/running": "in play", "queue/ready": "ready"}
LENGTH: Lines = {"completions/mean_length": "mean", "completions/max_length": "longest"}


def charts(curves: Curves, data: RunData, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """What there is to draw of the metrics, the held-out score (rows in ``data``) second, and then ``chosen``
    metrics, one to a chart."""
    rows = curves.rows()
    apart = {"log": any(row.get("sampling/kl_k3", 0) > 0 for row in rows)}
    age = {"staleness/mean": "mean", "staleness/max": "max"}
    aged = "Age of the policy that sampled what was trained on."
    drawn: list[Chart] = [
        reward(rows),
        *([held_out(data)] if data.evals else []),
        figure(rows, "Loss", "", "", {"loss": "loss"}),
        figure(rows, "Entropy", "", "nats", {"entropy": "entropy"}, low=0.0),
        figure(
            rows,
            "Sampler against trainer",
            "KL per trained token.",
            "nats",
            {"sampling/kl_k3": "k3"},
            **apart,
        ),
        figure(rows, "Staleness", aged, "steps", age, low=0.0),
        speed(rows),
        figure(rows, "Answer length", "", "tokens", LENGTH, low=0.0),
        times(rows),
        figure(rows, "Idle time", "", "%", {"pipeline/bubble_share": "all workers"}, low=0.0),
        figure(rows, "Queue", "", "groups", QUEUE, low=0.0),
        *(figure(rows, name, "", "", {name: "value"}, key=f"metric {name}") for name in chosen),
    ]
    joined = f" Each point joins {curves.each} steps." if curves.each > 1 else ""
    notes = [one.note if one.key == "held-out" else f"{one.note}{joined}".strip() for one in drawn]
    return [
        to_plain(replace(one, note=note)) for one, note in zip(drawn, notes, strict=True) if not one.empty
    ]
