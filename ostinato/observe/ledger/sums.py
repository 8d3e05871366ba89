"""The sums of a ledger: compute up to each step on every axis, by what it was spent on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from ostinato.every import Axis
from ostinato.observe.ledger.rows import Event, Row, Spell, count_devices, find_end, spells

NO_MONEY = "give it one with --price-per-device-hour, or count in device-hours"


# ---- compute


def _count_hours(spell: Spell) -> float:
    return spell.training / 3600


def _count_device_hours(spell: Spell) -> float:
    return spell.device_seconds(training=True) / 3600


def _price_spell(spell: Spell) -> float:
    hours, price = _count_device_hours(spell), spell.start["price_per_device_hour"]
    if hours and not price:
        raise ValueError(f"session {spell.row['session']} of the run has no price: {NO_MONEY}")
    return hours * price


def _get_flops(spell: Spell) -> float:
    return _sum_flops(spell.row) if spell.event is Event.STEP else 0


def _get_tokens(spell: Spell) -> float:
    return spell.row["tokens"]["sampled"] if spell.event is Event.STEP else 0


AXES: Mapping[Axis, Callable[[Spell], float]] = {
    Axis.DEVICE_HOURS: _count_device_hours,
    Axis.HOURS: _count_hours,
    Axis.FLOPS: _get_flops,
    Axis.TOKENS: _get_tokens,
    Axis.STEPS: lambda spell: 0.0,
    Axis.MONEY: _price_spell,
}


def set_price(rows: Iterable[Row], price: float) -> list[Row]:
    """Copies of the rows, with ``price`` per device hour in the start rows that have none."""
    price_fields = {"price_per_device_hour": price}
    return [
        {**row, **price_fields} if row["event"] == Event.START and not row["price_per_device_hour"] else row
        for row in rows
    ]


def spent(rows: Iterable[Row], axis: str) -> dict[int, float]:
    """{step: compute on ``axis`` up to its end} of the steps that count; step 0 has 0.

    Includes idle devices, loading, lost and repeated work, but not evaluation.
    Raises ValueError if the ledger does not have this axis.
    """
    compute = {0: 0.0}
    for spell, total in _iterate_totals(spells(rows), Axis(axis)):
        if spell.event is Event.START:  # later steps will be repeated
            compute = {step: value for step, value in compute.items() if step <= spell.row["step"]}
        if spell.event is Event.STEP:
            compute[spell.row["step"]] = total
    return compute


def _iterate_totals(ledger_spells: Iterable[Spell], axis: Axis) -> Iterator[tuple[Spell, float]]:
    """Yield each spell with the compute on ``axis`` up to its end. Raises ValueError if the ledger has no sum
    on this axis."""
    total: float = 0  # whole numbers stay whole
    starts: list[Row] = []
    for spell in ledger_spells:
        if spell.event is Event.START:
            starts.append(spell.start)
            if reason := _explain_uncountable(starts, axis):
                raise ValueError(reason)
        if axis is Axis.STEPS:
            total = float(spell.row["step"]) if spell.event in (Event.START, Event.STEP) else total
        else:
            total += AXES[axis](spell)
        yield spell, total


def _explain_uncountable(starts: Sequence[Row], axis: Axis) -> str:
    """The reason why sessions with these start rows have no sum on ``axis``; empty if they have one."""
    first = starts[0]
    if axis is not Axis.STEPS and first["step"]:
        return (
            f"the ledger of the run begins at step {first['step']}, and what was spent before is not in it; "
            "count in steps"
        )
    if axis is Axis.MONEY and len(currencies := {row["currency"] for row in starts}) > 1:
        return f"the run was paid in {' and '.join(sorted(currencies))}; count in device-hours"
    return ""


def _sum_flops(row: Row) -> int:
    """FLOPs of a step over all parts. Raises ValueError if the row has none."""
    if "flops" not in row:
        raise ValueError(
            f"step {row['step']} of the run has no flops; use device-hours, hours, tokens or steps"
        )
    return sum(row["flops"].values())


# ---- sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Device seconds of a pool by use; they add up to its devices times wall seconds."""

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
    """The sums of a ledger. The pools add up to all device seconds, and trained and dropped tokens to all
    sampled tokens."""
    all_spells = list(spells(rows))
    counted, repeated = _split_repeated(all_spells)
    tokens, trained = _sum_by_name([*counted, *repeated], "tokens"), _sum_by_name(counted, "tokens")
    tokens |= {name: trained.get(name, 0) for name in tokens if name not in SAMPLED_TOKENS}
    return Summary(
        sessions=sum(spell.event is Event.START for spell in all_spells),
        steps=len(counted),
        repeated=len(repeated),
        wall=_sum_wall(all_spells),
        pools={name: _sum_pool(all_spells, name) for name in _list_pools(all_spells)},
        tokens=tokens,
        dropped=_count_dropped(counted, tokens),
        flops=_sum_by_name([*counted, *repeated], "flops"),
        evaluation=_sum_evaluations(all_spells),
        forgetting=_sum_forgetting(all_spells),
        compute=_sum_compute(all_spells),
        money=_price_ledger(all_spells),
        currency=next((spell.start["currency"] for spell in all_spells), ""),
        notes=tuple(_explain_gaps(all_spells)),
    )


def _split_repeated(ledger_spells: Sequence[Spell]) -> tuple[list[Row], list[Row]]:
    """(step rows that count, rows whose step was or has to be done again)."""
    counted: dict[int, Row] = {}
    repeated: list[Row] = []
    for spell in ledger_spells:
        step, event = spell.row.get("step", 0), spell.event
        if event is Event.START:
            repeated += [
                counted.pop(step_to_repeat)
                for step_to_repeat in [counted_step for counted_step in counted if counted_step > step]
            ]
        elif event is Event.STEP:
            repeated += [counted.pop(step)] if step in counted else []
            counted[step] = spell.row
    return list(counted.values()), repeated


def _sum_by_name(rows: Sequence[Row], key: str) -> dict[str, int]:
    """Sums by name of the numbers under ``key``."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: n for name, n in row.get(key, {}).items() if not isinstance(n, Mapping)})
    return dict(sums)


def _count_dropped(counted: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, int]:
    """Sampled tokens that were not trained on, by reason; the rest has the reason "unused"."""
    reasons = Counter[str]()
    for row in counted:
        reasons.update(row["tokens"].get("dropped", {}))
    unused = tokens.get("sampled", 0) - tokens.get("trained", 0) - reasons.total()
    return dict(reasons) | ({"unused": unused} if unused else {})


# summed over every step; all others over the steps that count
SAMPLED_TOKENS = ("prefilled", "sampled", "drafted", "accepted", "injected", "recomputed")


def _sum_wall(ledger_spells: Sequence[Spell]) -> dict[str, float]:
    """Wall seconds by use. Time without a row counts as "loading" before a start row, and as "between" before
    any other row."""
    uses = {Event.STEP: "steps", Event.EVAL: "evaluation", Event.END: "lost"}
    names = ("steps", "evaluation", "loading", "between", "lost")
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    for spell in ledger_spells:
        sums[uses.get(spell.event, "between")] += spell.seconds
        sums["loading" if spell.event is Event.START else "between"] += spell.gap
    return sums


def _list_pools(ledger_spells: Sequence[Spell]) -> list[str]:
    """Names of all device pools, in order of first use."""
    names = (name for spell in ledger_spells for name in (*count_devices(spell.start), *spell.devices))
    return list(dict.fromkeys(names))


def _sum_pool(ledger_spells: Sequence[Spell], name: str) -> Pool:
    """Device seconds of the pool ``name``, summed over all spells."""
    busy = Counter[str]()
    idle = lost = 0.0
    for spell in ledger_spells:
        devices = spell.devices.get(name, 0)
        busy_seconds = spell.row.get("pools", {}).get(name, {}).get("busy", {})
        parts = {part: devices * seconds for part, seconds in busy_seconds.items()}
        unaccounted_seconds = devices * spell.seconds - sum(parts.values())
        busy.update(parts)
        idle += spell.gap * count_devices(spell.start).get(name, 0)
        lost, idle = (
            (lost + unaccounted_seconds, idle)
            if spell.event is Event.END
            else (lost, idle + unaccounted_seconds)
        )
    return Pool(busy=dict(busy), idle=idle, lost=lost)


def _sum_evaluations(ledger_spells: Sequence[Spell]) -> Evaluated:
    """The cost of all evaluations."""
    evaluations = [spell for spell in ledger_spells if spell.is_evaluation]
    return Evaluated(
        times=sum(spell.event is Event.EVAL for spell in evaluations),
        seconds=sum(spell.seconds for spell in evaluations),
        device_seconds=sum(spell.seconds * sum(spell.devices.values()) for spell in evaluations),
        tokens=sum(spell.row.get("tokens", {}).get("sampled", 0) for spell in evaluations),
        flops=sum(sum(spell.row.get("flops", {}).values()) for spell in evaluations),
    )


def _sum_forgetting(ledger_spells: Sequence[Spell]) -> dict[str, float]:
    """Sums of the forgetting watch: its start, which is an evaluation, and its checks, parts of steps."""
    sums = Counter[str]()
    for row in (spell.row for spell in ledger_spells):
        sums.update(row.get("forgetting", {}))
        if row.get("set") == "forgetting":
            sums.update(seconds=row["seconds"], flops=sum(row.get("flops", {}).values()))
    return dict(sums)


def _sum_compute(ledger_spells: Sequence[Spell]) -> dict[str, float]:
    """The total on each axis on which the ledger has a sum."""
    totals: dict[str, float] = {}
    for axis in AXES:
        with suppress(ValueError):
            totals[axis] = [0, *(total for _, total in _iterate_totals(ledger_spells, axis))][-1]
    return totals


def _price_ledger(ledger_spells: Sequence[Spell]) -> float | None:
    """The price of all device hours; None where there is no bill."""
    if not ledger_spells or _explain_no_bill(ledger_spells):
        return None
    return sum(
        spell.device_seconds() / 3600 * spell.start["price_per_device_hour"] for spell in ledger_spells
    )


def _explain_no_bill(ledger_spells: Sequence[Spell]) -> str:
    """The reason why there is no bill; empty if there is one."""
    starts = [spell.start for spell in ledger_spells if spell.event is Event.START]
    unpriced = [str(row["session"]) for row in starts if not row["price_per_device_hour"]]
    if len(currencies := {row["currency"] for row in starts}) > 1:
        return f"it was paid in {' and '.join(sorted(currencies))}"
    if not unpriced:
        return ""
    unpriced_sessions = f"session {', '.join(unpriced)}" if len(unpriced) < len(starts) else "the run"
    return f"the price of {unpriced_sessions} is not known (--price-per-device-hour gives one)"


def _explain_gaps(ledger_spells: Sequence[Spell]) -> Iterator[str]:
    """Yield sentences on what the sums lack: earlier steps, clock changes, killed sessions, prices."""
    starts = [spell.start for spell in ledger_spells if spell.event is Event.START]
    if starts and starts[0]["step"]:
        yield f"The ledger begins at step {starts[0]['step']}: what was spent before is not in these sums."
    for row in starts:
        if "clock_back" in row:
            yield (
                f"The clock of session {row['session']} was {row['clock_back']:.0f} s behind the last row "
                "before it; no time is counted across sessions, so no sum depends on it."
            )
    for before, spell in pairwise(ledger_spells):
        if spell.event is Event.START and before.event is not Event.END:
            seconds = max(0.0, spell.row["process_started"] - find_end(before.row))
            yield (
                f"Session {before.row['session']} was killed: what it did after its last row is in no sum; "
                f"the next one started {seconds:.0f} s later."
            )
    if starts and (reason := _explain_no_bill(ledger_spells)):
        yield f"There is no bill: {reason}."
