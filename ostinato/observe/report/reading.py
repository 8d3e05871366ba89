"""A run folder as plain rows. Damaged data are left out and reported; missing data are empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json, parse_toml
from ostinato.observe.ledger import checked
from ostinato.observe.timeline import Span, coarse
from ostinato.run import GREEDY_SET, MAIN_SET, Jsonl, RunFolder

Row = Mapping[str, Any]

SPANS = 60_000  # of a timeline; above twice as many, neighbours are merged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData:
    """All of a run but its trajectories."""

    name: str
    recipe_text: str
    recipe: Mapping[str, Any]  # the tree of the recipe; empty when it could not be read
    metrics: Sequence[Row]  # one per finished step, in order
    evals: Sequence[Row]  # of the main set and the run's own sampler, one per step, in order
    exported: Row | None = None  # the last one with the model's own weights, if the sampler's differ
    greedy: Sequence[Row] = ()  # of the main set at temperature 0, one per step, in order
    downstream: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # of the other sets, each in order
    forecasts: Sequence[Row] = ()  # one per evaluation after which a forecast was made, in order
    ledger: Sequence[Row]  # in order, all events
    mismatch: Sequence[Row] = ()  # one per step in which sampler and trainer were compared in full, in order
    alarms: Sequence[Row] = ()  # of the stability watch, in order
    failed: Sequence[Row] = ()  # one per step or evaluation and reward function that failed there, in order
    spans: Sequence[Span] = ()  # what workers did and when; less detailed for a long run
    starts: Sequence[Row]  # the machine and the versions of each process that worked on the run
    plan: Row = field(default_factory=dict)  # plan.json, if the run was planned
    damage: Sequence[str]  # one sentence per file that could not be read to its end

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of the recipe, e.g. "trainer.steps"."""
        value: Any = self.recipe
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def longest_answer(self) -> str:
        """The length limit of an answer in the recipe, in words."""
        if after := self.setting("rollout.interrupt_after"):
            return (
                f"{after[1]} tokens of thinking and {self.setting('rollout.answer_tokens', '?')} behind them"
            )
        return f"{self.setting('rollout.max_tokens', '?')} tokens"


def read_run(run: RunFolder) -> RunData:
    """Read a run folder. Does not raise for a run that is in progress, was killed, or has damaged logs."""
    damage: list[str] = []
    text = run.recipe.read_text(encoding="utf-8", errors="replace") if run.recipe.is_file() else ""
    recipe = _whole(run.recipe, lambda: parse_toml(text), damage)
    evals, plan = _rows(run.eval, damage), run.path / "plan.json"
    others: dict[str, list[Row]] = {}
    for row in evals:
        others.setdefault(str(row.get("set", MAIN_SET)), []).append(row)
    return RunData(
        name=run.path.resolve().name,
        recipe_text=text,
        recipe=recipe,
        metrics=_by_step(_rows(run.metrics, damage)),
        **main_scores(evals, recipe),
        downstream={
            name: kept
            for name, rows in others.items()
            if name not in (MAIN_SET, GREEDY_SET) and (kept := _by_step(rows))
        },
        forecasts=_by_step(_rows(run.forecast, damage)),
        ledger=_rows(run.ledger, damage, checked),
        mismatch=_by_step(_rows(Jsonl(run.path / "mismatch.jsonl"), damage)),
        alarms=[row for row in _rows(run.watch, damage) if number(row, "step") is not None],
        failed=_rows(run.failed, damage),
        spans=thinned(_spans(run.timeline, damage)),
        starts=_rows(Jsonl(run.path / "starts.jsonl"), damage),
        plan=_whole(
            plan, lambda: parse_json(plan.read_bytes(), surrogates=True) if plan.is_file() else {}, damage
        ),
        damage=damage,
    )


def _whole(path: Path, parse: Callable[[], Any], damage: list[str]) -> Row:
    """The object in a file; empty where there is none."""
    try:
        found = parse()
    except (OSError, ValueError) as error:
        damage.append(f"{path.name} cannot be read: {error}.")
        return {}
    return found if isinstance(found, dict) else {}


def main_scores(rows: Sequence[Row], recipe: Row) -> dict[str, Any]:
    """``evals``, ``exported`` and ``greedy`` of a ``RunData``, from rows of eval.jsonl: one set, split and
    kind of weights."""
    greedy = _by_step([row for row in rows if row.get("set") == GREEDY_SET])
    rows = [row for row in rows if row.get("set", MAIN_SET) == MAIN_SET]
    splits = [row.get("split") for row in rows]
    named = recipe.get("eval", {}).get("split")
    split = named if named in splits or not splits else splits[0]
    rows = [row for row in rows if row.get("split") == split]
    kinds = [row.get("weights", "model") for row in rows]
    named = recipe.get("engine", {}).get("weights")
    kind = named if named in kinds else next(iter(kinds), "model")
    sampler, exact = (
        [row for row, has in zip(rows, kinds, strict=True) if has == one] for one in (kind, "model")
    )
    exported = exact[-1] if exact and kind != "model" else None
    return {"evals": _by_step(sampler), "exported": exported, "greedy": greedy}


def _rows(
    log: Jsonl, damage: list[str], read: Callable[[Jsonl], Iterator[Row]] = lambda log: log.rows()
) -> list[Row]:
    """The rows up to the first broken line; a torn last line is the ordinary end of a killed run."""
    rows: list[Row] = []
    try:
        rows.extend(row for row in read(log) if isinstance(row, dict))
    except ValueError as error:
        damage.append(f"{error}; this report ends there.")
    return rows


def _spans(log: Jsonl, damage: list[str]) -> Iterator[Span]:
    """The spans up to the first row that is not one."""
    try:
        for row in log.rows():
            yield Span.of(row)
    except (ValueError, KeyError, TypeError) as error:
        damage.append(f"{log.path.name} has a row that is no span ({error!r}); the timeline ends there.")


def thinned(spans: Iterable[Span], most: int = SPANS) -> list[Span]:
    """All spans if they are at most 2 x ``most``; else at most that many with the same total seconds
    (``timeline.coarse``)."""
    found, grain = list[Span](), 0.05
    for span in spans:
        found.append(span)
        while len(found) > 2 * most:
            found, grain = coarse(found, grain), 2 * grain
    return found


def _by_step(rows: Sequence[Row]) -> list[Row]:
    """Rows in order of steps; if several have the same step, the last one."""
    numbered = {int(step): row for row in rows if (step := number(row, "step")) is not None}
    return [numbered[step] for step in sorted(numbered)]


def number(row: Row, name: str) -> float | None:
    """A finite value of a row; None if it is missing, null, not finite or not a number."""
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def mapping(value: Any) -> Row:
    """``value``, or an empty dict if it is not a mapping."""
    return value if isinstance(value, Mapping) else {}


def numbers(row: Row) -> dict[str, float]:
    """The finite values of a row, by name."""
    return {name: value for name in row if (value := number(row, name)) is not None}


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    return [number(row, name) for row in rows]


def total(rows: Sequence[Row], name: str) -> float:
    return sum(value for value in column(rows, name) if value is not None)


def mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean over the rows that have a value; None if none has."""
    values = [value for value in column(rows, name) if value is not None]
    return sum(values) / len(values) if values else None


def names_under(rows: Sequence[Row], prefix: str) -> list[str]:
    """What follows ``prefix`` in the keys of any row, sorted."""
    return sorted({key.removeprefix(prefix) for row in rows for key in row if key.startswith(prefix)})


def first_step(rows: Sequence[Row]) -> int:
    return int(rows[0]["step"])


def last_step(rows: Sequence[Row]) -> int:
    """The step of the last row; 0 without rows."""
    return int(rows[-1]["step"]) if rows else 0
