"""What a run has cost, as far as its ledger says: seconds, tokens and FLOPs, added up by pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.report.charts import Section, Series, figure, line, ready
from ostinato.report.facts import Cell, Column, Line, Table, seconds_text, si
from ostinato.report.reading import Row, RunData, number, numbers, total
from ostinato.run import RunFolder

OUTCOMES = ("useful", "wasted")  # of FLOPs; the other names are pools
POOLS = {
    "rollout": ("--blue", "sampling"),
    "reward": ("--orange", "where training waited for it"),
    "train": ("--teal", "forward and backward"),
    "measure": ("--purple", "sampler against trainer"),
    "other": ("--grey", "the rest of the steps"),
}


def torn(run: RunFolder) -> bool:
    """Does ledger.jsonl end in the middle of a line, as a kill leaves it?"""
    path = run.ledger.path
    return path.exists() and bool(content := path.read_bytes()) and not content.endswith(b"\n")


def summary(data: RunData) -> dict[str, Any]:
    """The sums: ``seconds`` with "steps" (all of them) and "between" (evaluation, saving, restarts), tokens,
    FLOPs. What no row has is not there."""
    seconds = _sums(data.ledger, "seconds")
    seconds["steps"] = total(data.ledger, "wall_s")
    if (between := _between(data.ledger)) is not None:
        seconds["between"] = between
    if any("seconds" in row for row in data.evals):
        seconds["evaluation"] = total(data.evals, "seconds")
    return {
        "steps": len(data.ledger),
        "seconds": seconds,
        "tokens": _sums(data.ledger, "tokens"),
        "flops": _sums(data.ledger, "flops"),
    }


def _sums(rows: Sequence[Row], key: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in _numbers(row, key).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _numbers(row: Row, key: str) -> dict[str, float]:
    """The finite values below ``key``; none where a row of an older ledger lacks it."""
    found = row.get(key)
    return numbers(found) if isinstance(found, Mapping) else {}


def _between(rows: Sequence[Row]) -> float | None:
    """Seconds from the begin of the first step to the end of the last that belong to no step."""
    ends = [(number(row, "ended_at"), number(row, "wall_s")) for row in rows]
    known = [(ended, wall) for ended, wall in ends if ended is not None and wall is not None]
    if not known or len(known) < len(ends):
        return None
    span = max(ended for ended, _ in known) - min(ended - wall for ended, wall in known)
    return max(0.0, span - sum(wall for _, wall in known))


def tables(data: RunData) -> list[Table]:
    """Seconds, tokens and FLOPs, each with its share and by step; none for a ledger without a row."""
    sums = summary(data)
    if not data.ledger:
        return []
    return [table for table in (_seconds(sums), _tokens(sums), _flops(sums)) if table.lines]


def _seconds(sums: Mapping[str, Any]) -> Table:
    seconds, steps = sums["seconds"], sums["steps"]
    whole = seconds["steps"]
    lines = [
        _line(name, what, seconds_text(seconds[name]), seconds[name], whole, steps, seconds_text)
        for name, (_, what) in POOLS.items()
        if name in seconds
    ]
    lines.append(_line("all steps", "", seconds_text(whole), whole, whole, steps, seconds_text))
    apart = {"between": "evaluation, saving, restarts", "evaluation": "main split, before and between steps"}
    names = {"between": "between steps", "evaluation": "held-out evaluation"}
    lines += [
        Line(
            name=names[name],
            note=what,
            cells=(Cell(value=seconds_text(seconds[name])), Cell(value=""), Cell(value="")),
        )
        for name, what in apart.items()
        if name in seconds
    ]
    return _table("Seconds", "of all steps", lines)


def _tokens(sums: Mapping[str, Any]) -> Table:
    tokens, steps = sums["tokens"], sums["steps"]
    sampled = tokens.get("sampled", 0.0)
    wanted = ["sampled", "trained", "wasted"]
    wanted += sorted(name for name in tokens if name.startswith("wasted/"))
    wanted += [name for name in ("prefilled", "drafted", "accepted") if name in tokens]
    lines = [
        _line(name.replace("_", " "), "tokens", si(tokens[name]), tokens[name], sampled, steps, si)
        for name in wanted
        if name in tokens
    ]
    return _table("Tokens", "of sampled", lines)


def _flops(sums: Mapping[str, Any]) -> Table:
    flops, steps = sums["flops"], sums["steps"]
    whole = sum(flops.get(name, 0.0) for name in OUTCOMES)
    pools = [name for name in flops if name not in OUTCOMES]
    lines = [
        _line(name, "FLOP, estimated", si(flops[name]), flops[name], whole, steps, si)
        for name in (*pools, *OUTCOMES)
        if name in flops
    ]
    return _table("FLOPs", "of useful and wasted", lines)


def _line(name: str, note: str, text: str, value: float, whole: float, steps: int, form: Any) -> Line:
    share = f"{value / whole:.1%}" if whole else ""
    return Line(
        name=name, note=note, cells=(Cell(value=text), Cell(value=share), Cell(value=form(value / steps)))
    )


def _table(title: str, of: str, lines: Sequence[Line]) -> Table:
    columns = (Column(name="sum"), Column(name="share", note=of), Column(name="per step"))
    return Table(title=title, columns=columns, lines=tuple(lines))


def section(data: RunData) -> Section | None:
    """The ledger over the steps; None for a run without one."""
    if not data.ledger:
        return None
    rows = [
        {"step": row["step"]}
        | {
            f"{key}/{name}": value
            for key in ("seconds", "tokens", "flops")
            for name, value in _numbers(row, key).items()
        }
        for row in data.ledger
    ]
    times = [line(rows, f"seconds/{name}", name, color) for name, (color, _) in POOLS.items()]
    flops = _stack(rows, "flops", ("useful", "--blue"), ("wasted", "--red"))
    tokens = _stack(rows, "tokens", ("trained", "--blue"), ("wasted", "--red"))
    charts = [
        figure(rows, "Seconds by pool", "Of each step.", "s", times, stacked=True),
        figure(rows, "FLOPs of each step", "Estimated from token counts.", "FLOP", flops, stacked=True),
        figure(rows, "Tokens of each step", "Trained on, or wasted.", "tokens", tokens, stacked=True),
    ]
    return Section(title="Ledger", charts=[ready(chart) for chart in charts])


def _stack(rows: Sequence[Row], key: str, *parts: tuple[str, str]) -> list[Series]:
    return [line(rows, f"{key}/{name}", name, color) for name, color in parts]
