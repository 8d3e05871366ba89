"""The section "Pipeline": what every worker did and when, how long they stood idle, how old the tokens were
that were learned from, what publishing took, which workers were lost. Absent where a run has none of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ostinato.observe.report.charts import Chart, Section, Series, figure, line, ready
from ostinato.observe.report.facts import Cell, Column, Fact, Line, Table, seconds_text
from ostinato.observe.report.gantt import Step, recorded, steps_of
from ostinato.observe.report.reading import Row, RunData, column, names_under, number, total
from ostinato.observe.timeline import Kind, Usage, together

ANCHOR = "pipeline"
POOLS = {"samplers": "--blue", "trainer": "--teal", "graders": "--orange"}
AGES = ("--teal", "--blue", "--purple", "--orange", "--red", "--gold", "--pink", "--grey")
LOSSES = {
    "restarts": ("replaced workers", "--red"),
    "redispatched": ("answers begun again", "--orange"),
    "quarantined": ("prompts set aside", "--purple"),
    "migrated": ("answers moved", "--teal"),
}
LINES = 16  # of workers in the table; more are told by pool
LOCAL = "local"  # the pool of a run in one process

Told = Sequence[tuple[Step, Usage]]


def pipeline_sections(data: RunData) -> list[Section]:
    """The section, or nothing."""
    steps = steps_of(data.ledger)
    told = recorded(data.spans, steps)
    charts = [*_idle(data, told), *_staleness(data.metrics), *_rest(data.metrics)]
    drawn = [one for one in map(ready, charts) if not one.empty]
    facts = _facts(data.metrics)
    if not (drawn or data.spans or facts):
        return []
    whole = together([use for _, use in told]) if told else None
    return [
        Section(
            title="Pipeline",
            anchor=ANCHOR,
            charts=drawn,
            lead=lead(data, whole) if whole else "",
            facts=facts,
            tables=[workers_table(whole)] if whole else [],
        )
    ]


def lead(data: RunData, whole: Usage) -> str:
    """What it means, for people."""
    parts = {name: whole.idle(name) for name in POOLS}
    said = [f"{name} {share:.1%}" for name, share in parts.items() if share is not None]
    idle = f"Idle from the first step to the last: {', '.join(said)} of their time." if said else ""
    if not shares_cores(data):
        return idle
    return f"{idle} They share this machine's cores, so one's idle time is mostly the other's work."


def shares_cores(data: RunData) -> bool:
    """Is it a run in one process?"""
    pools = {name for row in data.ledger for name in row.get("pools", {})}
    return pools == {LOCAL}


def workers_table(whole: Usage) -> Table:
    """Seconds by kind of work: a line for each worker, or for each pool where there are many."""
    kinds = [kind for kind in Kind if any(kinds.get(kind) for kinds in whole.seconds.values())]
    everybody = list(whole.seconds)
    lines = [_line(whole, name, [name], kinds) for name in everybody]
    if len(lines) > LINES:
        pools: dict[str, list[str]] = {}
        for name in everybody:
            pools.setdefault(name.rstrip("0123456789-"), []).append(name)
        lines = [_line(whole, f"{name} x {len(own)}", own, kinds) for name, own in pools.items()]
    columns = [Column(name="worked"), *(Column(name=str(kind)) for kind in kinds), Column(name="idle")]
    note = f"Of {seconds_text(whole.stop - whole.start)}; to wait or to load is to be idle."
    return Table(title="Workers", columns=tuple(columns), lines=tuple(lines), note=note)


def _line(whole: Usage, name: str, workers: Sequence[str], kinds: Sequence[Kind]) -> Line:
    """The mean of these workers."""
    sums: Counter[Kind] = Counter()
    for worker in workers:
        sums.update(whole.seconds[worker])
    length, many = whole.stop - whole.start, len(workers)
    used = sum(map(whole.utilisation, workers)) / many
    cells = [Cell(value=f"{used:.1%}")]
    cells += [Cell(value=seconds_text(sums[kind] / many) if sums[kind] else "") for kind in kinds]
    cells.append(Cell(value=seconds_text((1 - used) * length)))
    return Line(name=name, note="", cells=tuple(cells))


# ---- over the steps


def _idle(data: RunData, told: Told) -> Iterator[Chart]:
    """By pool from the timeline; without one, what the loop itself measured."""
    rows = [_shares(step, use) for step, use in told]
    note = "Share of each pool's time in which it did no work."
    if len(told) < len(data.metrics):
        note += " Of a long run, the timeline keeps some steps."
    parts = [line(rows, name, name, color) for name, color in POOLS.items()]
    if not rows:
        rows = data.metrics
        note = "Share of all workers' time in which they did no work."
        parts = [line(rows, "pipeline/bubble_share", "all", "--grey")]
    yield figure(rows, "Idle time", note, "%", parts, low=0.0)


def _shares(step: Step, use: Usage) -> dict[str, float]:
    found = {name: use.idle(name) for name in POOLS}
    return {"step": step.step, **{name: share for name, share in found.items() if share is not None}}


def _staleness(rows: Sequence[Row]) -> Iterator[Chart]:
    """Only where something was stale: age 0 is no news."""
    ages = sorted((name for name in names_under(rows, "staleness/hist/") if name.isdecimal()), key=int)
    if not any(column(rows, "staleness/max")) and len(ages) < 2:
        return
    spread = [line(rows, "staleness/mean", "mean", "--blue"), line(rows, "staleness/max", "max", "--red")]
    note = "Steps between the policy that sampled a token and the one that learned from it."
    yield figure(rows, "Staleness", note, "steps", spread, low=0.0)
    if not ages:
        return
    parts = [
        _share_of_age(rows, age, ages, color)
        for age, color in zip(ages, (*AGES, *["--grey"] * len(ages)), strict=False)
    ]
    yield figure(rows, "Age of tokens", "Trained tokens by age.", "%", parts, stacked=True)
    counts: list[float | None] = [total(rows, f"staleness/hist/{age}") for age in ages]
    yield Chart(
        key="age-histogram",
        title="Ages over the whole run",
        note="Trained tokens by how many steps old their policy was.",
        unit="tokens",
        steps=[int(age) for age in ages],
        labels=ages,
        along="age #",
        series=[Series(label="tokens", values=counts, color="--blue")],
        stacked=True,
    )


def _share_of_age(rows: Sequence[Row], age: str, ages: Sequence[str], color: str) -> Series:
    wholes = [sum(number(row, f"staleness/hist/{one}") or 0.0 for one in ages) for row in rows]
    own = column(rows, f"staleness/hist/{age}")
    values = [(n or 0.0) / whole if whole else None for n, whole in zip(own, wholes, strict=True)]
    return Series(label=age, values=values, color=color)


def _rest(rows: Sequence[Row]) -> Iterator[Chart]:
    waits = [line(rows, "pipeline/wait_s", "waited", "--orange")]
    yield figure(rows, "Trainer waited", "For the groups of its batch.", "s", waits, low=0.0)
    queue = [line(rows, "queue/running", "in play", "--blue"), line(rows, "queue/ready", "ready", "--teal")]
    yield figure(rows, "Queue", "Groups at the end of the step.", "groups", queue, low=0.0)
    sizes = [line(rows, "publish/bytes", "bytes", "--blue")]
    note = "New weights on their way to the samplers, of each step."
    yield figure(rows, "Published", note, "B", sizes, low=0.0)
    times = [line(rows, "publish/seconds", "seconds", "--blue")]
    yield figure(rows, "Time to publish", "Until every sampler serves them.", "s", times, low=0.0)
    alive = [line(rows, "workers/alive", "alive", "--teal")]
    if any(value is not None for value in alive[0].values):
        lost = [line(rows, f"workers/{name}", label, color) for name, (label, color) in LOSSES.items()]
        lost = [one for one in lost if any(one.values)]
        note = "Workers, and what was lost with some." if lost else "None was lost."
        yield figure(rows, "Workers", note, "", [*alive, *lost], low=0.0)


def _facts(rows: Sequence[Row]) -> list[Fact]:
    """Where every group is that was admitted."""
    last = rows[-1] if rows else {}
    if (admitted := number(last, "groups/admitted_total")) is None:
        return []
    rules = names_under(rows[-1:], "groups/dropped_total/")
    dropped = {name: number(last, f"groups/dropped_total/{name}") or 0.0 for name in rules}
    why = ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in dropped.items() if count)
    return [
        Fact(name="Groups admitted", value=f"{admitted:,.0f}"),
        Fact(name="trained on", value=f"{number(last, 'groups/trained_total') or 0.0:,.0f}"),
        Fact(name="dropped", value=f"{sum(dropped.values()):,.0f}", note=why),
        Fact(name="in play", value=f"{number(last, 'groups/outstanding') or 0.0:,.0f}"),
    ]


__all__ = ["pipeline_sections"]
