"""What runs have cost, as far as their ledgers say: time, tokens, FLOPs and money, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ostinato.axis import Axis
from ostinato.observe.ledger import Event, Summary, spells
from ostinato.observe.report.charts import Lines, Section, Series, figure, lines
from ostinato.observe.report.facts import Table, seconds_text, si
from ostinato.observe.report.reading import Row
from ostinato.run import RunFolder

Books = Mapping[str, Summary]  # by the name of the run
Form = Callable[[float], str]

PARTS = {
    "sample": ("--blue", "sampling"),
    "grade": ("--orange", "where training waited for it"),
    "train": ("--teal", "forward and backward"),
    "measure": ("--purple", "sampler against trainer"),
    "eval": ("--gold", "held-out sets; in no compute"),
    "idle": ("--grey", "held and not busy: loading, saving, between steps"),
    "lost": ("--red", "given up, or until the last sign of life of a process that was killed"),
}
WALL = {
    "steps": "",
    "evaluation": "",
    "saving": "checkpoints",
    "loading": "until a process is ready, each time",
    "between": "what has no row",
    "lost": "given up, or until the last sign of life of a process that was killed",
}
AXES: Mapping[Axis, tuple[str, Form | None]] = {
    Axis.DEVICE_HOURS: ("devices x wall clock, idle ones too", "{:.4g}".format),
    Axis.HOURS: ("wall clock", "{:.4g}".format),
    Axis.FLOPS: ("FLOP", si),
    Axis.TOKENS: ("sampled", si),
    Axis.STEPS: ("that count", "{:.0f}".format),
    Axis.MONEY: ("price x device-hours", None),
}


def torn(run: RunFolder) -> bool:
    """Does ledger.jsonl end in the middle of a line, as a kill leaves it?"""
    path = run.ledger.path
    return path.exists() and bool(content := path.read_bytes()) and not content.endswith(b"\n")


def tables(books: Books) -> list[Table]:
    """One column of sums, and one of shares, for each run; without lines that no run has a value for."""
    found: dict[str, dict[str, dict[str, tuple[str, str]]]] = {}  # by title, line and run: value, share
    for run, one in books.items():
        for title, name, value, whole, form in _entries(one):
            cells = found.setdefault(title, {}).setdefault(name, {})
            if value is not None:
                cells[run] = form(value), f"{value / whole:.1%}" if whole else ""
    made = [_table(title, books, lines) for title, lines in found.items()]
    return [table for table in made if table.rows]


def _table(title: str, books: Books, lines: Mapping[str, Mapping[str, tuple[str, str]]]) -> Table:
    """Sums come last, and shares are left out where there are none."""
    rows = [
        (name, *(text for run in books for text in cells.get(run, ("", ""))))
        for name, cells in sorted(lines.items(), key=lambda line: line[0].partition("\n")[0] == "all")
        if cells
    ]
    note = NOTES.get(title, "")
    if any(share for row in rows for share in row[2::2]):
        head = [name for run in books for name in (run, "share")]
        return Table(title=title, head=head, rows=rows, note=note)
    return Table(title=title, head=list(books), rows=[(row[0], *row[1::2]) for row in rows], note=note)


NOTES = {
    "Compute": "Of training: with idle devices, restarts and repeated work, without evaluation.",
    "FLOPs of training": "From the model's shapes, products alone; those of lost work are not known.",
}
Entry = tuple[str, str, float | None, float | None, Form]  # title of the table, line, value, what it is of


def _entries(one: Summary) -> Iterator[Entry]:
    yield from _compute(one)
    wall, devices = sum(one.wall.values()), sum(pool.total for pool in one.pools.values())
    for name, seconds in {**one.wall, "all": wall}.items():
        yield "Wall clock", f"{name}\n{WALL.get(name, '')}", seconds, wall, seconds_text
    for pool, held in one.pools.items():
        parts = {**dict.fromkeys(PARTS), **held.busy, "idle": held.idle, "lost": held.lost, "all": held.total}
        for part, seconds in parts.items():
            yield f"Device time, pool {pool}", _part(part), seconds, held.total, seconds_text
    sampled = one.tokens.get("sampled")
    yield "Tokens", "sampled", sampled, sampled, si
    yield "Tokens", "trained\nof them", one.tokens.get("trained"), sampled, si
    yield from _reasons("Tokens", "not trained", one.dropped, sampled)
    for name in ("prefilled", "injected", "drafted", "accepted", "recomputed"):
        yield "Tokens", name, one.tokens.get(name), None, si
    yield "Tokens", "context rows of training", one.tokens.get("trained_context"), None, si
    flops = sum(one.flops.values()) if one.flops else None
    for part, count in one.flops.items():
        yield "FLOPs of training", _part(part), count, flops, si
    yield "FLOPs of training", "useful\nled to an update", one.useful, flops, si
    yield from _reasons("FLOPs of training", "wasted", one.wasted, flops)
    yield "FLOPs of training", "all\nFLOP", flops, flops, si
    evaluation, title = one.evaluation, "Evaluation, in no compute"
    yield title, "evaluations", evaluation.times, None, "{:.0f}".format
    yield title, "device time\nshare of all", evaluation.device_seconds, devices, seconds_text
    yield title, "sampled tokens", evaluation.tokens, None, si
    yield title, "FLOPs", evaluation.flops, None, si


def _compute(one: Summary) -> Iterator[Entry]:
    def money(value: float) -> str:
        return f"{value:,.4g} {one.currency}"

    for axis, (note, form) in AXES.items():
        yield "Compute", f"{axis}\n{note}", one.compute.get(axis), None, form or money
    seconds, flops = 3600 * one.compute.get("hours", 0.0), one.compute.get("flops")
    speed = flops / seconds if seconds and flops is not None else None
    yield "Compute", "speed\nFLOP/s over all of these hours", speed, None, si
    yield "Compute", "bill\nof all device hours, evaluation too", one.money, None, money
    yield "Compute", "restarts", one.restarts, None, "{:.0f}".format
    yield "Compute", "repeated steps", one.repeated, None, "{:.0f}".format


def _part(name: str) -> str:
    """The name of a part of the work, and what it is."""
    return f"{name}\n{PARTS.get(name, ('', ''))[1]}"


def _reasons(title: str, what: str, counts: Mapping[str, int], whole: float | None) -> Iterator[Entry]:
    """What was in vain, the most frequent reason first."""
    for name, count in Counter(counts).most_common():
        yield title, f"{what}: {name.replace('_', ' ')}", count, whole, si


# ---- over the steps


def section(rows: Sequence[Row], name: str = "") -> Section | None:
    """The ledger over the steps; None for one without any."""
    steps = by_step(rows)
    if not steps:
        return None
    parts: Lines = {f"seconds/{part}": (part, color) for part, (color, _) in PARTS.items()}
    slug = "".join(char if char.isalnum() else "-" for char in f" {name}".rstrip())  # a page may have several
    charts = [
        figure(
            steps,
            title,
            note,
            unit,
            series,
            stacked=True,
            key=f"{title.lower().replace(' ', '-')}{slug}",
        )
        for title, note, unit, series in (
            ("Device time by part", "Of each step, and what followed it.", "s", lines(steps, parts)),
            ("FLOPs of each step", "Wasted: by reason.", "FLOP", _stack(steps, "flops")),
            ("Tokens of each step", "Trained on, or dropped and why.", "tokens", _stack(steps, "tokens")),
        )
    ]
    return Section(title=f"Ledger of {name}" if name else "Ledger", charts=charts)


def _stack(rows: Sequence[Row], key: str) -> list[Series]:
    """The good part first, then the reasons."""
    sums = Counter[str]()
    for row in rows:
        sums.update({name: value for name, value in row.items() if name.startswith(f"{key}/")})
    good = f"{key}/{'useful' if key == 'flops' else 'trained'}"
    names = [good, *(name for name, _ in sums.most_common() if name != good)]
    return lines(rows, {name: name.removeprefix(f"{key}/").replace("_", " ") for name in names}, missing=0.0)


def by_step(rows: Iterable[Row]) -> list[Row]:
    """Device seconds by part, FLOPs and tokens by what became of them, for each step that counts: its own
    row, and the time since the one before; the last has what followed it. Time of steps that are done again
    is lost. Together they are all device seconds, if any step counts."""
    found: dict[int, Counter[str]] = {}
    kept: dict[int, Row] = {}
    open_time = Counter[str]()  # of the step to come
    for spell in spells(rows):
        step, busy = spell.row.get("step", 0), Counter[str]()
        for name, devices in spell.devices.items():
            parts = spell.row.get("pools", {}).get(name, {}).get("busy", {})
            busy.update({f"seconds/{part}": devices * seconds for part, seconds in parts.items()})
        rest = "seconds/lost" if spell.event is Event.LOST else "seconds/idle"
        busy.update({rest: spell.device_seconds() - busy.total()})
        if spell.event is Event.START:
            for later in [one for one in found if one > step]:
                kept.pop(later)
                open_time.update({"seconds/lost": found.pop(later).total()})
        if spell.event is Event.STEP:
            found[step], open_time, kept[step] = open_time + busy, Counter(), spell.row
        elif spell.event in (Event.EVAL, Event.SAVE, Event.END) and step in found and not open_time:
            found[step].update(busy)
        else:
            open_time.update(busy)
    if kept:
        found[max(kept)].update(open_time)
    return [{"step": step, **found[step], **_of_row(row)} for step, row in sorted(kept.items())]


def _of_row(row: Row) -> dict[str, float]:
    tokens = {"trained": row["tokens"].get("trained", 0), **row["tokens"].get("dropped", {})}
    flops = {"useful": row["useful"], **row["wasted"]} if "flops" in row else {}
    named = [("tokens", tokens), ("flops", flops)]
    return {f"{key}/{name}": value for key, values in named for name, value in values.items()}
