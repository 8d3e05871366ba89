"""The sums of a ledger: compute up to each step on every axis, and what it was spent on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from ostinato.every import Axis
from ostinato.observe.ledger.rows import Event, Row, Spell, devices_of, end_of, spells

NO_MONEY = "give it one with --price-per-device-hour, or count in device-hours"


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
    return _all_flops(spell.row) if spell.event is Event.STEP else 0


def _tokens(spell: Spell) -> float:
    return spell.row["tokens"]["sampled"] if spell.event is Event.STEP else 0


AXES: Mapping[Axis, Callable[[Spell], float]] = {
    Axis.DEVICE_HOURS: _device_hours,
    Axis.HOURS: _hours,
    Axis.FLOPS: _flops,
    Axis.TOKENS: _tokens,
    Axis.STEPS: lambda spell: 0.0,
    Axis.MONEY: _money,
}


def set_price(rows: Iterable[Row], price: float) -> list[Row]:
    """The rows, with ``price`` for the sessions that have none."""
    new = {"price_per_device_hour": price}
    return [
        {**row, **new} if row["event"] == Event.START and not row["price_per_device_hour"] else row
        for row in rows
    ]


def spent(rows: Iterable[Row], axis: str) -> dict[int, float]:
    """Compute up to the end of each step that counts, 0 before the first.

    Includes all that training took: idle devices, loading, lost and repeated work; but not evaluation.
    Raises ValueError if the ledger does not have this axis.
    """
    found = {0: 0.0}
    for spell, total in _running(spells(rows), Axis(axis)):
        if spell.event is Event.START:  # steps beyond this one are about to be repeated
            found = {step: value for step, value in found.items() if step <= spell.row["step"]}
        if spell.event is Event.STEP:
            found[spell.row["step"]] = total
    return found


def _running(passed: Iterable[Spell], axis: Axis) -> Iterator[tuple[Spell, float]]:
    """Each row, and what has been spent up to its end."""
    total: float = 0  # whole numbers stay whole
    starts: list[Row] = []
    for spell in passed:
        if spell.event is Event.START:
            starts.append(spell.start)
            if why := _uncountable(starts, axis):
                raise ValueError(why)
        if axis is Axis.STEPS:
            total = float(spell.row["step"]) if spell.event in (Event.START, Event.STEP) else total
        else:
            total += AXES[axis](spell)
        yield spell, total


def _uncountable(starts: Sequence[Row], axis: Axis) -> str:
    """Why sessions with these start rows have no sum; empty if they have one."""
    first = starts[0]
    if axis is not Axis.STEPS and first["step"]:
        return (
            f"the ledger of the run begins at step {first['step']}, and what was spent before is not in it; "
            "count in steps"
        )
    if axis is Axis.MONEY and len(found := {row["currency"] for row in starts}) > 1:
        return f"the run was paid in {' and '.join(sorted(found))}; count in device-hours"
    return ""


def _all_flops(row: Row) -> int:
    if "flops" not in row:
        raise ValueError(
            f"step {row['step']} of the run has no flops; use device-hours, hours, tokens or steps"
        )
    return sum(row["flops"].values())


# ---- sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Device seconds of a pool; they add up to its devices times wall seconds."""

    busy: Mapping[str, float]  # by part
    idle: float
    lost: float  # work that an exception ended

    @property
    def total(self) -> float:
        return sum(self.busy.values()) + self.idle + self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The cost of evaluation, which is part of the sums of time and money but not of compute."""

    times: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    tokens: int = 0  # sampled
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The sums of a whole ledger. A value that no row has is None or missing."""

    sessions: int
    steps: int  # that count
    repeated: int  # steps that were done again
    wall: Mapping[str, float]  # seconds: steps, evaluation, loading, between, lost
    pools: Mapping[str, Pool]
    tokens: Mapping[str, int]  # prefilled, sampled, drafted, accepted, injected, trained, trained_context
    dropped: Mapping[str, int]  # by reason: sampled tokens that no step that counts trained on. "unused":
    # sampled for steps to come, or for those that were done again
    flops: Mapping[str, int]  # by part
    evaluation: Evaluated
    forgetting: Mapping[
        str, float
    ]  # rows, flops, seconds of the forgetting watch: in evaluation, and measured
    compute: Mapping[str, float]  # up to the last step, by axis
    money: float | None  # of everything, evaluation too
    currency: str
    notes: Sequence[str]

    @property
    def restarts(self) -> int:
        return max(0, self.sessions - 1)


def summary(rows: Iterable[Row]) -> Summary:
    """The sums of a ledger. Pools add up to all device seconds, trained and dropped tokens to all sampled
    ones."""
    passed = list(spells(rows))
    kept, again = _kept_and_repeated(passed)
    tokens, trained = _sums([*kept, *again], "tokens"), _sums(kept, "tokens")
    tokens |= {name: trained.get(name, 0) for name in tokens if name not in SAMPLED}
    return Summary(
        sessions=sum(spell.event is Event.START for spell in passed),
        steps=len(kept),
        repeated=len(again),
        wall=_wall(passed),
        pools={name: _pool(passed, name) for name in _pool_names(passed)},
        tokens=tokens,
        dropped=_dropped(kept, tokens),
        flops=_sums([*kept, *again], "flops"),
        evaluation=_evaluated(passed),
        forgetting=_forgetting(passed),
        compute=_compute(passed),
        money=_bill(passed),
        currency=next((spell.start["currency"] for spell in passed), ""),
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


def _sums(rows: Sequence[Row], key: str) -> dict[str, int]:
    """Sums by name of the numbers under ``key``."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: n for name, n in row.get(key, {}).items() if not isinstance(n, Mapping)})
    return dict(sums)


def _dropped(kept: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, int]:
    """Sampled tokens that were not trained on, by reason; the rest has the reason "unused"."""
    reasons = Counter[str]()
    for row in kept:
        reasons.update(row["tokens"].get("dropped", {}))
    unused = tokens.get("sampled", 0) - tokens.get("trained", 0) - reasons.total()
    return dict(reasons) | ({"unused": unused} if unused else {})


# of every step; the others of steps that count
SAMPLED = ("prefilled", "sampled", "drafted", "accepted", "injected", "recomputed")


def _wall(passed: Sequence[Spell]) -> dict[str, float]:
    own = {Event.STEP: "steps", Event.EVAL: "evaluation", Event.END: "lost"}
    names = ("steps", "evaluation", "loading", "between", "lost")
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    for spell in passed:
        sums[own.get(spell.event, "between")] += spell.seconds
        sums["loading" if spell.event is Event.START else "between"] += spell.gap
    return sums


def _pool_names(passed: Sequence[Spell]) -> list[str]:
    names = (name for spell in passed for name in (*devices_of(spell.start), *spell.devices))
    return list(dict.fromkeys(names))


def _pool(passed: Sequence[Spell], name: str) -> Pool:
    busy = Counter[str]()
    idle = lost = 0.0
    for spell in passed:
        devices = spell.devices.get(name, 0)
        seconds_of = spell.row.get("pools", {}).get(name, {}).get("busy", {})
        parts = {part: devices * seconds for part, seconds in seconds_of.items()}
        rest = devices * spell.seconds - sum(parts.values())
        busy.update(parts)
        idle += spell.gap * devices_of(spell.start).get(name, 0)
        lost, idle = (lost + rest, idle) if spell.event is Event.END else (lost, idle + rest)
    return Pool(busy=dict(busy), idle=idle, lost=lost)


def _evaluated(passed: Sequence[Spell]) -> Evaluated:
    found = [spell for spell in passed if spell.evaluation]
    return Evaluated(
        times=sum(spell.event is Event.EVAL for spell in found),
        seconds=sum(spell.seconds for spell in found),
        device_seconds=sum(spell.seconds * sum(spell.devices.values()) for spell in found),
        tokens=sum(spell.row.get("tokens", {}).get("sampled", 0) for spell in found),
        flops=sum(sum(spell.row.get("flops", {}).values()) for spell in found),
    )


def _forgetting(passed: Sequence[Spell]) -> dict[str, float]:
    """Sums of the forgetting watch: its start, which is an evaluation, and its checks, parts of steps."""
    sums = Counter[str]()
    for row in (spell.row for spell in passed):
        sums.update(row.get("forgetting", {}))
        if row.get("set") == "forgetting":
            sums.update(seconds=row["seconds"], flops=sum(row.get("flops", {}).values()))
    return dict(sums)


def _compute(passed: Sequence[Spell]) -> dict[str, float]:
    """Totals on every axis that the ledger has: on steps those that count, on the others everything."""
    found: dict[str, float] = {}
    for axis in AXES:
        with suppress(ValueError):
            found[axis] = [0, *(total for _, total in _running(passed, axis))][-1]
    return found


def _bill(passed: Sequence[Spell]) -> float | None:
    """The price of all device hours; None if ``_no_bill`` has a reason."""
    if not passed or _no_bill(passed):
        return None
    return sum(spell.device_seconds() / 3600 * spell.start["price_per_device_hour"] for spell in passed)


def _no_bill(passed: Sequence[Spell]) -> str:
    """Why there is no bill; empty if there is one."""
    starts = [spell.start for spell in passed if spell.event is Event.START]
    free = [str(row["session"]) for row in starts if not row["price_per_device_hour"]]
    if len(currencies := {row["currency"] for row in starts}) > 1:
        return f"it was paid in {' and '.join(sorted(currencies))}"
    if not free:
        return ""
    whose = f"session {', '.join(free)}" if len(free) < len(starts) else "the run"
    return f"the price of {whose} is not known (--price-per-device-hour gives one)"


def _notes(passed: Sequence[Spell]) -> Iterator[str]:
    starts = [spell.start for spell in passed if spell.event is Event.START]
    if starts and starts[0]["step"]:
        yield f"The ledger begins at step {starts[0]['step']}: what was spent before is not in these sums."
    for row in starts:
        if "clock_back" in row:
            yield (
                f"The clock of session {row['session']} was {row['clock_back']:.0f} s behind the last row "
                "before it; no time is counted across sessions, so no sum depends on it."
            )
    for before, spell in pairwise(passed):
        if spell.event is Event.START and before.event is not Event.END:
            most = max(0.0, spell.row["process_started"] - end_of(before.row))
            yield (
                f"Session {before.row['session']} was killed: what it did after its last row is in no sum; "
                f"the next one started {most:.0f} s later."
            )
    if starts and (why := _no_bill(passed)):
        yield f"There is no bill: {why}."
