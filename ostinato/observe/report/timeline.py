"""The section "Pipeline": what every worker did and when, idle time, the staleness of trained tokens, the
cost of publishing, lost workers. Absent if a run has no such data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ostinato.observe.report.charts import Chart, Section, figure, lines
from ostinato.observe.report.facts import Fact, Line, Table, seconds_text
from ostinato.observe.report.gantt import Step, recorded, steps_of
from ostinato.observe.report.reading import Row, RunData, column, names_under, number
from ostinato.observe.timeline import Kind, Usage, together

ANCHOR = "pipeline"
POOLS = {
    name: (name, color)
    for name, color in (("samplers", "--blue"), ("trainer", "--teal"), ("graders", "--orange"))
}
LOSSES = {
    "workers/restarts": ("replaced workers", "--red"),
    "workers/redispatched": ("answers begun again", "--orange"),
    "workers/quarantined": ("prompts set aside", "--purple"),
}
LINES = 16  # of workers in the table; more are joined by pool
LOCAL = "local"  # the pool of a run in one process

PerStep = Sequence[tuple[Step, Usage]]


def pipeline_sections(data: RunData) -> list[Section]:
    """The section, or nothing."""
    steps = steps_of(data.ledger)
    per_step = recorded(data.spans, steps)
    drawn = pipeline_charts(data, per_step)
    facts = _facts(data.metrics)
    if not (drawn or data.spans or facts):
        return []
    whole = together([use for _, use in per_step]) if per_step else None
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


def pipeline_charts(data: RunData, per_step: PerStep = ()) -> list[Chart]:
    """The charts that have data."""
    charts = [_idle(data, per_step), *_staleness(data.metrics), *_rest(data.metrics)]
    return [one for one in charts if not one.empty]


def lead(data: RunData, whole: Usage) -> str:
    """A summary of idle time, in words."""
    parts = {name: whole.idle(name) for name in POOLS}
    shares = [f"{name} {share:.1%}" for name, share in parts.items() if share is not None]
    idle = f"Idle from the first step to the last: {', '.join(shares)} of their time." if shares else ""
    if {name for row in data.ledger for name in row.get("pools", {})} != {LOCAL}:
        return idle
    return f"{idle} They share this machine's cores, so one's idle time is mostly the other's work."


def workers_table(whole: Usage) -> Table:
    """Seconds by kind of work: a line for each worker, or for each pool if there are many."""
    kinds = [kind for kind in Kind if any(kinds.get(kind) for kinds in whole.seconds.values())]
    groups = {name: [name] for name in whole.seconds}
    if len(groups) > LINES:
        pools: dict[str, list[str]] = {}
        for name in whole.seconds:
            pools.setdefault(name.rstrip("0123456789-"), []).append(name)
        groups = {f"{name} x {len(own)}": own for name, own in pools.items()}
    note = f"Of {seconds_text(whole.stop - whole.start)}; to wait or to load is to be idle."
    rows = [_line(whole, name, own, kinds) for name, own in groups.items()]
    return Table(title="Workers", head=("worked", *map(str, kinds), "idle"), rows=rows, note=note)


def _line(whole: Usage, name: str, workers: Sequence[str], kinds: Sequence[Kind]) -> Line:
    """A line with the means over these workers."""
    sums: Counter[Kind] = Counter()
    for worker in workers:
        sums.update(whole.seconds[worker])
    length, many = whole.stop - whole.start, len(workers)
    used = sum(map(whole.utilisation, workers)) / many
    work = [seconds_text(sums[kind] / many) if sums[kind] else "" for kind in kinds]
    return name, f"{used:.1%}", *work, seconds_text((1 - used) * length)


# ---- over the steps


def _idle(data: RunData, per_step: PerStep) -> Chart:
    """Idle time by pool, from the timeline; without one, as the training loop measured it."""
    if not per_step:
        note = "Share of all workers' time in which they did no work."
        parts = {"pipeline/bubble_share": ("all", "--grey")}
        return figure(data.metrics, "Idle time", note, "%", parts, low=0.0)
    note = "Share of each pool's time in which it did no work."
    if len(per_step) < len(data.metrics):
        note += " Of a long run, the timeline keeps some steps."
    return figure([_shares(step, use) for step, use in per_step], "Idle time", note, "%", POOLS, low=0.0)


def _shares(step: Step, use: Usage) -> dict[str, float]:
    found = {name: use.idle(name) for name in POOLS}
    return {"step": step.step, **{name: share for name, share in found.items() if share is not None}}


def _staleness(rows: Sequence[Row]) -> Iterator[Chart]:
    """Charts of staleness, only if something was stale."""
    ages = sorted((name for name in names_under(rows, "staleness/hist/") if name.isdecimal()), key=int)
    if not any(column(rows, "staleness/max")) and len(ages) < 2:
        return
    spread = {"staleness/mean": "mean", "staleness/max": ("max", "--red")}
    note = "Steps between the policy that sampled a token and the one that learned from it."
    yield figure(rows, "Staleness", note, "steps", spread, low=0.0)
    if not ages:
        return
    parts = lines(rows, {f"staleness/hist/{age}": age for age in ages}, missing=0.0)
    yield figure(rows, "Age of tokens", "Trained tokens by age.", "tokens", parts, stacked=True)


def _rest(rows: Sequence[Row]) -> Iterator[Chart]:
    waits = {"pipeline/wait_s": ("waited", "--orange")}
    yield figure(rows, "Trainer waited", "For the groups of its batch.", "s", waits, low=0.0)
    queue = {"queue/running": "in play", "queue/ready": "ready"}
    yield figure(rows, "Queue", "Groups at the end of the step.", "groups", queue, low=0.0)
    note = "New weights on their way to the samplers, of each step."
    yield figure(rows, "Published", note, "B", {"publish/bytes": "bytes"}, low=0.0)
    note = "Until every sampler serves them."
    yield figure(rows, "Time to publish", note, "s", {"publish/seconds": "seconds"}, low=0.0)
    if any("workers/alive" in row for row in rows):
        lost = [one for one in lines(rows, LOSSES) if any(one.values)]
        alive = lines(rows, {"workers/alive": ("alive", "--teal")})
        note = "Workers, and what was lost with some." if lost else "None was lost."
        yield figure(rows, "Workers", note, "", [*alive, *lost], low=0.0)


def _facts(rows: Sequence[Row]) -> list[Fact]:
    """What became of all admitted groups."""
    last = rows[-1] if rows else {}
    if (admitted := number(last, "groups/admitted_total")) is None:
        return []
    rules = names_under(rows[-1:], "groups/dropped_total/")
    dropped = {name: number(last, f"groups/dropped_total/{name}") or 0.0 for name in rules}
    why = ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in dropped.items() if count)
    return [
        Fact("Groups admitted", f"{admitted:,.0f}"),
        Fact("trained on", f"{number(last, 'groups/trained_total') or 0.0:,.0f}"),
        Fact("dropped", f"{sum(dropped.values()):,.0f}", why),
        Fact("in play", f"{number(last, 'groups/outstanding') or 0.0:,.0f}"),
    ]
