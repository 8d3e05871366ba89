"""A run folder as rows, read once or followed while it grows: the source of page, terminal and other readers.

Logs are read by byte offset, each byte once. A torn last line is the ordinary end of a killed run; a line
that is not JSON ends the reading of its log, as ``damage`` reports. A log that a resumed run has replaced is
read again. Nothing here writes, locks or waits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ostinato.inputs import parse_json, parse_toml
from ostinato.observe.ledger import find_fault
from ostinato.observe.stats import Estimate, number
from ostinato.observe.timeline import Span, coarsen
from ostinato.run import GREEDY_SET, MAIN_SET, RunFolder

Row = Mapping[str, Any]

CHUNK = 8 << 20  # bytes of a log that are read at once, so that first rows come soon
WITNESS = 64  # bytes before the offset, by which a log is recognised
SPANS = 60_000  # spans of the timeline; above twice as many, neighbours are merged
HORIZON_S = 900.0  # seconds of the timeline that are followed
LOGS = ("metrics", "eval", "ledger", "watch", "forecast", "mismatch", "failed_rewards", "starts", "timeline")


class Tail:
    """A reader of the complete rows of a growing log of JSON lines, each once."""

    def __init__(self, path: Path) -> None:
        self.path, self.damage, self.left = path, "", 0  # left: bytes that are not read yet
        self._offset, self._before, self._inode = 0, b"", -1

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the log was replaced, so that earlier rows are void; the next rows, from ``CHUNK``
        bytes)."""
        try:
            with self.path.open("rb") as file:
                replaced = self._inode != -1 and not self._same(file)
                self._offset = 0 if replaced else self._offset
                rows = list(self._rows(file))
                start = max(0, self._offset - WITNESS)
                file.seek(start)
                self._before, self._inode = file.read(self._offset - start), os.fstat(file.fileno()).st_ino
                self.left = max(0, file.seek(0, os.SEEK_END) - self._offset) if rows else 0
                return replaced, rows
        except FileNotFoundError:
            replaced, self._offset, self._before, self._inode = self._inode != -1, 0, b"", -1
            return replaced, []

    def _same(self, file: BinaryIO) -> bool:
        """Whether the file is the one read before, by its inode and the bytes before the offset."""
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before and os.fstat(file.fileno()).st_ino == self._inode

    def _rows(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        """Yield the rows from the offset on, and advance it."""
        file.seek(self._offset)
        data = file.read(CHUNK)
        while data and b"\n" not in data and (further := file.read(CHUNK)):  # a line longer than a chunk
            data += further
        self.damage = ""
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return  # torn, or not written in full yet
            row = None
            with suppress(ValueError):
                row = parse_json(line, surrogates=True)
            if not isinstance(row, dict):
                self.damage = (
                    f"{self.path.name} has a line at byte {self._offset} that is no JSON object; what "
                    "follows it is not shown."
                )
                return
            self._offset += len(line)
            yield row


class RunRows:
    """All logs of a run but its trajectories. ``follow``: keep only the last minutes of the timeline."""

    def __init__(self, run: RunFolder, *, follow: bool = False) -> None:
        self.run, self.name, self.follow = run, run.path.resolve().name, follow
        self.logs: dict[str, list[Row]] = {name: [] for name in LOGS}
        self.arrived: list[
            tuple[str, Row]
        ] = []  # (log, row) of metrics and timeline, in the order of reading
        self.epoch = 0  # number of times a log was replaced, whose rows then left ``arrived``
        self.spans: list[Span] = []
        self.recipe: Row = {}
        self.recipe_text = ""
        self.plan: Row = {}
        self._tails = {name: Tail(run.path / f"{name}.jsonl") for name in LOGS}
        self._files: dict[str, str] = {}  # damage of whole files
        self._grain = 0.05

    def read(self) -> RunRows:
        """Read to the end of every log."""
        self.look()
        while any(tail.left for tail in self._tails.values()):
            self.look()
        return self

    def look(self) -> None:
        """Read new rows, at most ``CHUNK`` bytes of each log."""
        self.recipe_text = _read_text(self.run.recipe)
        self.recipe = self._whole(self.run.recipe, lambda text: parse_toml(text))
        self.plan = self._whole(self.run.path / "plan.json", lambda text: parse_json(text, surrogates=True))
        for name, tail in self._tails.items():
            replaced, rows = tail.read()
            if replaced:
                self.epoch += 1
                self.logs[name] = []
                self._files.pop(name, None)
                self.spans = [] if name == "timeline" else self.spans
                self.arrived = [(log, row) for log, row in self.arrived if log != name]
            self._take(name, rows)

    def _take(self, name: str, rows: Sequence[Row]) -> None:
        """Add new rows of the log ``name``; the timeline is thinned, and a faulty ledger ends before its
        fault."""
        if name == "timeline":
            for row in rows:
                try:
                    self.spans.append(Span.of(row))
                except (KeyError, ValueError, TypeError):
                    self._files[name] = "timeline.jsonl has rows that are no spans; they are not shown."
            # Keep the last minutes, or merge neighbours of a long timeline.
            if self.follow:
                newest = max((span.stop for span in self.spans), default=0.0)
                self.spans = [span for span in self.spans if span.stop > newest - HORIZON_S][-2 * SPANS :]
            while len(self.spans) > 2 * SPANS:
                self.spans, self._grain = coarsen(self.spans, self._grain), 2 * self._grain
            self.arrived += [(name, row) for row in rows] if self.follow else []
            return
        if name == "ledger":
            rows = [] if name in self._files else rows
            for index, row in enumerate(rows):
                if fault := find_fault(row, is_first=not self.logs[name] and index == 0):
                    self._files[name] = f"ledger.jsonl has a row that {fault}; what it cost is not counted."
                    rows = rows[:index]
                    break
        self.logs[name] += rows
        self.arrived += [(name, row) for row in rows] if name == "metrics" else []

    def _whole(self, path: Path, parse: Any) -> Row:
        """The object in a file; empty without a valid one, which ``damage`` reports."""
        self._files.pop(path.name, None)
        try:
            value = parse(_read_text(path)) if path.is_file() else {}
        except ValueError as error:
            self._files[path.name] = f"{path.name} cannot be read: {error}."
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def damage(self) -> list[str]:
        """One sentence for each file that could not be read to its end."""
        return [*self._files.values(), *(tail.damage for tail in self._tails.values() if tail.damage)]

    @property
    def reading(self) -> dict[str, int]:
        """Unread bytes by log, of logs that have any."""
        return {name: tail.left for name, tail in self._tails.items() if tail.left}

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of the recipe, e.g. "trainer.steps"."""
        value: Any = self.recipe
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def metrics(self) -> list[Row]:
        return by_step(self.logs["metrics"])

    @property
    def scores(self) -> dict[str, Any]:
        return main_scores(self.logs["eval"], self.recipe)

    @property
    def evals(self) -> list[Row]:
        """Rows of the main set, scored by the run's own sampler."""
        return self.scores["evals"]

    @property
    def downstream(self) -> dict[str, list[Row]]:
        """Rows of the downstream sets by name."""
        names = dict.fromkeys(str(row.get("set", MAIN_SET)) for row in self.logs["eval"])
        rows_of = {name: [row for row in self.logs["eval"] if row.get("set") == name] for name in names}
        return {name: by_step(rows) for name, rows in rows_of.items() if name not in (MAIN_SET, GREEDY_SET)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main_scores(rows: Sequence[Row], recipe: Row) -> dict[str, Any]:
    """Rows of eval.jsonl as {"evals": rows of the main set, one split and one kind of weights; "exported":
    the last row with the model's own weights if the sampler's differ, else None; "greedy": rows at
    temperature 0}."""
    greedy = by_step([row for row in rows if row.get("set") == GREEDY_SET])
    rows = [row for row in rows if row.get("set", MAIN_SET) == MAIN_SET]
    splits = [row.get("split") for row in rows]
    named = recipe.get("eval", {}).get("split")
    split = named if named in splits or not splits else splits[0]
    rows = [row for row in rows if row.get("split") == split]
    kinds = [row.get("weights", "model") for row in rows]
    named = recipe.get("engine", {}).get("weights")
    kind = named if named in kinds else next(iter(kinds), "model")
    sampler, exact = (
        [row for row, weights in zip(rows, kinds, strict=True) if weights == wanted]
        for wanted in (kind, "model")
    )
    exported = exact[-1] if exact and kind != "model" else None
    return {"evals": by_step(sampler), "exported": exported, "greedy": greedy}


def ends(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """(row of step 0, row of the last step after it); None for a missing row."""
    before = next((row for row in rows if row["step"] == 0), None)
    after = rows[-1] if rows and rows[-1]["step"] > 0 else None
    return before, after


def abilities_left(rows: Sequence[Row]) -> Estimate | None:
    """The share of earlier abilities left, as last measured by the forgetting watch, from rows of metrics."""
    row = next((row for row in reversed(rows) if number(row, "forgetting/kept") is not None), {})
    value, low, high = (number(row, f"forgetting/kept{end}") for end in ("", "_low", "_high"))
    interval = None if low is None or high is None else (low, high)
    return None if value is None else Estimate(value=value, interval=interval)


def by_step(rows: Sequence[Row]) -> list[Row]:
    """Rows in order of steps; if several have the same step, the last one."""
    numbered = {int(step): row for row in rows if (step := number(row, "step")) is not None}
    return [numbered[step] for step in sorted(numbered)]


def thin_rows(rows: Sequence[Row], most: int = 1000) -> list[Row]:
    """All ``rows`` if they are at most 2 x ``most``; else means of neighbours, under the last one's step."""
    size = len(rows) // most
    return (
        [_mean(rows[start : start + size]) for start in range(0, len(rows), size)] if size > 1 else list(rows)
    )


def _mean(rows: Sequence[Row]) -> Row:
    """Mean of every column over the rows that have it, under the last row's step."""
    sums, counts = Counter[str](), Counter[str]()
    for row in rows:
        known = {name: value for name in row if (value := number(row, name)) is not None}
        sums.update(known)
        counts.update(known.keys())
    return {"step": int(rows[-1]["step"])} | {
        name: value / counts[name] for name, value in sums.items() if name != "step"
    }


# ---- columns


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    return [number(row, name) for row in rows]


def total(rows: Sequence[Row], name: str) -> float:
    return sum(value for value in column(rows, name) if value is not None)


def mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean over the rows that have a value; None if none has."""
    values = [value for value in column(rows, name) if value is not None]
    return sum(values) / len(values) if values else None


def names_under(rows: Sequence[Row], prefix: str) -> list[str]:
    """The sorted rests of all keys that start with ``prefix``, in any row."""
    return sorted(key.removeprefix(prefix) for key in set[str]().union(*rows) if key.startswith(prefix))


def mapping(value: Any) -> Row:
    """``value``, or an empty dict if it is not a mapping."""
    return value if isinstance(value, Mapping) else {}
