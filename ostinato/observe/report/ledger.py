"""What runs have cost, as far as their ledgers say: time, tokens, FLOPs and money, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ostinato.axis import Axis
from ostinato.observe.ledger import Event, Summary, spells
from ostinato.observe.report.charts import Lines, Section, Series, figure, lines
from ostinato.observe.report.facts import Table, seconds_text, si
from ostinato.observe.report.reading import Row
from ostinato.run import RunFolder

Books = Mapping[str, Summary]  # by the name of the run
Form = Callable[[float], str]
Of = Callable[[Summary], float | None]
Measure = tuple[str, Of, Form | None]  # its name and note; None: with the currency of the run

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
    """One column of sums, and one of shares, for each run."""
    pools = dict.fromkeys(name for one in books.values() for name in one.pools)
    made = [
        _compute(books),
        _table("Wall clock", books, _wall(), lambda one: sum(one.wall.values())),
        *(_pool(books, name) for name in pools),
        _tokens(books),
        _flops(books),
        _evaluation(books),
    ]
    return [table for table in made if table.rows]


def _compute(books: Books) -> Table:
    measures: list[Measure] = [
        (f"{axis}\n{note}", lambda one, axis=axis: one.compute.get(axis), form)
        for axis, (note, form) in AXES.items()
    ]
    measures += [
        ("speed\nFLOP/s over all of these hours", _speed, si),
        ("bill\nof all device hours, evaluation too", lambda one: one.money, None),
        ("restarts", lambda one: float(one.restarts), "{:.0f}".format),
        ("repeated steps", lambda one: float(one.repeated), "{:.0f}".format),
    ]
    note = "Of training: with idle devices, restarts and repeated work, without evaluation."
    return _table("Compute", books, measures, note=note)


def _speed(one: Summary) -> float | None:
    seconds = 3600 * one.compute.get("hours", 0.0)
    return one.compute["flops"] / seconds if seconds and "flops" in one.compute else None


def _wall() -> list[Measure]:
    parts: list[Measure] = [
        (f"{name}\n{note}", lambda one, name=name: one.wall[name], seconds_text)
        for name, note in WALL.items()
    ]
    return [*parts, ("all", lambda one: sum(one.wall.values()), seconds_text)]


def _pool(books: Books, name: str) -> Table:
    def parts(one: Summary) -> dict[str, float]:
        pool = one.pools.get(name)
        return {**pool.busy, "idle": pool.idle, "lost": pool.lost, "all": pool.total} if pool else {}

    found = dict.fromkeys(part for one in books.values() for part in parts(one) if part != "all")
    order = [
        *(part for part in PARTS if part in found),
        *(part for part in found if part not in PARTS),
        "all",
    ]
    measures: list[Measure] = [
        (_part(part), lambda one, part=part: parts(one).get(part), seconds_text) for part in order
    ]
    return _table(f"Device time, pool {name}", books, measures, lambda one: parts(one).get("all"))


def _part(name: str) -> str:
    """The name of a part of the work, and what it is."""
    return f"{name}\n{PARTS.get(name, ('', ''))[1]}"


def _tokens(books: Books) -> Table:
    def of(name: str) -> Of:
        return lambda one: one.tokens.get(name)

    shared: list[Measure] = [
        ("sampled", of("sampled"), si),
        ("trained\nof them", of("trained"), si),
        *_reasons(books, "not trained", lambda one: one.dropped),
    ]
    names = ("prefilled", "injected", "drafted", "accepted", "recomputed")
    rest: list[Measure] = [(name, of(name), si) for name in names]
    rest.append(("context rows of training", of("trained_context"), si))
    return _table("Tokens", books, shared, of("sampled"), without_share=rest)


def _flops(books: Books) -> Table:
    def whole(one: Summary) -> float | None:
        return sum(one.flops.values()) if one.flops else None

    parts = dict.fromkeys(part for one in books.values() for part in one.flops)
    measures: list[Measure] = [
        ("all\nFLOP", whole, si),
        *((_part(part), lambda one, part=part: one.flops.get(part), si) for part in parts),
        ("useful\nled to an update", lambda one: one.useful, si),
        *_reasons(books, "wasted", lambda one: one.wasted),
    ]
    note = "From the model's shapes, products alone; those of work that was lost are not known."
    return _table("FLOPs of training", books, measures, whole, note=note)


def _reasons(books: Books, what: str, of: Callable[[Summary], Mapping[str, int]]) -> list[Measure]:
    """What was in vain, the most frequent reason first."""
    sums = Counter[str]()
    for one in books.values():
        sums.update(of(one))
    return [
        (f"{what}: {name.replace('_', ' ')}", lambda one, name=name: of(one).get(name, 0), si)
        for name, _ in sums.most_common()
    ]


def _evaluation(books: Books) -> Table:
    times: Measure = ("evaluations", lambda one: float(one.evaluation.times), "{:.0f}".format)
    seconds: Measure = (
        "device time\nshare of all",
        lambda one: one.evaluation.device_seconds,
        seconds_text,
    )
    rest: list[Measure] = [
        times,
        ("sampled tokens", lambda one: one.evaluation.tokens, si),
        ("FLOPs", lambda one: one.evaluation.flops, si),
    ]
    return _table("Evaluation, in no compute", books, [seconds], _held, without_share=rest)


def _held(one: Summary) -> float:
    """All device seconds."""
    return sum(pool.total for pool in one.pools.values())


def _table(
    title: str,
    books: Books,
    measures: Iterable[Measure],
    whole: Of = lambda one: None,
    note: str = "",
    without_share: Iterable[Measure] = (),
) -> Table:
    """A value and its share of the ``whole`` for each run; without lines that no run has a value for, and
    without shares where there are none."""
    rows = [_row(books, one, whole) for one in measures]
    rows += [_row(books, one, lambda one: None) for one in without_share]
    rows = [row for row in rows if any(row[1:])]
    if any(share for row in rows for share in row[2::2]):
        return Table(
            title=title, head=[name for run in books for name in (run, "share")], rows=rows, note=note
        )
    return Table(title=title, head=list(books), rows=[(row[0], *row[1::2]) for row in rows], note=note)


def _row(books: Books, measure: Measure, whole: Of) -> tuple[str, ...]:
    name, of, form = measure
    cells = [name]
    for one in books.values():
        value, all_of_it = of(one), whole(one)
        text = "" if value is None else form(value) if form else f"{value:,.4g} {one.currency}"
        cells += [text, f"{value / all_of_it:.1%}" if value is not None and all_of_it else ""]
    return tuple(cells)


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
