"""Which prompts crash the workers of a pool, as opposed to workers that are lost for other reasons.

    lost with others, TRIES times -> suspect, in a cell -> lost -> half a cell each -> ... -> alone -> out

A cell is a set of suspects that run together, with no other prompt; so the one of n that crashes workers is
found after about log2(n) losses, and the others still run many at a time. Workers that are lost at the same
time without a prompt in common have another cause: that counts against no prompt, the first EXCUSED times.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Key = tuple[str, tuple[int, ...]]  # of a prompt in its round: uid, and the seed that its samples share

TRIES = 2  # losses with others, before a prompt runs in a cell
EXCUSED = 2  # losses with another explanation that are not held against a prompt


@dataclass(slots=True, kw_only=True, eq=False)
class _Loss:
    place: int
    at: float
    keys: set[Key]  # the prompts it had that are still in flight
    shared: bool = False  # other workers were lost at that time, with none of these


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    due: float
    strikes: int
    cause: str


def name(key: Key) -> str:
    """The name of a prompt in failure messages."""
    return key[0] or f"with seed {list(key[1])}"


class Suspects:
    """``window_s``: seconds within which losses count as simultaneous; a verdict waits that long."""

    def __init__(self, window_s: float) -> None:
        self.quarantined: dict[Key, str] = {}  # what it did, in one sentence
        self.cells: dict[Key, int] = {}  # of suspects
        self.accused: dict[Key, _Charge] = {}  # waiting for a verdict
        self._window_s = window_s
        self._losses: list[_Loss] = []
        self._ids = itertools.count()

    def blame(self, place: int, at: float, keys: Sequence[Key], cause: str) -> bool:
        """Record that a worker was lost while it had these prompts (none: they were not the cause). True if
        they were all suspects already, so that they are taken to be the cause."""
        before = {key: self._strikes(key) for key in keys}
        explained = bool(keys) and set(keys) <= self.cells.keys() | self.quarantined.keys()
        loss = _Loss(place=place, at=at, keys=set(keys))
        self._losses = [one for one in self._losses if one.keys or at - one.at <= self._window_s]
        for one in self._losses:
            if one.place != place and at - one.at <= self._window_s and not one.keys & loss.keys:
                one.shared = loss.shared = True
        self._losses.append(loss)
        self.cells = {key: cell for key, cell in self.cells.items() if self._strikes(key) >= TRIES}
        struck = [key for key in keys if self._strikes(key) >= max(TRIES, before[key] + 1)]
        if explained and len(keys) == 1 and struck and keys[0] not in self.quarantined:
            charge = _Charge(due=at + self._window_s, strikes=self._strikes(keys[0]), cause=cause)
            self.accused[keys[0]] = charge
        middle = (len(struck) + 1) // 2
        for half in (struck[:middle], struck[middle:]):
            self.cells |= dict.fromkeys(half, next(self._ids))
        return explained

    def judge(self, now: float) -> list[Key]:
        """The prompts quarantined now, as all losses within ``window_s`` of their last one are known."""
        due = {key: charge for key, charge in self.accused.items() if charge.due <= now}
        found = [key for key, charge in due.items() if self._strikes(key) >= charge.strikes]
        for key in due:
            del self.accused[key]
        for key in found:
            self.quarantined[key] = (
                f"prompt {name(key)} is quarantined: {due[key].strikes} samplers were lost with it, the last "
                f"one with it alone ({due[key].cause})"
            )
        return found

    def excess(self, most: int, workers: str) -> str:
        """One sentence if more than ``most`` prompts are quarantined; otherwise empty."""
        found = [*self.quarantined.values()]
        if len(found) <= most:
            return ""
        budget = f"cluster.max_quarantined is {most}"
        return f"{len(found)} prompts broke {workers} ({budget}); the latest: {found[-1]}"

    def forget(self, key: Key) -> None:
        """The prompt is no longer in flight: no loss counts against it any more."""
        for loss in self._losses:
            loss.keys.discard(key)
        self.cells.pop(key, None)
        self.accused.pop(key, None)

    def _strikes(self, key: Key) -> int:
        shared = [loss.shared for loss in self._losses if key in loss.keys]
        return len(shared) - min(sum(shared), EXCUSED)


def isolated(
    waiting: Sequence[int], cells: Mapping[Key, int], held: Mapping[int, Collection[Key]]
) -> tuple[dict[int, int], frozenset[int]]:
    """(worker of each cell that may begin now, workers reserved for cells).

    waiting: cells with waiting calls, the oldest first; cells: the cell of each suspect; held: the prompts
    that each living worker has. A cell continues on the worker where it is alone, and begins on an idle one.
    If all are busy, the least busy worker takes nothing until it is empty.
    """
    found = {worker: {cells.get(key) for key in keys} for worker, keys in held.items()}
    alone = {worker: cell for worker, [*few] in found.items() for cell in few[:1] if len(few) == 1}
    by_cells = {worker: cell for worker, cell in alone.items() if cell is not None}
    places = {cell: worker for worker, cell in by_cells.items() if cell in waiting}
    idle = [worker for worker, keys in held.items() if not keys]
    for cell in waiting:
        if cell not in places and idle:
            places[cell] = idle.pop(0)
    closed = {*by_cells, *places.values()}
    if len(places) < len(waiting) and not closed:
        closed.add(min(held, key=lambda worker: len(held[worker])))
    return places, frozenset(closed)
