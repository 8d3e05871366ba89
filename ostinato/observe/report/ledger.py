"""What runs have cost, as far as their ledgers say: time, tokens, FLOPs and money, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.axis import Axis
from ostinato.observe.ledger import Event, Summary, spells
from ostinato.observe.report.charts import Section, figure, line, ready
from ostinato.observe.report.facts import Cell, Column, Line, Table, seconds_text, si
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
AXES: Mapping[Axis, tuple[str, Form]] = {
    Axis.DEVICE_HOURS: ("devices x wall clock, idle ones too", "{:.4g}".format),
    Axis.HOURS: ("wall clock", "{:.4g}".format),
    Axis.FLOPS: ("FLOP", si),
    Axis.TOKENS: ("sampled", si),
    Axis.STEPS: ("that count", "{:.0f}".format),
    Axis.MONEY: ("price x device-hours", "{:,.4g}".format),
}


def torn(run: RunFolder) -> bool:
    """Does ledger.jsonl end in the middle of a line, as a kill leaves it?"""
    path = run.ledger.path
    return path.exists() and bool(content := path.read_bytes()) and not content.endswith(b"\n")


def tables(books: Books) -> list[Table]:
    """One column of sums, and one of shares, for each run."""
    pools = dict.fromkeys(name for one in books.values() for name in one.pools)
    made = [
        _compute(books),
        _time(books),
        *(_pool(books, name) for name in pools),
        _tokens(books),
        _flops(books),
        _evaluation(books),
    ]
    return [table for table in made if table.lines]


def _compute(books: Books) -> Table:
    lines = [
        _line(books, axis, note, lambda one, axis=axis: one.compute.get(axis), form)
        for axis, (note, form) in AXES.items()
    ]
    lines += [
        _line(books, "speed", "FLOP/s over all of these hours", _speed, si),
        _line(books, "bill", "of all device hours, evaluation too", lambda one: one.money, "{:,.4g}".format),
        _line(books, "restarts", "", lambda one: float(one.restarts), "{:.0f}".format),
        _line(books, "repeated steps", "", lambda one: float(one.repeated), "{:.0f}".format),
    ]
    note = "Of training: with idle devices, restarts and repeated work, without evaluation."
    lines = [_in_currency(one, books) if one.name in (Axis.MONEY, "bill") else one for one in lines]
    return _table("Compute", books, lines, note)


def _in_currency(amounts: Line, books: Books) -> Line:
    """Every amount with the currency of its run; what has no value stays empty."""
    named = zip(amounts.cells[::2], books.values(), strict=True)
    told = [replace(cell, value=f"{cell.value} {one.currency}" if cell.value else "") for cell, one in named]
    return replace(amounts, cells=tuple(cell for one in told for cell in (one, Cell(value=""))))


def _speed(one: Summary) -> float | None:
    seconds = 3600 * one.compute.get("hours", 0.0)
    return one.compute["flops"] / seconds if seconds and "flops" in one.compute else None


def _time(books: Books) -> Table:
    def wall(one: Summary) -> float:
        return sum(one.wall.values())

    lines = [
        _line(books, name, note, lambda one, name=name: one.wall[name], seconds_text, wall)
        for name, note in WALL.items()
    ]
    return _table("Wall clock", books, [*lines, _line(books, "all", "", wall, seconds_text, wall)])


def _pool(books: Books, name: str) -> Table:
    def parts(one: Summary) -> dict[str, float]:
        pool = one.pools.get(name)
        return {**pool.busy, "idle": pool.idle, "lost": pool.lost, "all": pool.total} if pool else {}

    def whole(one: Summary) -> float:
        return parts(one).get("all", 0.0)

    found = dict.fromkeys(part for one in books.values() for part in parts(one))
    order = [part for part in (*PARTS, *found) if part in found]
    lines = [
        _line(
            books,
            part,
            PARTS.get(part, ("", ""))[1],
            lambda one, part=part: parts(one).get(part),
            seconds_text,
            whole,
        )
        for part in dict.fromkeys([*(part for part in order if part != "all"), "all"])
    ]
    return _table(f"Device time, pool {name}", books, lines)


def _tokens(books: Books) -> Table:
    def of(name: str) -> Callable[[Summary], float | None]:
        return lambda one: one.tokens.get(name)

    sampled = of("sampled")
    lines = [
        _line(books, "sampled", "", sampled, si, sampled),
        _line(books, "trained", "of them", of("trained"), si, sampled),
        *_reasons(books, "not trained: ", lambda one: one.dropped, sampled),
        *(
            _line(books, name, "", of(name), si)
            for name in ("prefilled", "injected", "drafted", "accepted", "recomputed")
        ),
        _line(books, "context rows of training", "", of("trained_context"), si),
    ]
    return _table("Tokens", books, lines)


def _flops(books: Books) -> Table:
    def whole(one: Summary) -> float | None:
        return sum(one.flops.values()) if one.flops else None

    parts = dict.fromkeys(part for one in books.values() for part in one.flops)
    lines = [
        _line(books, "all", "FLOP", whole, si, whole),
        *(
            _line(
                books,
                part,
                PARTS.get(part, ("", ""))[1],
                lambda one, part=part: one.flops.get(part),
                si,
                whole,
            )
            for part in parts
        ),
        _line(books, "useful", "led to an update", lambda one: one.useful, si, whole),
        *_reasons(books, "wasted: ", lambda one: one.wasted, whole),
    ]
    note = "From the model's shapes, products alone; those of work that was lost are not known."
    return _table("FLOPs of training", books, lines, note)


def _reasons(
    books: Books,
    prefix: str,
    of: Callable[[Summary], Mapping[str, int]],
    whole: Callable[[Summary], float | None],
) -> list[Line]:
    """What was in vain, the most frequent reason first."""
    sums = Counter[str]()
    for one in books.values():
        sums.update(of(one))
    return [
        _line(books, prefix + name.replace("_", " "), "", lambda one, n=name: of(one).get(n, 0), si, whole)
        for name, _ in sums.most_common()
    ]


def _evaluation(books: Books) -> Table:
    def devices(one: Summary) -> float:
        return sum(pool.total for pool in one.pools.values())

    seconds = _line(
        books,
        "device time",
        "share of all",
        lambda one: one.evaluation.device_seconds,
        seconds_text,
        devices,
    )
    lines = [
        _line(books, "evaluations", "", lambda one: float(one.evaluation.times), "{:.0f}".format),
        seconds,
        _line(books, "sampled tokens", "", lambda one: one.evaluation.tokens, si),
        _line(books, "FLOPs", "", lambda one: one.evaluation.flops, si),
    ]
    return _table("Evaluation, in no compute", books, lines)


def _line(
    books: Books,
    name: str,
    note: str,
    of: Callable[[Summary], float | None],
    form: Form,
    whole: Callable[[Summary], float | None] = lambda one: None,
) -> Line:
    cells = []
    for one in books.values():
        value, all_of_it = of(one), whole(one)
        cells.append(Cell(value="" if value is None else form(value)))
        cells.append(Cell(value=f"{value / all_of_it:.1%}" if value is not None and all_of_it else ""))
    return Line(name=name, note=note, cells=tuple(cells))


def _table(title: str, books: Books, lines: Sequence[Line], note: str = "") -> Table:
    """Without lines that no run has a value for, and without shares where there are none."""
    kept = [one for one in lines if any(cell.value for cell in one.cells)]
    columns = [column for name in books for column in (Column(name=name), Column(name="share"))]
    if not any(cell.value for one in kept for cell in one.cells[1::2]):
        columns, kept = columns[::2], [replace(one, cells=one.cells[::2]) for one in kept]
    return Table(title=title, columns=tuple(columns), lines=tuple(kept), note=note)


# ---- over the steps


def section(rows: Sequence[Row], name: str = "") -> Section | None:
    """The ledger over the steps; None for one without any."""
    steps = by_step(rows)
    if not steps:
        return None
    title = f"Ledger of {name}" if name else "Ledger"
    times = [line(steps, f"seconds/{part}", part, color) for part, (color, _) in PARTS.items()]
    charts = [
        figure(steps, "Device time by part", "Of each step, and what followed it.", "s", times, stacked=True),
        figure(
            steps, "FLOPs of each step", "Wasted: by reason.", "FLOP", _stack(steps, "flops"), stacked=True
        ),
        figure(
            steps,
            "Tokens of each step",
            "Trained on, or dropped and why.",
            "tokens",
            _stack(steps, "tokens"),
            stacked=True,
        ),
    ]
    slug = "".join(char if char.isalnum() else "-" for char in f" {name}".rstrip())  # a page may have several
    return Section(title=title, charts=[replace(ready(one), key=f"{one.key}{slug}") for one in charts])


COLORS = ("--orange", "--red", "--purple", "--grey", "--teal", "--gold") * 3


def _stack(rows: Sequence[Row], key: str) -> list[Any]:
    """The good part first, then the reasons."""
    sums = Counter[str]()
    for row in rows:
        sums.update({name: value for name, value in row.items() if name.startswith(f"{key}/")})
    good = f"{key}/{'useful' if key == 'flops' else 'trained'}"
    reasons = [name for name, _ in sums.most_common() if name != good]
    pairs = zip((good, *reasons), ("--blue", *COLORS), strict=False)
    return [
        line(rows, name, name.removeprefix(f"{key}/").replace("_", " "), color, missing=0.0)
        for name, color in pairs
    ]


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
            told = spell.row.get("pools", {}).get(name, {}).get("busy", {})
            busy.update({f"seconds/{part}": devices * seconds for part, seconds in told.items()})
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
