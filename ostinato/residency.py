"""Which things stay in memory: least recently used first out, within a size, fairly among their owners.

``Residency`` keeps keys and sizes only; its caller loads what it admits and frees what it evicts. Its laws:

- what is pinned is never evicted;
- all sizes together are at most ``capacity``, those of an owner at most ``share``;
- an owner that has at most ``capacity`` / n, of n owners, loses nothing by what others do.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


class Full(Exception):
    """Nothing may be evicted for this key now: what could be is pinned."""


@dataclass(slots=True)
class _Entry:
    size: int
    pins: int = 0


class Residency(Generic[K]):
    """The keys that are in memory. Sizes are in any one unit. ``share``: the most that one owner has of
    ``capacity``; 0: all of it."""

    def __init__(self, capacity: int, share: int = 0) -> None:
        self._capacity, self.share = capacity, share or capacity
        self._owners: dict[str, OrderedDict[K, _Entry]] = {}  # the least recently used key first
        self._owner_of: dict[K, str] = {}
        self._sizes: dict[str, int] = {}  # by owner

    def __contains__(self, key: K) -> bool:
        return key in self._owner_of

    def __len__(self) -> int:
        return len(self._owner_of)

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def admit(self, key: K, size: int, owner: str = "") -> list[K]:
        """Add ``key``, which is not there, as the most recently used one, and return the keys that are
        evicted for it. Raises Full, changing nothing, where that takes a pinned key or exceeds ``share``."""
        assert key not in self, f"{key} is there"
        sizes = {**self._sizes, owner: self._sizes.get(owner, 0) + size}
        unpinned = {name: self._list_unpinned(name) for name in sizes}
        evicted: list[K] = []

        def evict(name: str) -> None:
            if not unpinned[name]:
                raise Full(f"{size} more do not fit into {self._capacity}, {self.share} of one owner")
            key = unpinned[name].pop()
            sizes[name] -= self._owners[name][key].size
            evicted.append(key)

        while sizes[owner] > self.share:
            evict(owner)
        while sum(sizes.values()) > self._capacity:
            num_owners = sum(size > 0 for size in sizes.values())
            above = [name for name, size in sizes.items() if size * num_owners > self._capacity]
            evict(max(above, key=lambda name: (bool(unpinned[name]), sizes[name])))
        for gone in evicted:
            self.drop(gone)
        self._owners.setdefault(owner, OrderedDict())[key] = _Entry(size)
        self._owner_of[key], self._sizes[owner] = owner, self._sizes.get(owner, 0) + size
        return evicted

    def pin(self, key: K) -> None:
        """Use a key that is there: it is the most recently used one now, and stays until as many calls of
        ``unpin`` as of ``pin``."""
        entries = self._owners[self._owner_of[key]]
        entries[key].pins += 1
        entries.move_to_end(key)

    def unpin(self, key: K) -> None:
        entry = self._owners[self._owner_of[key]][key]
        assert entry.pins > 0, f"{key} is not pinned"
        entry.pins -= 1

    def is_pinned(self, key: K) -> bool:
        return self._owners[self._owner_of[key]][key].pins > 0

    def drop(self, key: K) -> None:
        """Remove a key that is there and not pinned."""
        assert not self.is_pinned(key), f"{key} is pinned"
        owner = self._owner_of.pop(key)
        self._sizes[owner] -= self._owners[owner].pop(key).size
        if not self._owners[owner]:
            del self._owners[owner], self._sizes[owner]

    def _list_unpinned(self, owner: str) -> list[K]:
        """The keys of ``owner`` that may go, the least recently used one last."""
        return [key for key, entry in reversed(self._owners.get(owner, {}).items()) if not entry.pins]
