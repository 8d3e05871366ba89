"""How the ranks of one trainer meet, and how rank 0 calls the others.

    rank 0     call("step", batch) -> store: call/7 = {name, sizes};  group: the bytes, broadcast
    others     awaited() waits on the store, while rank 0 gives signs of life (``watch``), then takes part

Between two calls no rank is in a collective, so that hours between two steps run into no timeout; within a
call every collective has one. Terms, calls and the pickle of their arguments are signed with the key of the
run (``key``), and nothing is unpickled before the signature was checked: torch's store has no other guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.key import VARIABLE, fits, of_meeting, signed, users_key
from ostinato.parallel.launch import LOOPBACK, Place
from ostinato.parallel.watch import Member, last_line, rank_lost
from ostinato.workers.remote import head, packed, room, unpacked

MEET_S = 1800.0  # for rank 0 to be there, and for all to have loaded their part: a large model, cold
DAY_S = 86400.0
LOOK_S = 0.05
PIECE = 1 << 28  # bytes of one broadcast
STOP = "stop"  # the last call
ALL_BUILT = "built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Settings that rank 0 sends to all ranks at first. ``recipe``: as TOML."""

    backend: str  # of torch.distributed
    timeout_s: float  # of a collective, and of a call that does not get on
    silence_s: float  # without a sign of life
    recipe: str


def meet(place: Place, within_s: float = MEET_S) -> TCPStore:
    """The store at which all ranks meet: kept by rank 0, or by torchrun's agent.

    Raises WorkerLost when no process keeps it within ``within_s``.
    """
    keeps = place.rank == 0 and not place.agent
    bound = timedelta(seconds=within_s)
    try:
        if keeps and place.is_local:
            return keep_store(place.port, bound)
        return TCPStore(place.address, place.port, is_master=keeps, timeout=bound, wait_for_workers=False)
    except (dist.DistError, RuntimeError, OSError) as error:
        raise rank_lost(
            f"rank {place.rank} did not reach rank 0 at {place.address}:{place.port} within {within_s:g} s: "
            f"{last_line(error)}"
        ) from error


class Control:
    """One rank among the others. Making it initialises torch.distributed, on all ranks at once."""

    def __init__(self, place: Place, store: Store, members: Sequence[Member], terms: Terms) -> None:
        self.place, self.members, self.terms = place, members, terms
        self.progress = 0  # pieces of arguments that have come or gone
        self._store, self._calls = store, 0
        self._key = _meeting_key(place, members)
        bound = timedelta(seconds=terms.timeout_s)
        group = PrefixStore("group", store)
        dist.init_process_group(
            terms.backend, store=group, rank=place.rank, world_size=place.world, timeout=bound
        )
        self._group: Any = dist.new_group(backend="gloo", timeout=bound)

    # ---- rank 0

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks call ``name`` of what they serve; the caller does the same now."""
        payload, sizes = packed(arguments)
        self._announce(name, sizes, head(payload, sizes))
        self._broadcast(payload)

    def stop(self) -> None:
        self._announce(STOP, [], b"")

    def farewell(self, within_s: float) -> None:
        """Keep the store until all ranks have read the end, or for ``within_s``."""
        keys = [f"bye/{rank}" for rank in range(1, self.place.world)]
        with contextlib.suppress(dist.DistError):
            self._store.wait(keys, timedelta(seconds=within_s))

    def _announce(self, name: str, sizes: Sequence[int], head: bytes) -> None:
        call = {"name": name, "sizes": sizes, "head": sha256(head).hexdigest()}
        self._store.set(f"call/{self._calls}", sealed(call, self._key, f"call {self._calls}"))
        self._calls += 1

    # ---- the others

    def awaited(self) -> tuple[str, tuple[Any, ...]] | None:
        """The next call and its arguments; None when it was the last. Waits without an end of its own: the
        watch ends the process where rank 0 is lost.

        Raises WorkerLost where it is not signed with the key of the run.
        """
        key = f"call/{self._calls}"
        while not _there(self._store, [key], DAY_S):
            pass
        call = opened(self._store.get(key), self._key, f"call {self._calls}", self.place)
        self._calls += 1
        if call["name"] == STOP:
            return None
        payload, sizes = self._broadcast(room(call["sizes"])), call["sizes"]
        if sha256(head(payload, sizes)).hexdigest() != call["head"]:
            raise rank_lost(_forged(self.place))
        return call["name"], unpacked(payload, sizes)

    def bye(self) -> None:
        """No more queries of the store."""
        self._store.set(f"bye/{self.place.rank}", "")

    # ---- both

    def built(self, gone: Callable[[], str] = str, within_s: float = MEET_S) -> None:
        """Wait until all ranks have loaded their part: groups are made together, and within ``timeout_s``.
        ``gone`` ends the wait of rank 0 by a sentence; the watch ends the other ranks.

        Raises WorkerLost naming the ranks that have not loaded theirs after ``within_s``.
        """
        self._store.set(f"built/{self.place.rank}", "")
        if self.place.rank == 0:
            keys = [f"built/{rank}" for rank in range(self.place.world)]
            late = "did not load their part of the model within"
            _await_all(self._store, keys, within_s, gone, late, "is model.path on a slow disk?")
            self._store.set(ALL_BUILT, "")
            return
        within_s += self.terms.timeout_s  # rank 0, which names who is late, may have come here later
        if not _there(self._store, [ALL_BUILT], within_s):
            raise rank_lost(f"rank 0 did not say within {within_s:g} s that all ranks have loaded their part")

    def _broadcast(self, payload: np.ndarray) -> np.ndarray:
        """In place, [bytes] uint8."""
        for start in range(0, len(payload), PIECE):
            dist.broadcast(torch.from_numpy(payload[start : start + PIECE]), 0, group=self._group)
            self.progress += 1
        return payload


def own_store(place: Place, store: TCPStore, within_s: float) -> Store:
    """A further connection to ``store``, under the keys of this attempt."""
    bound = timedelta(seconds=within_s)
    other = TCPStore(store.host, store.port, is_master=False, timeout=bound, wait_for_workers=False)
    return keyed(place, other)


def keyed(place: Place, store: Store) -> Store:
    return PrefixStore(f"ostinato/{place.attempt}", store)


def arrive(
    place: Place, store: Store, terms: Terms | None, ended: Callable[[], Mapping[int, str]] = dict
) -> tuple[list[Member], Terms]:
    """Wait until all ranks are there: (members, terms). Rank 0 has ``terms`` and sends them; ``ended`` says
    which ranks have ended before they arrived, and how.

    Raises WorkerLost naming the ranks that did not come in time.
    """
    me = Member(rank=place.rank, host=platform.node(), pid=os.getpid(), nonce=secrets.token_hex(16))
    store.set(f"member/{place.rank}", json.dumps(asdict(me)))
    keys = [f"member/{rank}" for rank in range(place.world)]
    if terms is not None:

        def gone() -> str:
            endings = [f"rank {rank} {how}" for rank, how in ended().items()]
            return f"{'; '.join(endings)}, before it had met rank 0" if endings else ""

        late = f"did not come to {place.address}:{place.port} within"
        fix = "start as many ranks as the layout has, with one address for all"
        _await_all(store, keys, terms.timeout_s, gone, late, fix)
    raw = b"" if terms is not None else _await_terms(place, store)
    members = [Member(**json.loads(store.get(key))) for key in keys]
    members[place.rank] = me  # whatever the store has
    session = _meeting_key(place, members)
    if terms is not None:
        store.set("terms", sealed(asdict(terms), session, "terms"))
        return members, terms
    return members, Terms(**opened(raw, session, "terms", place))


def _meeting_key(place: Place, members: Sequence[Member]) -> str:
    return of_meeting(place.key or users_key(), [json.dumps(asdict(member)) for member in members])


def sealed(value: Mapping[str, Any], key: str, what: str) -> str:
    """JSON for the store, signed as ``what`` it is."""
    text = json.dumps(value)
    return json.dumps({"text": text, "tag": signed(key, what, text)})


def opened(raw: bytes, key: str, what: str, place: Place) -> dict[str, Any]:
    """What was ``sealed``. Raises WorkerLost where the signature is another one, of ``place``'s store."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(raw)
        if fits(found["tag"], key, what, found["text"]):
            return json.loads(found["text"])
    raise rank_lost(_forged(place))


def _forged(place: Place) -> str:
    return (
        f"what rank {place.rank} read at {place.address}:{place.port} is not signed with its key: "
        f"set {VARIABLE} to the same value on all hosts, or another program writes there"
    )


def _await_terms(place: Place, store: Store) -> bytes:
    """The terms, once rank 0 has them."""
    try:
        if _there(store, ["terms"], MEET_S):
            return store.get("terms")
        why = f"within {MEET_S:g} s"
    except dist.DistError as error:
        why = last_line(error)
    raise rank_lost(
        f"rank 0 at {place.address}:{place.port} did not begin, as rank {place.rank} saw it: {why}"
    )


def _await_all(
    store: Store, keys: Sequence[str], within_s: float, gone: Callable[[], str], late: str, fix: str
) -> None:
    """Until every rank has set its key. Raises WorkerLost by the sentence of ``gone``, as soon as it has one,
    and, after ``within_s``, naming those who are ``late``."""
    started = time.monotonic()
    while not store.check(list(keys)):
        time.sleep(LOOK_S)  # a wait with a bound would be a warning of torch each time
        if why := gone():
            raise rank_lost(why)
        if time.monotonic() - started <= within_s:
            continue
        if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise rank_lost(f"{who} of {len(keys)} {late} {within_s:g} s; {fix}")


def _there(store: Store, keys: list[str], within_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=within_s))
    except dist.DistStoreError:  # in vain
        return False
    return True


def keep_store(port: int = 0, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """One kept by this process, on ``port`` of 127.0.0.1 (0: a free one). By itself torch listens on every
    interface, whatever address it is given. Raises OSError."""
    listening = socket.create_server((LOOPBACK, port))
    return TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
