"""What stays in memory: the laws of ``Residency``, and a slow twin that looks at everything at every turn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.residency import Full, Residency

CAPACITY, SHARE = 12, 8
TURNS = st.lists(
    st.tuples(st.sampled_from(["use", "end", "drop"]), st.sampled_from("abc"), st.integers(0, 5)), max_size=60
)


@dataclass
class Thing:
    owner: str
    size: int
    used: int
    pins: int = 0


class Plain:
    """The twin: a list of things, from which one is taken after the other until the rest fits."""

    def __init__(self) -> None:
        self.things: dict[tuple[str, int], Thing] = {}
        self.clock = 0

    def admit(self, key: tuple[str, int], size: int, owner: str) -> list[tuple[str, int]]:
        rest = {**self.things, key: Thing(owner, size, 10**9, pins=1)}
        gone = []

        def total(name: str | None = None) -> int:
            return sum(thing.size for thing in rest.values() if name in (None, thing.owner))

        while total(owner) > SHARE or total() > CAPACITY:
            owners = {thing.owner for thing in rest.values()}
            names = (
                [owner] if total(owner) > SHARE else [n for n in owners if total(n) > CAPACITY / len(owners)]
            )
            free = [k for k, thing in rest.items() if thing.owner in names and not thing.pins]
            if not free:
                raise Full
            most = max(total(rest[k].owner) for k in free)
            victims = [k for k in free if total(rest[k].owner) == most]
            gone.append(min(victims, key=lambda k: (list_owners(rest).index(rest[k].owner), rest[k].used)))
            del rest[gone[-1]]
        self.things = {**rest, key: Thing(owner, size, self.clock)}
        return gone


def list_owners(things: dict[tuple[str, int], Thing]) -> list[str]:
    """Of owners that have as much, the one that came first loses."""
    return list(dict.fromkeys(thing.owner for thing in things.values()))


@settings(max_examples=300, deadline=None)
@given(TURNS)
def test_it_evicts_what_its_twin_evicts_and_keeps_its_laws(turns: list[tuple[str, str, int]]) -> None:
    ours, twin = Residency[tuple[str, int]](CAPACITY, SHARE), Plain()
    for turn, owner, number in turns:
        key, size = (owner, number), number % 4 + 1
        twin.clock += 1
        if turn == "use":
            if key not in ours:
                before = {name: _size(twin, name) for name in "abc"}
                try:
                    gone = ours.admit(key, size, owner)
                except Full:
                    with pytest.raises(Full):
                        twin.admit(key, size, owner)
                    continue
                want = twin.admit(key, size, owner)
                assert sorted(gone) == sorted(want)
                num_owners = len({k[0] for k in gone} | {thing.owner for thing in twin.things.values()})
                for name, _ in gone:
                    assert name == owner or before[name] > CAPACITY / num_owners
            ours.pin(key)
            twin.things[key].pins += 1
            twin.things[key].used = twin.clock
        elif key in ours and turn == "end" and twin.things[key].pins:
            ours.unpin(key)
            twin.things[key].pins -= 1
        elif key in ours and turn == "drop" and not twin.things[key].pins:
            ours.drop(key)
            del twin.things[key]
        assert len(ours) == len(twin.things) and all(k in ours for k in twin.things)
        assert ours.size == sum(thing.size for thing in twin.things.values()) <= CAPACITY
        assert all(_size(twin, name) <= SHARE for name in "abc")


def _size(twin: Plain, owner: str) -> int:
    return sum(thing.size for thing in twin.things.values() if thing.owner == owner)


def test_an_owner_that_uses_many_takes_from_itself() -> None:
    ours = Residency[str](10)
    for number in range(5):
        ours.admit(f"quiet-{number}", 1, "quiet")
    gone = [key for number in range(100) for key in ours.admit(f"loud-{number}", 1, "loud")]
    assert len(gone) == 95 and all(key.startswith("loud") for key in gone)


def test_what_is_pinned_stays_and_the_newcomer_is_refused() -> None:
    ours = Residency[str](2)
    for key in "ab":
        ours.admit(key, 1)
        ours.pin(key)
    with pytest.raises(Full):
        ours.admit("c", 1)
    ours.unpin("b")
    assert ours.admit("c", 1) == ["b"] and "a" in ours
