"""What feedback is worth: a table in TOML, and the reward of an answer by it.

    value = action of the policy + clip(sum over users of their terms, floor, ceiling)

The table names every ``Kind`` and every ``Action``: what is left out is refused, for a failure without a
reward is an invitation. Silence is worth 0. A signal counts within its horizon behind the answer, by event
time; an answer has no value before its longest horizon has closed. Returning is no reward of an answer.
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
from ostinato.apps.product.texts import similarity
from ostinato.config.explain import explain
from ostinato.inputs import parse_toml

UNFAVOURABLE = (Kind.REJECT, Kind.UNDO, Kind.RUN_FAIL, Kind.ABANDON)  # never worth more than silence
FAVOURABLE = (Kind.ACCEPT, Kind.COPY, Kind.RUN_OK, Kind.TASK_DONE)  # never worth less
FAILED = (Action.INVALID, Action.EMPTY)  # no attempt was made


class Worth(BaseModel):
    """Of a kind of event. ``abstain``: its user's terms on that answer do not count, whatever they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(allow_inf_nan=False)
    horizon_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    zero_at: float = Field(default=0.0, ge=0, lt=1)  # of an edit: the kept share that is worth nothing
    abstain: bool = False


class ActionWorth(BaseModel):
    """Of what the policy did. ``credit``: whether what users liked about it adds to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(allow_inf_nan=False)
    credit: bool = False


class Table(BaseModel):
    """What everything is worth. ``revision`` names it with its contents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    version: int = Field(ge=1)
    break_even: float = Field(
        gt=0, lt=1
    )  # the chance of an accept from which on an answer is worth more than none
    floor: float = Field(le=0, allow_inf_nan=False)  # of what users add to one answer
    ceiling: float = Field(ge=0, allow_inf_nan=False)
    cap: float = Field(
        gt=0, allow_inf_nan=False
    )  # the most that one user adds to or takes from a window, in all
    cap_window_s: float = Field(gt=0, allow_inf_nan=False)
    lateness_s: float = Field(
        ge=0, allow_inf_nan=False
    )  # how late an event may arrive, how far clocks may differ
    event: dict[Kind, Worth]
    action: dict[Action, ActionWorth]

    @model_validator(mode="after")
    def _lawful(self) -> Table:
        for fault in _faults(self):
            raise ValueError(fault)
        return self

    @property
    def revision(self) -> str:
        """Name, version and the hash of all values."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return f"{self.name}-{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def horizon_s(self) -> float:
        """Of the slowest signal that counts."""
        return max((one.horizon_s for one in self.event.values() if one.weight or one.abstain), default=0.0)


def _faults(table: Table) -> Iterable[str]:
    event, action = table.event, table.action
    for section, known, given in (("event", Kind, event), ("action", Action, action)):
        if missing := [one.value for one in known if one not in given]:
            yield f"{section}.{missing[0]} is missing ({len(missing)} in all); say what each is worth, 0 too"
            return
    for kind in (Kind.SHOWN, Kind.RETURN_VISIT):
        if event[kind].weight or event[kind].abstain:
            why = "silence is worth 0" if kind is Kind.SHOWN else "returning is no reward of an answer"
            yield f"event.{kind}.weight is {event[kind].weight:g}; {why}: make it 0, without abstain"
    for kinds, sign, word in ((FAVOURABLE, 1, "negative"), (UNFAVOURABLE, -1, "positive")):
        for kind in kinds:
            if sign * event[kind].weight < 0:
                yield f"event.{kind}.weight is {event[kind].weight:g}; {word} is against its meaning"
    for kind, worth in event.items():
        if worth.zero_at and kind is not Kind.EDIT:
            yield f"event.{kind}.zero_at is {worth.zero_at:g}; only an edit has one"
    if not event[Kind.REJECT].weight < 0 < event[Kind.ACCEPT].weight:
        yield "event.accept.weight has to be above 0, event.reject.weight below: they make the break-even"
    elif abs(table.break_even - (even := break_even(table))) > 1e-6:
        yield f"break_even is {table.break_even:g}, where the weights of accept and reject make it {even:g}"
    if action[Action.ANSWER].weight:
        yield f"action.answer.weight is {action[Action.ANSWER].weight:g}; silence is worth 0: make it 0"
    yield from _temptations(table)


def _temptations(table: Table) -> Iterable[str]:
    """Failing or asking back, which must never pay more than an honest attempt at its worst."""
    if not table.action[Action.ANSWER].credit:
        yield "action.answer.credit is false; what users like about an answer has to count"
    for one, worth in table.action.items():
        limit = table.floor if one in (*FAILED, Action.QUESTION) else 0.0
        if worth.weight > limit:
            worst = "an honest attempt at its worst (floor)" if limit else "an honest attempt"
            yield f"action.{one}.weight is {worth.weight:g}, above {limit:g} of {worst}; make it at most that"
        if one in FAILED and worth.credit:
            yield f"action.{one}.credit is true; nothing that a user does makes a failure worth more"


def read_table(file: Path) -> Table:
    """Raises ValueError with one sentence: what is missing, contradicts itself, or tempts the policy."""
    return parse_table(file.read_text(encoding="utf-8"), str(file))


def parse_table(text: str, where: str = "the table") -> Table:
    """A table from TOML, see ``read_table``."""
    try:
        return Table.model_validate(parse_toml(text))
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, Table, 'a table of rewards')}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def break_even(table: Table) -> float:
    """The chance p of an accept at which p accept + (1 - p) reject = 0: 0.25 for +0.75 and -0.25."""
    accept, reject = table.event[Kind.ACCEPT].weight, table.event[Kind.REJECT].weight
    return -reject / (accept - reject)


class Standing(StrEnum):
    DECIDED = "decided"
    UNDECIDED = "undecided"  # a window is open
    ABSTAINED = "abstained"  # users abstain from an honest attempt and no other user gave feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``value`` is None unless it is decided. ``terms``: the action's, and each kind's sum over users, before
    floor and ceiling. ``ignored``: events outside of their horizon, without consent, or repeated."""

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
    """Of one answer, without the cap, which needs a user's other answers (``rewards``). ``now``: the event
    time up to which events have been collected. Events of other answers are a ValueError."""
    given = list(events)
    for event in given:
        if event.response_id != exchange.response_id:
            raise ValueError(
                f"event {event.event_id} is of {event.response_id}, not of {exchange.response_id}"
            )
    return _outcome(exchange, _by_user(exchange, given, table), len(given), now, table, {})


def rewards(exchanges: Sequence[Exchange], events: Iterable[Event], now: float, table: Table) -> Account:
    """Of all answers of a window. One user moves the sum of all values within ``cap_window_s`` (by the time
    of the answers, in fixed windows) by at most ``cap``: what they say is scaled down together. Values of
    a cap window that is still open may shrink."""
    by_answer: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_answer[event.response_id].append(event)
    by_user = {
        exchange.response_id: _by_user(exchange, by_answer[exchange.response_id], table)
        for exchange in exchanges
    }
    spent: dict[tuple[str, int], float] = defaultdict(float)
    for one in exchanges:
        if now >= _closes(one, table):
            for user, amount in _amounts(one, by_user[one.response_id], table).items():
                spent[user, int(one.ts // table.cap_window_s)] += abs(amount)
    scales = {key: table.cap / much for key, much in spent.items() if much > table.cap}
    outcomes = {
        exchange.response_id: _outcome(
            exchange, by_user[exchange.response_id], len(by_answer[exchange.response_id]), now, table, scales
        )
        for exchange in exchanges
    }
    return Account(
        outcomes=outcomes,
        orphans=sum(len(group) for name, group in by_answer.items() if name not in by_user),
        capped=len(scales),
    )


def _by_user(exchange: Exchange, events: Iterable[Event], table: Table) -> dict[str, dict[Kind, Event]]:
    """user -> kind -> the last such event within its horizon; more of a kind add nothing."""
    by_user: dict[str, dict[Kind, Event]] = defaultdict(dict)
    # By contents too: events of one id and one time, from a client that counts badly, have one order.
    for event in sorted(
        events, key=lambda each: (each.ts, each.event_id, each.value or 0.0, each.after or "")
    ):
        behind = event.ts - exchange.ts
        if event.consent and -table.lateness_s <= behind <= table.event[event.kind].horizon_s:
            by_user[event.user or exchange.user][event.kind] = event
    return by_user


def _closes(exchange: Exchange, table: Table) -> float:
    return exchange.ts + table.horizon_s + table.lateness_s


def _terms(exchange: Exchange, one: Mapping[Kind, Event], table: Table) -> dict[Kind, float]:
    """What one user says about the answer; nothing where they abstain."""
    if any(table.event[kind].abstain for kind in one):
        return {}
    credit = table.action[exchange.action].credit
    terms = {kind: amount for kind, event in one.items() if (amount := _amount(exchange, event, table))}
    return {kind: amount for kind, amount in terms.items() if credit or amount < 0}


def _amount(exchange: Exchange, event: Event, table: Table) -> float:
    worth = table.event[event.kind]
    if not worth.weight:
        return 0.0
    match event.kind:
        case Kind.RATING:
            much = event.value or 0.0
        case Kind.DWELL:  # as a share of the horizon
            much = min(max(event.value or 0.0, 0.0) / worth.horizon_s, 1.0)
        case Kind.EDIT:  # the share that was kept
            much = similarity(exchange.output, event.after or "") - worth.zero_at
        case _:
            much = 1.0
    return worth.weight * much


def _amounts(
    exchange: Exchange, by_user: Mapping[str, Mapping[Kind, Event]], table: Table
) -> dict[str, float]:
    """user -> what they add, within floor and ceiling."""
    sums = {user: math.fsum(_terms(exchange, one, table).values()) for user, one in by_user.items()}
    return {user: min(max(much, table.floor), table.ceiling) for user, much in sums.items()}


def _outcome(
    exchange: Exchange,
    by_user: Mapping[str, Mapping[Kind, Event]],
    given: int,
    now: float,
    table: Table,
    scales: Mapping[tuple[str, int], float],
) -> Outcome:
    closes, ignored = _closes(exchange, table), given - sum(map(len, by_user.values()))
    if now < closes:
        return Outcome(value=None, standing=Standing.UNDECIDED, closes=closes, ignored=ignored)
    base, window = table.action[exchange.action].weight, int(exchange.ts // table.cap_window_s)
    terms = {f"action:{exchange.action}": base}
    spoken = [_terms(exchange, one, table) for one in by_user.values()]
    for kind, much in chain.from_iterable(one.items() for one in spoken):
        terms[kind.value] = terms.get(kind.value, 0.0) + much
    abstains = any(table.event[kind].abstain for one in by_user.values() for kind in one)
    if abstains and exchange.action is Action.ANSWER and not any(spoken):
        return Outcome(value=None, standing=Standing.ABSTAINED, terms=terms, closes=closes, ignored=ignored)
    amounts = _amounts(exchange, by_user, table)
    users = math.fsum(much * scales.get((user, window), 1.0) for user, much in amounts.items())
    value = base + min(max(users, table.floor), table.ceiling)
    return Outcome(value=value, standing=Standing.DECIDED, terms=terms, closes=closes, ignored=ignored)
