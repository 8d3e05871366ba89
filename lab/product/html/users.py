"""Users who are shown components: they accept what is as asked, and mend or reject the rest or ask again.

    react(users, exchange, spec, faults) -> events        faults: by name, as the browser sees them

Each draw is addressed by (seed, response), so the order of calls changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab.product.html.components import CROWD, Spec, careful, write
from ostinato.product.events import Event, Exchange, Kind

EPOCH = 1_760_000_000.0  # seconds since 1970
HASTY = {count: share for count, share in CROWD.items() if count}  # annotators who make faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    seed: int = 0
    notices: float = 0.9  # the chance that a fault is seen
    accepts: float = 0.7  # where none is seen; silence otherwise
    edits: float = 0.5  # where one is seen
    regenerates: float = 0.3  # the rest rejects
    slips: float = 0.1  # share of edits that a hasty user makes
    adds: float = 0.05  # share of edits that only write something behind


def react(
    users: Users, exchange: Exchange, spec: Spec, faults: Sequence[str], replaces: str = ""
) -> list[Event]:
    """What the user of ``exchange`` does with it, in order of time."""
    rng = random.Random(f"{users.seed}/{exchange.response_id}")
    at = exchange.ts + 2 + rng.expovariate(0.2)
    found = [_event(exchange, Kind.SHOWN, exchange.ts, replaces=replaces)]
    if not any(rng.random() < users.notices for _ in faults):
        return [*found, _event(exchange, Kind.ACCEPT, at)] if rng.random() < users.accepts else found
    kinds = (Kind.EDIT, Kind.REGENERATE, Kind.REJECT)
    shares = (users.edits, users.regenerates, 1 - users.edits - users.regenerates)
    kind = rng.choices(kinds, shares)[0]
    after = _edited(users, exchange, spec, rng) if kind is Kind.EDIT else None
    return [*found, _event(exchange, kind, at, after=after)]


def _edited(users: Users, exchange: Exchange, spec: Spec, rng: random.Random) -> str:
    drawn = rng.random()
    if drawn < users.adds:
        return f"{exchange.output}<!-- done -->"
    return write(spec, rng, HASTY) if drawn < users.adds + users.slips else careful(spec).html()


def _event(
    exchange: Exchange, kind: Kind, ts: float, *, after: str | None = None, replaces: str = ""
) -> Event:
    return Event(
        event_id=f"{exchange.response_id}-{kind}",
        response_id=exchange.response_id,
        kind=kind,
        ts=round(ts, 3),
        user=exchange.user,
        after=after,
        replaces=replaces,
    )


__all__ = ["EPOCH", "Users", "react"]
