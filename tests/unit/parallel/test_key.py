"""Who may tell a rank what to do: whoever has the key of the run, and nobody by an old message."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.control import Terms, arrive, opened, sealed
from ostinato.parallel.key import VARIABLE, fits, new_key, signed, users_key
from ostinato.parallel.launch import Place, local_place
from ostinato.parallel.local_store import keep_store
from ostinato.workers.lost import WorkerLost

TERMS = Terms(backend="gloo", timeout_s=60.0, silence_s=30.0, told="the recipe")
KEY = "0123456789abcdef"


def test_a_rank_believes_what_is_signed_and_nothing_else() -> None:
    """Any process that reached the port of the ranks could write a call into the store, and its arguments
    were unpickled: code of its choice ran on every host."""
    place = local_place(2, 4711, 1, KEY)
    raw = sealed({"name": "step"}, KEY, "call 3").encode()
    assert opened(raw, KEY, "call 3", place) == {"name": "step"}
    others = [b"{}", b"[1]", b"null", b"{", b"\xff", sealed({"name": "step"}, "another", "call 3").encode()]
    for wrong, what in [(raw, "call 4"), (raw, "terms"), *((one, "call 3") for one in others)]:
        with pytest.raises(WorkerLost, match="OSTINATO_RUN_KEY to the same value on all hosts, or"):
            opened(wrong, KEY, what, place)
    assert not fits(None, KEY, "x") and not fits("\u00e9", KEY, "x")
    assert signed(KEY, "ab", "c") != signed(KEY, "a", "bc")


def met(places: list[Place], store: HashStore) -> list[Any]:
    """What each of two ranks comes back with."""
    found: list[Any] = [None, None]

    def come(rank: int) -> None:
        try:
            found[rank] = arrive(places[rank], store, None if rank else TERMS)
        except WorkerLost as lost:
            found[rank] = lost

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_meet_by_one_key() -> None:
    places = [local_place(2, 4711, rank, KEY) for rank in range(2)]
    (mine, _), (theirs, terms) = met(places, HashStore())
    assert mine == theirs and terms == TERMS and mine[0].nonce != mine[1].nonce
    lost = met([places[0], replace(places[1], key=new_key())], HashStore())[1]
    assert isinstance(lost, WorkerLost) and "rank 1 read at 127.0.0.1:4711 is not signed" in str(lost)


def test_the_terms_of_an_earlier_meeting_are_not_taken() -> None:
    """A key of a user outlives a run: who had listened then could tell ranks the recipe of that time."""
    places = [local_place(2, 4711, rank, KEY) for rank in range(2)]
    before, store = HashStore(), HashStore()
    met(places, before)
    for name in ("terms", "member/0", "member/1"):
        store.set(name, before.get(name).decode())
    with pytest.raises(WorkerLost, match="is not signed"):
        arrive(places[1], store, None)


def test_the_key_of_a_user_is_the_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "run.key"
    keys: set[str] = set()
    threads = [threading.Thread(target=lambda: keys.add(users_key({}, file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 1 and len(next(iter(keys))) == 64
    assert file.stat().st_mode & 0o777 == 0o600 and [*file.parent.iterdir()] == [file]
    assert users_key({VARIABLE: KEY}, file) == KEY
    with pytest.raises(ValueError, match="OSTINATO_RUN_KEY has 5 characters"):
        users_key({VARIABLE: "short"}, file)
    file.chmod(0o644)
    with pytest.raises(ValueError, match="no key that this user alone can read; remove it"):
        users_key({}, file)
    (tmp_path / "no").write_text("")
    with pytest.raises(ValueError, match="set OSTINATO_RUN_KEY on all hosts"):
        users_key({}, tmp_path / "no" / "run.key")


def test_a_local_store_listens_on_the_loopback_alone() -> None:
    """torch's own listens on every interface, also where it is given 127.0.0.1."""
    store = keep_store()
    mine = [one for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in mine if one.laddr.port == store.port} == {"127.0.0.1"}
    assert local_place(2, 1).is_local
    assert KEY not in repr(local_place(2, 1, key=KEY))


def test_children_have_the_key_by_their_environment() -> None:
    place = local_place(3, 4711, 2, KEY)
    assert place.environment()[VARIABLE] == KEY and Place.of(place.environment()) == place
