"""What a run costs: ledger.jsonl, which is only ever appended to, and the sums over it.

    start   a process takes up the run: pools of devices, price, the step it goes on from
    step    a training step: seconds, busy and idle by pool; tokens; FLOPs, useful or wasted and why; joules
    eval    a held-out measurement: the same, told apart from training
    save    a checkpoint
    lost    work that was given up, by whoever gave it up; that of a killed process by the one that resumes
    end     a process leaves the run, and why

Device seconds are devices times wall seconds, whatever the devices did: what is neither busy in a row nor in
a row at all (loading, between rows) is idle. Only seconds between a kill and the process that resumes are
nobody's. A step that is done again has several rows: the last one counts, the others are waste ("repeated"),
but for the sampling that the last one took over from them ("reused"). FLOPs are whole numbers, so that useful
and wasted add up to all of them exactly. Every row has its own devices and price.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ostinato.run import Jsonl, RunFolder

Row = Mapping[str, Any]

POOL = "local"  # of a run in one process: one pool that samples, grades and trains in turn
TRACES = ("*.jsonl", "*.jsonl.zst", "history.bin", "checkpoints/**/*", "refused/*")  # what training writes
NO_MONEY = "set ledger.price_per_device_hour in its recipe, or count in gpu-hours"


class Event(StrEnum):
    START = "start"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    LOST = "lost"
    END = "end"


NEEDS: Mapping[Event, tuple[str, ...]] = {  # by every reader
    Event.START: ("session", "at", "process_started", "step", "pools", "price_per_device_hour", "currency"),
    Event.STEP: ("session", "step", "seconds", "ended_at", "pools", "tokens"),
    Event.EVAL: ("session", "step", "seconds", "ended_at", "pools"),
    Event.SAVE: ("session", "step", "seconds", "ended_at"),
    Event.LOST: ("session", "seconds", "at"),
    Event.END: ("session", "at", "step", "why"),
}
NUMBERS = ("session", "step", "at", "process_started", "price_per_device_hour", "seconds", "ended_at")


# ---- writing


class SteadyClock:
    """Unix time that never goes back while the process lives, whatever is done to the machine's clock."""

    def __init__(self) -> None:
        self.started, self._zero = time.time(), time.perf_counter()

    def __call__(self) -> float:
        return self.started + time.perf_counter() - self._zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a process trains on, and what that costs."""

    devices: int = 1
    device: str = "cpu"  # its name
    price_per_device_hour: float = 0.0  # 0: not known
    currency: str = "USD"
    recipe: str = ""  # a hash of it


@dataclass(kw_only=True)
class Ledger:
    """Writes the rows of one process. ``with ledger.session(step):`` around all of its work.

    ``meter`` gives the joules that the machine has used since some moment, None where it cannot tell; a row
    has those since the row before. ``clock`` was started when the process began.
    """

    folder: RunFolder
    terms: Terms = Terms()
    meter: Callable[[], float | None] = lambda: None
    clock: SteadyClock = field(default_factory=SteadyClock)
    why: str = "done"  # what the end row will say, unless an exception ends the session

    def __post_init__(self) -> None:
        self._session, self._step, self._last = 0, 0, self.clock.started
        self._joules: float | None = None
        self._before: frozenset[int] = frozenset()

    @contextmanager
    def session(self, step: int) -> Iterator[None]:
        """From the start row, at finished step ``step``, to the end row; within a session, only itself.

        Raises ValueError for a ledger that cannot be read to its end."""
        if self._session:
            yield
            return
        self._start(step)
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # of a full disk the error itself tells
                self._end(f"failed: {type(error.__cause__ or error).__name__}")
            raise
        self._end(self.why)

    @contextmanager
    def work(self) -> Iterator[None]:
        """What an exception ends in the middle is lost: a row says how long it was, since the last one."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self._append(Event.LOST, {"seconds": self.clock() - self._last, "at": self.clock()})
            raise

    def step(self, step: int, seconds: float, busy: Mapping[str, float], work: Row) -> None:
        """A step took ``seconds``, of them ``busy`` by part; ``work``: its tokens, FLOPs, useful, wasted."""
        self._step = step
        row = {"step": step, "seconds": seconds, "ended_at": self.clock()}
        self._append(Event.STEP, {**row, "pools": self._pools(seconds, busy), **work})

    def evaluation(self, step: int, set_name: str, seconds: float, work: Row) -> None:
        """The policy of ``step`` was measured on the set."""
        row = {"step": step, "set": set_name, "seconds": seconds, "ended_at": self.clock()}
        self._append(Event.EVAL, {**row, "pools": self._pools(seconds, {"eval": seconds}), **work})

    def saved(self, step: int, seconds: float) -> None:
        self._append(Event.SAVE, {"step": step, "seconds": seconds, "ended_at": self.clock()})

    def counted(self, step: int) -> bool:
        """Has an earlier process a row of this step? It then paid for groups that are read back."""
        return step in self._before

    def _start(self, step: int) -> None:
        rows = read(self.folder)
        self._before = frozenset(row["step"] for row in rows if row["event"] == Event.STEP)
        last = max((row["session"] for row in rows), default=0)
        self._session, self._step = last + 1, step
        kept = {row["event"] for row in rows if row["session"] == last}
        if last and not kept & {Event.END, Event.LOST}:
            lost = {"event": Event.LOST, "session": last, "seconds": lost_seconds(self.folder)}
            self.folder.ledger.append({**lost, "at": self.clock()})
        terms, back = self.terms, max(map(_end_of, rows), default=0.0) - self.clock.started
        row = {
            "at": self.clock(),
            "process_started": self.clock.started,
            "step": step,
            "recipe": terms.recipe,
            "pools": {POOL: {"devices": terms.devices, "device": terms.device}},
            "price_per_device_hour": terms.price_per_device_hour,
            "currency": terms.currency,
        }
        self._append(Event.START, row | ({"clock_back": back} if back > 0 else {}))

    def _end(self, why: str) -> None:
        self._append(Event.END, {"at": self.clock(), "step": self._step, "why": why})

    def _pools(self, seconds: float, busy: Mapping[str, float]) -> dict[str, Any]:
        idle = max(0.0, seconds - sum(busy.values()))
        return {POOL: {"devices": self.terms.devices, "busy": dict(busy), "idle": idle}}

    def _append(self, event: Event, row: Row) -> None:
        now, before = self.meter(), self._joules
        used = {} if now is None or before is None or event is Event.START else {"joules": now - before}
        self._joules, self._last = now, self.clock()
        self.folder.ledger.append({"event": event, "session": self._session, **row, **used})


def lost_seconds(folder: RunFolder) -> float:
    """From the last row of the ledger to the last trace that a killed process left in its folder.

    Both are times of writing by the same file system, so no two clocks are compared, and a copied folder has
    lost nothing. What the process did after its last trace is not known.
    """
    ledger = folder.ledger.path
    traces = [path for pattern in TRACES for path in folder.path.glob(pattern) if path.is_file()]
    return max((path.stat().st_mtime for path in traces), default=0.0) - ledger.stat().st_mtime


# ---- reading


def read(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run's ledger, without a torn end. Raises ValueError in words for one that is damaged
    before its end or of another form."""
    return list(checked(folder.ledger))


def checked(log: Jsonl) -> Iterator[dict[str, Any]]:
    """``read``, row by row."""
    for number, row in enumerate(log.rows(), start=1):
        if fault := _fault(row, first=number == 1):
            raise ValueError(
                f"line {number} of {log.path} {fault}: the ledger is damaged, or of a version of ostinato "
                "that this one does not read; rename the file, and a new ledger begins"
            )
        yield row


def _fault(row: Any, *, first: bool) -> str:
    """What a row lacks; empty when nothing."""
    event = row.get("event") if isinstance(row, dict) else None
    if event not in tuple(Event):
        return "has no 'event'"
    if first and event != Event.START:
        return "is not the start of a session"
    for key in NEEDS[Event(event)]:
        if key not in row:
            return f"has no {key!r}"
        if key in NUMBERS and not isinstance(row[key], int | float):
            return f"has {row[key]!r} for {key!r}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """A row, and the time that it stands for: its own seconds, and those before it that no row has."""

    row: Row
    start: Row  # of its session
    event: Event
    gap: float
    seconds: float

    @property
    def training(self) -> float:
        """Wall seconds that are not evaluation."""
        return self.gap + (0.0 if self.event is Event.EVAL else self.seconds)

    @property
    def devices(self) -> Mapping[str, int]:
        """By pool, while its own seconds passed."""
        return _devices(self.row if "pools" in self.row else self.start)

    def device_seconds(self, *, training: bool = False) -> float:
        own = 0.0 if training and self.event is Event.EVAL else self.seconds
        return self.gap * sum(_devices(self.start).values()) + own * sum(self.devices.values())


def spells(rows: Iterable[Row]) -> Iterator[Spell]:
    """The rows as time. Within a session each begins no earlier than the one before it has ended."""
    start: Row = {}
    cursor = 0.0
    for row in rows:
        event = Event(row["event"])
        if event is Event.START:
            start, cursor = row, row["process_started"]
        seconds = max(0.0, row.get("seconds", 0.0))
        gap = 0.0 if event is Event.LOST else max(0.0, _end_of(row) - seconds - cursor)
        cursor = cursor + seconds if event is Event.LOST else max(cursor, _end_of(row))
        yield Spell(row=row, start=start, event=event, gap=gap, seconds=seconds)


def _end_of(row: Row) -> float:
    return row["ended_at"] if "ended_at" in row else row["at"]


def _devices(row: Row) -> dict[str, int]:
    return {name: pool["devices"] for name, pool in row["pools"].items()}


# ---- compute


def _hours(spell: Spell) -> float:
    return spell.training / 3600


def _device_hours(spell: Spell) -> float:
    return spell.device_seconds(training=True) / 3600


def _money(spell: Spell) -> float:
    hours, price = _device_hours(spell), spell.start["price_per_device_hour"]
    if hours and not price:
        raise ValueError(f"session {spell.row['session']} of the run has no price: {NO_MONEY}")
    return hours * price


def _flops(spell: Spell) -> float:
    return _all_flops(spell.row) - _reused(spell.row, "flops") if spell.event is Event.STEP else 0


def _tokens(spell: Spell) -> float:
    row = spell.row
    return row["tokens"]["sampled"] - _reused(row, "sampled") if spell.event is Event.STEP else 0


def _joules(spell: Spell) -> float:
    if spell.event is Event.STEP and "joules" not in spell.row:
        raise ValueError("the machine of the run does not tell its energy; count compute in something else")
    return 0.0 if spell.event is Event.EVAL else spell.row.get("joules", 0.0)


AXES: Mapping[str, Callable[[Spell], float]] = {
    "device-hours": _device_hours,
    "gpu-hours": _device_hours,
    "hours": _hours,
    "flops": _flops,
    "tokens": _tokens,
    "money": _money,
    "joules": _joules,
    "steps": lambda spell: 0.0,
}


def spent(rows: Iterable[Row], axis: str) -> dict[int, float]:
    """Compute up to the end of each step that counts, 0 before the first, on one of ``AXES``.

    Everything is in it that training took: idle devices, loading, lost and repeated work; evaluation is not.
    Raises ValueError in words where the ledger does not say.
    """
    found, total, currencies = {0: 0.0}, 0.0, set[str]()
    for spell in spells(rows):
        if spell.event is Event.START:  # what was done beyond this step is about to be done again
            found = {step: value for step, value in found.items() if step <= spell.row["step"]}
            currencies.add(spell.row["currency"])
        total += AXES[axis](spell)
        if spell.event is Event.STEP:
            step = spell.row["step"]
            found[step] = float(step) if axis == "steps" else total
    if axis == "money" and len(currencies) > 1:
        raise ValueError(f"the run was paid in {' and '.join(sorted(currencies))}; count in gpu-hours")
    return found


def _all_flops(row: Row) -> int:
    if "flops" not in row:
        raise ValueError(f"step {row['step']} of the run has no flops; use gpu-hours, hours, tokens or steps")
    return sum(row["flops"].values())


def _reused(row: Row, what: str) -> int:
    return row.get("reused", {}).get(what, 0)


# ---- sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Device seconds of a pool; they add up to its devices times wall seconds."""

    busy: Mapping[str, float]  # by part
    idle: float
    lost: float  # work of killed processes that no row has

    @property
    def total(self) -> float:
        return sum(self.busy.values()) + self.idle + self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What evaluation took; all of it is in the sums of time and money, and in no compute."""

    times: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    tokens: int = 0  # sampled
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole ledger, added up. What no row has is None or not there."""

    sessions: int
    steps: int  # that count
    repeated: int  # steps that were done again
    wall: Mapping[str, float]  # seconds: steps, evaluation, saving, loading, between, lost
    pools: Mapping[str, Pool]
    tokens: Mapping[str, int]  # prefilled, sampled, drafted, accepted, injected, trained, trained_context
    dropped: Mapping[str, int]  # sampled tokens that no step that counts has trained on, by reason
    flops: Mapping[str, int]  # by part
    useful: int | None
    wasted: Mapping[str, int]  # by reason
    evaluation: Evaluated
    compute: Mapping[str, float]  # up to the last step, by axis
    money: float | None  # of everything, evaluation too
    currency: str
    joules: float | None
    notes: Sequence[str]

    @property
    def restarts(self) -> int:
        return max(0, self.sessions - 1)


def summary(rows: Iterable[Row]) -> Summary:
    """The sums of a ledger. Pools add up to all device seconds, useful and wasted to all FLOPs of training,
    trained and dropped tokens to all sampled ones."""
    passed = list(spells(rows))
    kept, again = _kept_and_repeated(passed)
    every = [*kept, *again]
    useful, wasted = _useful_and_wasted(kept, again)
    tokens, dropped = _token_sums(kept, again)
    return Summary(
        sessions=sum(spell.event is Event.START for spell in passed),
        steps=len(kept),
        repeated=len(again),
        wall=_wall(passed),
        pools={name: _pool(passed, name) for name in _pool_names(passed)},
        tokens=tokens,
        dropped=dropped,
        flops=_net(every, "flops", {"sample": "flops"}),
        useful=useful,
        wasted=wasted,
        evaluation=_evaluated(passed),
        compute=_compute(rows=[spell.row for spell in passed]),
        money=_bill(passed),
        currency=next((spell.start["currency"] for spell in passed), ""),
        joules=_energy(passed),
        notes=tuple(_notes(passed)),
    )


def _kept_and_repeated(passed: Sequence[Spell]) -> tuple[list[Row], list[Row]]:
    """The step rows that count, and those whose step was, or has to be, done again."""
    kept: dict[int, Row] = {}
    again: list[Row] = []
    for spell in passed:
        step, event = spell.row.get("step", 0), spell.event
        if event is Event.START:
            again += [kept.pop(later) for later in [one for one in kept if one > step]]
        elif event is Event.STEP:
            again += [kept.pop(step)] if step in kept else []
            kept[step] = spell.row
    return list(kept.values()), again


def _net(rows: Sequence[Row], key: str, reused: Mapping[str, str]) -> dict[str, int]:
    """Sums by name below ``key``, without what a row has taken over from an earlier one of its step."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: n for name, n in row.get(key, {}).items() if not isinstance(n, Mapping)})
        sums.subtract({name: _reused(row, what) for name, what in reused.items() if name in row.get(key, {})})
    return dict(sums)


def _useful_and_wasted(kept: Sequence[Row], again: Sequence[Row]) -> tuple[int | None, dict[str, int]]:
    every = [*kept, *again]
    if not all("flops" in row for row in every):
        return None, {}
    wasted = Counter[str]()
    for row in kept:
        wasted.update(row["wasted"])
    if again:
        wasted["repeated"] = sum(map(_all_flops, again)) - sum(_reused(row, "flops") for row in every)
    return sum(row["useful"] for row in kept), dict(wasted)


SAMPLED = ("prefilled", "sampled", "drafted", "accepted", "injected")  # paid for by whoever sampled first


def _token_sums(kept: Sequence[Row], again: Sequence[Row]) -> tuple[dict[str, int], dict[str, int]]:
    every = [*kept, *again]
    sums = _net(every, "tokens", {name: name for name in SAMPLED})
    trained = _net(kept, "tokens", {})
    sums = {name: n if name in SAMPLED else trained.get(name, 0) for name, n in sums.items()}
    dropped = Counter[str]()
    for row in kept:
        dropped.update(row["tokens"].get("dropped", {}))
    if again:
        spent_twice = sum(row["tokens"]["sampled"] for row in again)
        dropped["repeated"] = spent_twice - sum(_reused(row, "sampled") for row in every)
    return sums, dict(dropped)


def _wall(passed: Sequence[Spell]) -> dict[str, float]:
    own = {Event.STEP: "steps", Event.EVAL: "evaluation", Event.SAVE: "saving", Event.LOST: "lost"}
    sums: dict[str, float] = dict.fromkeys(
        ("steps", "evaluation", "saving", "loading", "between", "lost"), 0.0
    )
    for spell in passed:
        sums[own.get(spell.event, "between")] += spell.seconds
        sums["loading" if spell.event is Event.START else "between"] += spell.gap
    return sums


def _pool_names(passed: Sequence[Spell]) -> list[str]:
    return list(dict.fromkeys(name for spell in passed for name in [*_devices(spell.start), *spell.devices]))


def _pool(passed: Sequence[Spell], name: str) -> Pool:
    busy = Counter[str]()
    idle = lost = 0.0
    for spell in passed:
        devices = spell.devices.get(name, 0)
        told = spell.row.get("pools", {}).get(name, {}).get("busy", {})
        parts = {part: devices * seconds for part, seconds in told.items()}
        rest = devices * spell.seconds - sum(parts.values())
        busy.update(parts)
        idle += spell.gap * _devices(spell.start).get(name, 0)
        lost, idle = (lost + rest, idle) if spell.event is Event.LOST else (lost, idle + rest)
    return Pool(busy=dict(busy), idle=idle, lost=lost)


def _evaluated(passed: Sequence[Spell]) -> Evaluated:
    found = [spell for spell in passed if spell.event is Event.EVAL]
    return Evaluated(
        times=len(found),
        seconds=sum(spell.seconds for spell in found),
        device_seconds=sum(spell.seconds * sum(spell.devices.values()) for spell in found),
        tokens=sum(spell.row.get("tokens", {}).get("sampled", 0) for spell in found),
        flops=sum(sum(spell.row.get("flops", {}).values()) for spell in found),
    )


def _compute(rows: Sequence[Row]) -> dict[str, float]:
    """Up to the last step that counts, by every axis that the ledger tells."""
    found: dict[str, float] = {}
    for axis in AXES:
        with suppress(ValueError):
            upto = spent(rows, axis)
            found[axis] = upto[max(upto)]
    return {axis: value for axis, value in found.items() if axis != "gpu-hours"}


def _bill(passed: Sequence[Spell]) -> float | None:
    """The price of all device hours; None where a session has none, or they do not share a currency."""
    costs = [(spell.device_seconds() / 3600, spell.start) for spell in passed]
    if any(hours and not start["price_per_device_hour"] for hours, start in costs):
        return None
    if len({start["currency"] for _, start in costs}) > 1 or not costs:
        return None
    return sum(hours * start["price_per_device_hour"] for hours, start in costs)


def _energy(passed: Sequence[Spell]) -> float | None:
    """All joules that were told; None where a step has none."""
    if not all("joules" in spell.row for spell in passed if spell.event is Event.STEP):
        return None
    told = [spell.row["joules"] for spell in passed if "joules" in spell.row]
    return sum(told) if told else None


def _notes(passed: Sequence[Spell]) -> Iterator[str]:
    for spell in passed:
        if "clock_back" in spell.row:
            yield (
                f"The clock of session {spell.row['session']} was {spell.row['clock_back']:.0f} s behind the "
                "last row before it; no time is counted across sessions, so no sum depends on it."
            )


__all__ = ["AXES", "Ledger", "SteadyClock", "Summary", "Terms", "checked", "read", "spent", "summary"]
