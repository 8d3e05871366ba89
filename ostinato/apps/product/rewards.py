"""Rewards from feedback: a table of weights in TOML, and the reward of an answer by it.

    value = action of the policy + clip(sum over users of their terms, floor, ceiling)

The table names every ``Kind`` and every ``Action``. An incomplete table is refused, since a failure without a
reward could be exploited. Silence is worth 0. A signal counts within its horizon behind the answer, by event
time; an answer has no value before its longest horizon has closed. A return visit is no reward of an answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ostinato.apps.product.events import Action, Event, Exchange, Kind
from ostinato.apps.product.texts import measure_similarity
from ostinato.config.explain import explain
from ostinato.inputs import parse_toml

UNFAVOURABLE = (Kind.REJECT, Kind.UNDO, Kind.RUN_FAIL, Kind.ABANDON)  # never worth more than silence
FAVOURABLE = (Kind.ACCEPT, Kind.COPY, Kind.RUN_OK, Kind.TASK_DONE)  # never worth less
FAILED = (Action.INVALID, Action.EMPTY)  # no attempt was made


class Worth(BaseModel):
    """The weight of a kind of event. ``abstain``: no term of its user on that answer counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(allow_inf_nan=False)
    horizon_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    zero_at: float = Field(default=0.0, ge=0, lt=1)  # of an edit: the kept share that is worth nothing
    abstain: bool = False


class ActionWorth(BaseModel):
    """The weight of an action of the policy. ``credit``: whether what users liked about it adds to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(allow_inf_nan=False)
    credit: bool = False


class Table(BaseModel):
    """The weights of all kinds and actions. ``revision`` names the table with its contents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    version: int = Field(ge=1)
    # the chance of an accept from which on an answer is worth more than none
    break_even: float = Field(gt=0, lt=1)
    floor: float = Field(le=0, allow_inf_nan=False)  # of what users add to one answer
    ceiling: float = Field(ge=0, allow_inf_nan=False)
    # the most that one user adds to or takes from a window, in all
    cap: float = Field(gt=0, allow_inf_nan=False)
    cap_window_s: float = Field(gt=0, allow_inf_nan=False)
    # how late an event may arrive, how far clocks may differ
    lateness_s: float = Field(ge=0, allow_inf_nan=False)
    event: dict[Kind, Worth]
    action: dict[Action, ActionWorth]

    @model_validator(mode="after")
    def _check_faults(self) -> Table:
        for fault in _find_faults(self):
            raise ValueError(fault)
        return self

    @property
    def revision(self) -> str:
        """Name, version and the hash of all values."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return f"{self.name}-{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def horizon_s(self) -> float:
        """The horizon of the slowest signal that counts, in seconds."""
        return max(
            (worth.horizon_s for worth in self.event.values() if worth.weight or worth.abstain), default=0.0
        )


def _find_faults(table: Table) -> Iterable[str]:
    """Yield the faults of a table, one sentence each. If kinds or actions are missing, yield that alone."""
    event, action = table.event, table.action
    for section, members, weights in (("event", Kind, event), ("action", Action, action)):
        if missing := [member.value for member in members if member not in weights]:
            yield f"{section}.{missing[0]} is missing ({len(missing)} in all); say what each is worth, 0 too"
            return
    for kind in (Kind.SHOWN, Kind.RETURN_VISIT):
        if event[kind].weight or event[kind].abstain:
            reason = "silence is worth 0" if kind is Kind.SHOWN else "returning is no reward of an answer"
            yield f"event.{kind}.weight is {event[kind].weight:g}; {reason}: make it 0, without abstain"
    for kinds, sign, word in ((FAVOURABLE, 1, "negative"), (UNFAVOURABLE, -1, "positive")):
        for kind in kinds:
            if sign * event[kind].weight < 0:
                yield f"event.{kind}.weight is {event[kind].weight:g}; {word} is against its meaning"
    for kind, worth in event.items():
        if worth.zero_at and kind is not Kind.EDIT:
            yield f"event.{kind}.zero_at is {worth.zero_at:g}; only an edit has one"
    if not event[Kind.REJECT].weight < 0 < event[Kind.ACCEPT].weight:
        yield "event.accept.weight has to be above 0, event.reject.weight below: they make the break-even"
    elif abs(table.break_even - (chance := break_even(table))) > 1e-6:
        yield f"break_even is {table.break_even:g}, where the weights of accept and reject make it {chance:g}"
    if action[Action.ANSWER].weight:
        yield f"action.answer.weight is {action[Action.ANSWER].weight:g}; silence is worth 0: make it 0"
    yield from _find_temptations(table)


def _find_temptations(table: Table) -> Iterable[str]:
    """Yield faults of a table that pays more for failing or asking back than for an honest attempt at its
    worst."""
    if not table.action[Action.ANSWER].credit:
        yield "action.answer.credit is false; what users like about an answer has to count"
    for kind, worth in table.action.items():
        limit = table.floor if kind in (*FAILED, Action.QUESTION) else 0.0
        if worth.weight > limit:
            case = "an honest attempt at its worst (floor)" if limit else "an honest attempt"
            yield f"action.{kind}.weight is {worth.weight:g}, above {limit:g} of {case}; make it at most that"
        if kind in FAILED and worth.credit:
            yield f"action.{kind}.credit is true; nothing that a user does makes a failure worth more"


def read_table(file: Path) -> Table:
    """Read a table. Raises ValueError with one sentence about a field that is missing or contradicts another,
    or that tempts the policy."""
    return parse_table(file.read_text(encoding="utf-8"), str(file))


def parse_table(text: str, where: str = "the table") -> Table:
    """Parse a table from TOML, see ``read_table``."""
    try:
        return Table.model_validate(parse_toml(text))
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, Table, 'a table of rewards')}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def break_even(table: Table) -> float:
    """Compute the chance p of an accept at which p accept + (1 - p) reject = 0: 0.25 for +0.75 and -0.25."""
    accept, reject = table.event[Kind.ACCEPT].weight, table.event[Kind.REJECT].weight
    return -reject / (accept - reject)


class Standing(StrEnum):
    DECIDED = "decided"
    UNDECIDED = "undecided"  # a window is open
    ABSTAINED = "abstained"  # users abstain from an honest attempt and no other user gave feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The reward of an answer. ``value`` is None unless it is decided. ``terms``: the action's, and each
    kind's sum over users, before floor and ceiling. ``ignored``: events outside of their horizon, without
    consent, or repeated."""

    value: float | None
    standing: Standing
    terms: Mapping[str, float] = field(default_factory=dict)
    closes: float = 0.0  # when it is decided, in event time
    ignored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The rewards of a window. ``orphans``: events on answers that are not in it; ``capped``: users and
    windows whose terms were scaled down."""

    outcomes: Mapping[str, Outcome]  # by response id
    orphans: int
    capped: int


def reward(exchange: Exchange, events: Iterable[Event], now: float, table: Table) -> Outcome:
    """Compute the reward of one answer, without the cap, which needs a user's other answers (``rewards``).
    ``now``: the event time up to which events have been collected. Raises ValueError for events of other
    answers."""
    own_events = list(events)
    for event in own_events:
        if event.response_id != exchange.response_id:
            raise ValueError(
                f"event {event.event_id} is of {event.response_id}, not of {exchange.response_id}"
            )
    return _compute_outcome(
        exchange, _group_by_user(exchange, own_events, table), len(own_events), now, table, {}
    )


def rewards(exchanges: Sequence[Exchange], events: Iterable[Event], now: float, table: Table) -> Account:
    """Compute the rewards of all answers of a window.

    One user moves the sum of all values within ``cap_window_s`` (by the time of the answers, in fixed
    windows) by at most ``cap``: their terms are scaled down together. Values of a cap window that is still
    open may shrink.
    """
    by_answer: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_answer[event.response_id].append(event)
    by_user = {
        exchange.response_id: _group_by_user(exchange, by_answer[exchange.response_id], table)
        for exchange in exchanges
    }
    totals: dict[tuple[str, int], float] = defaultdict(float)
    for exchange in exchanges:
        if now >= _compute_close_time(exchange, table):
            for user, amount in _sum_amounts(exchange, by_user[exchange.response_id], table).items():
                totals[user, int(exchange.ts // table.cap_window_s)] += abs(amount)
    scales = {key: table.cap / total for key, total in totals.items() if total > table.cap}
    outcomes = {
        exchange.response_id: _compute_outcome(
            exchange, by_user[exchange.response_id], len(by_answer[exchange.response_id]), now, table, scales
        )
        for exchange in exchanges
    }
    return Account(
        outcomes=outcomes,
        orphans=sum(len(group) for name, group in by_answer.items() if name not in by_user),
        capped=len(scales),
    )


def _group_by_user(exchange: Exchange, events: Iterable[Event], table: Table) -> dict[str, dict[Kind, Event]]:
    """Return user -> kind -> the last such event with consent and within its horizon. Earlier events of a
    kind add nothing."""
    by_user: dict[str, dict[Kind, Event]] = defaultdict(dict)
    # By contents too: a faulty client may send events with the same id and time, whose order has to be fixed.
    for event in sorted(
        events, key=lambda event: (event.ts, event.event_id, event.value or 0.0, event.after or "")
    ):
        delay = event.ts - exchange.ts
        if event.consent and -table.lateness_s <= delay <= table.event[event.kind].horizon_s:
            by_user[event.user or exchange.user][event.kind] = event
    return by_user


def _compute_close_time(exchange: Exchange, table: Table) -> float:
    return exchange.ts + table.horizon_s + table.lateness_s


def _compute_terms(exchange: Exchange, event_of: Mapping[Kind, Event], table: Table) -> dict[Kind, float]:
    """Return the terms that one user adds to an answer, by kind. There are none if the user abstains, and
    only negative ones if the action earns no credit."""
    if any(table.event[kind].abstain for kind in event_of):
        return {}
    credit = table.action[exchange.action].credit
    terms = {
        kind: amount
        for kind, event in event_of.items()
        if (amount := _compute_amount(exchange, event, table))
    }
    return {kind: amount for kind, amount in terms.items() if credit or amount < 0}


def _compute_amount(exchange: Exchange, event: Event, table: Table) -> float:
    """Compute the term of one event: the weight of its kind, scaled for ratings, dwells and edits."""
    worth = table.event[event.kind]
    if not worth.weight:
        return 0.0
    match event.kind:
        case Kind.RATING:
            factor = event.value or 0.0
        case Kind.DWELL:  # as a share of the horizon
            factor = min(max(event.value or 0.0, 0.0) / worth.horizon_s, 1.0)
        case Kind.EDIT:  # the share that was kept
            factor = measure_similarity(exchange.output, event.after or "") - worth.zero_at
        case _:
            factor = 1.0
    return worth.weight * factor


def _sum_amounts(
    exchange: Exchange, by_user: Mapping[str, Mapping[Kind, Event]], table: Table
) -> dict[str, float]:
    """Return user -> the sum of their terms, within floor and ceiling."""
    sums = {
        user: math.fsum(_compute_terms(exchange, event_of, table).values())
        for user, event_of in by_user.items()
    }
    return {user: min(max(total, table.floor), table.ceiling) for user, total in sums.items()}


def _compute_outcome(
    exchange: Exchange,
    by_user: Mapping[str, Mapping[Kind, Event]],
    event_count: int,
    now: float,
    table: Table,
    scales: Mapping[tuple[str, int], float],
) -> Outcome:
    """Compute the outcome of an answer. ``scales`` has the factor of each (user, cap window) over the cap."""
    closes, ignored_count = (
        _compute_close_time(exchange, table),
        event_count - sum(map(len, by_user.values())),
    )
    if now < closes:
        return Outcome(value=None, standing=Standing.UNDECIDED, closes=closes, ignored=ignored_count)
    action_weight, window = table.action[exchange.action].weight, int(exchange.ts // table.cap_window_s)
    terms = {f"action:{exchange.action}": action_weight}
    terms_of_users = [_compute_terms(exchange, event_of, table) for event_of in by_user.values()]
    for kind, amount in chain.from_iterable(event_of.items() for event_of in terms_of_users):
        terms[kind.value] = terms.get(kind.value, 0.0) + amount
    abstains = any(table.event[kind].abstain for event_of in by_user.values() for kind in event_of)
    if abstains and exchange.action is Action.ANSWER and not any(terms_of_users):
        return Outcome(
            value=None, standing=Standing.ABSTAINED, terms=terms, closes=closes, ignored=ignored_count
        )
    amounts = _sum_amounts(exchange, by_user, table)
    users = math.fsum(amount * scales.get((user, window), 1.0) for user, amount in amounts.items())
    value = action_weight + min(max(users, table.floor), table.ceiling)
    return Outcome(value=value, standing=Standing.DECIDED, terms=terms, closes=closes, ignored=ignored_count)
