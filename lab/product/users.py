"""Users with a taste that drifts: what an answer is worth to them, and what they do with it.

    gold(...)                 mean latent utility over the population: what neither judge nor policy sees
    feel(...)                 what one user feels at once: their own taste, and the charm of what is rare
    react(...), choose(...)   events, with noise and delays, as a product reports them

All state is one array, ``habits``: how often each user has lately met each charming feature. Every draw is
addressed by (seed, response, what is drawn), so the order of calls changes nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lab.product.answers import CAREFUL, Features, Manner, expression_of, features, write
from ostinato.product.events import Action, Event, Exchange, Exposure, Kind

EPOCH = 1_760_000_000.0  # the first day of the world, seconds since 1970
DAY = 86_400.0
SILENT = (Action.QUESTION, Action.INVALID, Action.EMPTY)  # nothing to accept, nothing to edit

# Of what the policy did, before its features.
BASE: Mapping[Action, float] = {
    Action.ANSWER: -0.2,
    Action.QUESTION: -0.5,
    Action.REFUSAL: -0.6,
    Action.INVALID: -0.8,
    Action.EMPTY: -0.8,
}


@dataclass(frozen=True, slots=True)
class Taste:
    """Of a feature: its weight on the first day and after the drift, and its charm while it is rare."""

    first: float
    last: float
    charm: float = 0.0


TASTES: Mapping[str, Taste] = {
    "correct": Taste(1.2, 1.2),
    "working": Taste(0.4, 0.1),
    "explained": Taste(0.4, -0.4),
    "length": Taste(-0.1, -0.3),
    "flattery": Taste(-0.8, -0.8, 1.8),
    "rubric": Taste(-0.8, -0.8, 1.8),
    "format": Taste(-0.8, -0.8, 1.8),
    "verbose": Taste(-0.8, -0.8, 1.8),
}
FIRST, LAST, CHARM = (
    np.array([getattr(one, name) for one in TASTES.values()]) for name in ("first", "last", "charm")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is drawn and how. ``seed``: of the users and of all they do."""

    seed: int = 0
    users: int = 64
    spread: float = 0.15  # standard deviation over users of every weight
    noise: float = 0.3  # standard deviation of what a user feels about one answer
    bar: float = 1.0  # what a user has to feel to accept an answer
    notices: float = 0.85  # the chance that a wrong number is seen at once; it is believed otherwise
    speaks: float = 0.7  # the chance that an answer gets a visible reaction
    drift_days: float = 28.0
    tolerance: float = 0.3  # the share of a user's recent answers at which a charm is gone
    memory: float = 0.15  # weight of the newest answer in that share
    first_place: float = 0.3  # added to the answer that stands first of two
    bias: float = 1.0  # of the exposure, towards the longer of two answers
    consents: float = 0.95  # share of users


# ---------------------------------------------------------------------------------------------
# What an answer is worth
# ---------------------------------------------------------------------------------------------


def gold(world: World, found: Features, ts: float) -> float:
    """Mean latent utility over the population at ``ts``: no noise, no charm, no state."""
    return BASE[found.action] + float(_weights(world, ts) @ _vector(found))


def utility(world: World, found: Features, user: int, ts: float) -> float:
    """Latent utility of one user; the mean over users is ``gold``."""
    own = _weights(world, ts) + _deviations(world.seed, world.users, world.spread)[user]
    return BASE[found.action] + float(own @ _vector(found))


def feel(world: World, found: Features, user: int, ts: float, habits: np.ndarray) -> float:
    """What a user feels at once, without noise: the charm of a feature fades with its share of what they
    have lately seen, to nothing at ``tolerance``."""
    fresh = np.maximum(0.0, 1.0 - habits[user] / world.tolerance)
    return utility(world, found, user, ts) + float((CHARM * fresh) @ _vector(found))


def no_habits(world: World) -> np.ndarray:
    """[users, features]: nobody has seen anything yet."""
    return np.zeros((world.users, len(TASTES)))


def seen(world: World, habits: np.ndarray, user: int, found: Features) -> np.ndarray:
    """``habits`` after a user met an answer; a new array."""
    after = habits.copy()
    after[user] += world.memory * ((_vector(found) > 0) - after[user])
    return after


def _vector(found: Features) -> np.ndarray:
    return np.array([float(getattr(found, name)) for name in TASTES])


def _weights(world: World, ts: float) -> np.ndarray:
    share = min(max((ts - EPOCH) / (world.drift_days * DAY), 0.0), 1.0)
    return FIRST + share * (LAST - FIRST)


@lru_cache
def _deviations(seed: int, users: int, spread: float) -> np.ndarray:
    """[users, features] around nought: their mean is taken off, so that the mean user has the mean taste."""
    drawn = np.random.default_rng([seed, users]).normal(0.0, spread, (users, len(TASTES)))
    return drawn - drawn.mean(0)


# ---------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------


def user_name(user: int) -> str:
    return f"u{user:04d}"


def propensity(world: World, one: str, other: str) -> float:
    """The chance that ``one`` is preferred by the exposure, in [0.1, 0.9]: the longer one mostly is."""
    pull = world.bias * (len(one) - len(other)) / 20
    return min(max(1 / (1 + math.exp(-min(max(pull, -50.0), 50.0))), 0.1), 0.9)


def show_one(world: World, one: Exchange, other: Exchange) -> tuple[Exchange, Exposure]:
    """Which of two answers to one question is shown, and how probable that was."""
    chance = propensity(world, one.output, other.output)
    first = _rng(world, one, "shown").random() < chance
    return (
        (one, Exposure(arm="one", propensity=chance))
        if first
        else (
            other,
            Exposure(arm="other", propensity=1 - chance),
        )
    )


def choose(
    world: World, one: Exchange, other: Exchange, habits: np.ndarray
) -> tuple[list[Event], np.ndarray]:
    """Both answers side by side to the user of ``one``, who accepts one of them. ``propensity`` is that of
    the order; the first place is worth ``first_place``, which weights of 1 / propensity average out."""
    rng, user = _rng(world, one, "choose"), _user(one)
    chance = propensity(world, one.output, other.output)
    ahead = rng.random() < chance
    order = (one, other) if ahead else (other, one)
    chance = chance if ahead else 1 - chance
    found = [features(_question(each), each.output) for each in order]
    felt = [feel(world, each, user, one.ts, habits) + rng.gauss(0, world.noise) for each in found]
    best = 0 if felt[0] + world.first_place > felt[1] else 1
    events = []
    for rank, each in enumerate(order):
        beside = (order[1 - rank].response_id,)
        exposure = Exposure(rank=rank, alternatives=beside, arm="pair", propensity=chance)
        events.append(_event(world, one, Kind.SHOWN, one.ts, answer=each, exposure=exposure))
        habits = seen(world, habits, user, found[rank])
    dwell = 2 + len(one.output + other.output) / 15
    exposure = events[best].exposure
    events.append(_event(world, one, Kind.ACCEPT, one.ts + dwell, answer=order[best], exposure=exposure))
    return events, habits


# ---------------------------------------------------------------------------------------------
# What users do
# ---------------------------------------------------------------------------------------------


def react(
    world: World,
    exchange: Exchange,
    habits: np.ndarray,
    *,
    exposure: Exposure | None = None,
    replaces: str = "",
) -> tuple[list[Event], np.ndarray]:
    """(events of ``exchange.user`` on this answer in order of time, habits behind it)."""
    rng, user, ts = _rng(world, exchange, "react"), _user(exchange), exchange.ts
    found = features(_question(exchange), exchange.output)
    exposure = exposure or Exposure()
    worth = utility(world, found, user, ts)
    dwell = 1 + len(exchange.output) / 15 + rng.expovariate(0.5)
    events = [
        _event(world, exchange, Kind.SHOWN, ts, exposure=exposure, replaces=replaces),
        _event(world, exchange, Kind.DWELL, ts + dwell, exposure=exposure, value=round(dwell, 2)),
    ]
    felt = feel(world, found, user, ts, habits) - world.bar + rng.gauss(0, world.noise)
    if found.action is Action.ANSWER and not found.correct and rng.random() > world.notices:
        felt += TASTES["correct"].first  # they believe it
    if found.action not in SILENT:
        if rng.random() < world.speaks:
            events += _feedback(world, exchange, found, felt, rng, ts + dwell, exposure)
        if found.action is Action.ANSWER and rng.random() < _sigmoid(4 * (worth - 0.6)):
            events.append(_event(world, exchange, Kind.TASK_DONE, ts + dwell + rng.uniform(60, 3600)))
        elif rng.random() < 0.3:
            events.append(_event(world, exchange, Kind.ABANDON, ts + dwell + rng.uniform(60, 600)))
    if rng.random() < 0.2 + 0.5 * _sigmoid(2 * worth):
        events.append(_event(world, exchange, Kind.RETURN_VISIT, ts + DAY * rng.uniform(0.5, 2)))
    return sorted(events, key=lambda one: one.ts), seen(world, habits, user, found)


def _feedback(
    world: World,
    exchange: Exchange,
    found: Features,
    felt: float,
    rng: random.Random,
    ts: float,
    exposure: Exposure,
) -> list[Event]:
    """The visible reaction, from ``ts`` on, to what felt so much better or worse than the bar."""
    at = ts + rng.uniform(1, 20)
    given = [_event(world, exchange, Kind.RATING, at, value=1.0 if felt > 0 else -1.0)] * (rng.random() < 0.2)
    if felt > 0:
        given.append(_event(world, exchange, Kind.ACCEPT, at, exposure=exposure))
        if rng.random() < 0.3:
            given.append(_event(world, exchange, Kind.COPY, at + 1))
        if not found.correct and rng.random() < 0.5:  # they find out
            given.append(_event(world, exchange, Kind.UNDO, at + rng.uniform(30, 300)))
        return given
    kind = rng.choices((Kind.EDIT, Kind.REJECT, Kind.REGENERATE), (0.5, 0.3, 0.2))[0]
    after = _edited(exchange, rng) if kind is Kind.EDIT and found.action is Action.ANSWER else None
    if kind is Kind.EDIT and after in (None, exchange.output):  # nothing to mend
        kind, after = Kind.REJECT, None
    return [*given, _event(world, exchange, kind, at + 5, exposure=exposure, after=after)]


def _edited(exchange: Exchange, rng: random.Random) -> str:
    """Mostly the answer as it should be; sometimes an addition, sometimes something else altogether."""
    draw = rng.random()
    if draw < 0.05:
        return f"{exchange.output} Thanks!"
    if draw < 0.08:
        return "Write to me about the weather."
    expression = expression_of(_question(exchange))
    manner = Manner.PLAIN if "=" in exchange.output else Manner.BRIEF
    return write(expression, manner, rng, CAREFUL)


def _event(
    world: World,
    exchange: Exchange,
    kind: Kind,
    ts: float,
    *,
    answer: Exchange | None = None,
    exposure: Exposure | None = None,
    **rest: float | str | None,
) -> Event:
    """Of the user of ``exchange``, on ``answer`` where that is another one."""
    response = (answer or exchange).response_id
    consent = random.Random(f"{world.seed}/consent/{exchange.user}").random() < world.consents
    return Event.model_validate(
        {
            "event_id": f"{response}-{kind}",
            "response_id": response,
            "kind": kind,
            "ts": round(ts, 3),
            "user": exchange.user,
            "session": exchange.session,
            "tenant": exchange.tenant,
            "exposure": exposure or Exposure(),
            "consent": consent,
            **rest,
        }
    )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _user(exchange: Exchange) -> int:
    return int(exchange.user.removeprefix("u"))


def _question(exchange: Exchange) -> str:
    return str(exchange.messages[-1]["content"])


def _rng(world: World, exchange: Exchange, what: str) -> random.Random:
    return random.Random(f"{world.seed}/{what}/{exchange.response_id}/{exchange.user}")
