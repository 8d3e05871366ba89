"""The store's contract, on SQLite and (slow) on a real PostgreSQL: once in effect, in any order."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres import Cluster, cluster, found
from product_rows import event, exchange

from ostinato.apps.product.events import Event, Exchange, Kind
from ostinato.apps.product.store import Joined, Outcome, Store, open_store
from ostinato.database import Unavailable

ACCEPTED, REPEATED, CONFLICT, EXPIRED = Outcome
Place = Callable[[], str]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Cluster]:
    pytest.importorskip("psycopg")
    if found() is None:
        pytest.skip("needs PostgreSQL: there is no initdb")
    with cluster() as made:
        yield made


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The address of a new store at each call."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres").address
    return lambda: str(tmp_path_factory.mktemp("store") / "feedback.db")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with open_store(place()) as opened:
        yield opened


def rated(id_: str, response: str = "r", ts: float = 1001.0, **fields: Any) -> Event:
    return event(Kind.RATING, response, ts, event_id=id_, **fields)


def plain(joined: Iterator[Joined]) -> list[tuple[str, list[str]]]:
    return [(each.exchange.response_id, [e.event_id for e in each.events]) for each in joined]


# ---- once in effect


def test_an_event_counts_once(store: Store) -> None:
    first, other = rated("a"), rated("b")
    assert store.append([first, other, first]) == [ACCEPTED, ACCEPTED, REPEATED]
    assert store.append([first]) == [REPEATED]
    assert store.append([]) == []
    assert [*store.events()] == [first, other]


def test_an_id_with_another_content_is_refused_and_the_first_stays(store: Store) -> None:
    assert store.append([rated("a", value=1.0), rated("a", value=-1.0)]) == [ACCEPTED, CONFLICT]
    assert store.append([rated("a", value=-1.0)]) == [CONFLICT]
    assert [e.value for e in store.events()] == [1.0]


def test_an_exchange_comes_back_as_it_was(store: Store) -> None:
    made = exchange(
        prompt="snow \N{SNOWMAN} and \0",
        prompt_tokens=np.arange(5, dtype=np.int32),
        tokens=np.array([7, 8, 9], np.int32),
        logprobs=np.array([-0.1, -np.inf, 0], np.float32),
        experts=np.arange(8 * 2 * 3, dtype=np.int16).reshape(8, 2, 3) - 1,
        sampling={"temperature": 0.7, "stop": ["\n"]},
        propensity=0.05,
        arm="canary",
    )
    assert store.record([made, made]) == 1 and store.record([made]) == 0
    same(store.exchange("r"), made)
    same(next(store.joined()).exchange, made)
    assert store.exchange("other") is None


def same(found: Exchange | None, made: Exchange) -> None:
    assert found is not None
    for name in Exchange.__slots__:
        ours, theirs = getattr(found, name), getattr(made, name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs, name


# ---- the join

_EXAMPLES = count()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(15)), again=st.lists(st.integers(0, 14)), cut=st.integers(1, 6))
def test_any_order_and_any_repetition_give_the_same_join(
    store: Store, order: list[int], again: list[int], cut: int
) -> None:
    """Each example in a time and under ids of its own."""
    n = next(_EXAMPLES)
    start = 10_000.0 * (n + 1)
    events = [
        rated(f"{n}e{k}", f"{n}r{k % 4}", start + k // 2, consent=k != 5) for k in range(12)
    ]  # of r3 there is no exchange until the end
    rows = [*events, *(exchange(f"{n}r{k}", start - 9 + k) for k in range(3))]
    sent, before = [rows[k] for k in [*order, *again]], store.counts()
    for first in range(0, len(sent), cut):
        some = sent[first : first + cut]
        event_rows = [one for one in some if isinstance(one, Event)]
        store.write(event_rows, [one for one in some if isinstance(one, Exchange)])
    window = (start - 100, start + 100)
    assert plain(store.joined(*window, training=False)) == [
        (f"{n}r{r}", [f"{n}e{k}" for k in range(r, 12, 4)]) for r in range(3)
    ]
    rose = {name: now - before[name] for name, now in store.counts().items()}
    assert rose == {"events": 12, "exchanges": 3, "unmatched": 3, "without_consent": 1, "personal": 0}
    store.record([exchange(f"{n}r3", start - 10)])  # their answer comes last of all, and is the oldest
    assert plain(store.joined(*window))[0] == (f"{n}r3", [f"{n}e{k}" for k in (3, 7, 11)])


def test_windows_and_the_horizon(store: Store) -> None:
    store.record([exchange(f"r{k}", float(k)) for k in range(1, 600)])  # more than a page
    store.append([rated(f"a{k}", f"r{k}", k + 5.0) for k in range(1, 600)])
    store.append([rated(f"b{k}", f"r{k}", k + 50.0) for k in range(1, 600)])
    found = [*store.joined(100.0, 500.0, horizon_s=50.0)]
    assert [each.exchange.ts for each in found] == [*range(100, 500)]
    assert all([e.event_id[0] for e in each.events] == ["a"] for each in found)
    assert len([*store.events(6.0, 56.0)]) == 50 + 5


def test_a_watermark_reads_the_same_again(store: Store) -> None:
    store.write([rated("a")], [exchange()])
    mark = store.watermark()
    before = plain(store.joined(upto=mark))
    store.write([rated("b", ts=1000.5)], [exchange("s", 1.0)])
    assert plain(store.joined(upto=mark)) == before == [("r", ["a"])]
    assert plain(store.joined()) == [("s", []), ("r", ["b", "a"])]


def test_several_writers_number_their_rows_in_the_order_of_commits(place: Place) -> None:
    """A watermark that was read holds: nothing below it is committed later."""
    where = place()
    open_store(where).close()
    seen: list[tuple[int, int]] = []

    def write(writer: int) -> None:
        with open_store(where) as mine:
            for k in range(15):
                mine.append([rated(f"{writer}.{k}.{n}") for n in range(3)] + [rated(f"shared.{k}")])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    with open_store(where) as reader:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            mark = reader.watermark()
            seen.append((mark, len([*reader.events(upto=mark)])))
        for thread in threads:
            thread.join()
        for mark, count in seen:
            assert len([*reader.events(upto=mark)]) == count
        assert reader.counts()["events"] == 3 * 15 * 3 + 15


# ---- consent, deletion, retention


def test_an_answer_without_consent_is_kept_out_of_training(store: Store) -> None:
    store.record([exchange("r", 1.0), exchange("s", 2.0)])
    store.append([rated("a"), rated("b", consent=False), rated("c", "s")])
    assert plain(store.joined()) == [("s", ["c"])]
    assert plain(store.joined(training=False)) == [("r", ["a", "b"]), ("s", ["c"])]


def test_a_deleted_user_does_not_come_back(store: Store) -> None:
    mine = [
        rated("a"),
        rated("b", user="guest"),
        rated("c", "s"),
    ]  # one of a guest
    rest = [rated("d", "s", user="v"), rated("e", user="u", tenant="other", response="t")]
    answers = [exchange("r"), exchange("s", user="v"), exchange("t", tenant="other")]
    store.write([*mine, *rest], answers)
    assert store.delete_user("u") == (3, 1)
    assert store.delete_user("u") == (0, 0)
    left = [("s", ["d"]), ("t", ["e"])]
    assert plain(store.joined()) == left
    assert store.append([*mine, rated("new", "r")]) == [EXPIRED] * 4
    assert store.record(answers) == 0 and plain(store.joined()) == left
    assert store.append([rated("later", "s")]) == [ACCEPTED]  # the user may return
    with pytest.raises(ValueError, match="user is empty"):
        store.delete_user("")


def test_what_was_deleted_is_not_in_the_file(tmp_path: Path) -> None:
    with open_store(tmp_path / "f.db") as store:
        store.append([rated("a", text="a secret of mine"), rated("b", user="v", text="a word of another")])
        store.delete_user("u")
        raw = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert b"secret" not in raw and b"a word of another" in raw


def test_what_is_older_than_is_kept_goes_and_stays_away(store: Store) -> None:
    store.record([exchange("r", 100.0), exchange("s", 300.0)])
    late = rated("late", "r", 400.0)
    store.append([rated("a", "r", 101.0), late, rated("b", "s", 301.0)])
    assert store.prune(200.0) == (2, 1)
    assert store.prune(100.0) == (0, 0)  # the limit does not go back
    assert plain(store.joined()) == [("s", ["b"])]
    assert store.append([rated("a", "r", 101.0)]) == [EXPIRED]
    assert store.record([exchange("r", 100.0)]) == 0


# ---- what cannot be opened, and what goes away


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("mysql://x/y", "neither a file nor"),
        ("{tmp}/text/f.db", "cannot be opened"),
        ("{tmp}/text", "not a database"),
    ],
)
def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path, where: str, words: str) -> None:
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(ValueError, match=words):
        open_store(where.format(tmp=tmp_path))


def test_the_folder_of_a_store_is_made(tmp_path: Path) -> None:
    """`ostinato serve ... --feedback runs/feedback.sqlite`, the first of docs/product.md, was refused in a
    folder without runs/."""
    with open_store(tmp_path / "runs" / "new" / "f.db") as store:
        assert store.append([rated("a")]) == [ACCEPTED]


def test_a_store_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "f.db").close()
    db = sqlite3.connect(tmp_path / "f.db")
    db.execute("UPDATE marks SET value = 2 WHERE name = 'schema'")
    db.commit()
    db.close()
    with pytest.raises(ValueError, match="schema 2"):
        open_store(tmp_path / "f.db")


@pytest.mark.slow
def test_a_crash_of_postgres_loses_nothing_that_was_committed(postgres: Cluster) -> None:
    """The server is killed between commits, at random, and started again; clients send again what failed."""
    rng = random.Random(5)
    where, known = postgres.address(), set()
    store, k = open_store(where), 0
    for _ in range(3):
        for _ in range(rng.randrange(1, 30)):
            store.append([rated(f"e{k}")])
            known.add(f"e{k}")
            k += 1
        postgres.stop()
        with pytest.raises(Unavailable):
            store.append([rated(f"e{k}")])
        with pytest.raises(Unavailable):
            open_store(where)
        store.close()
        postgres.start()
        store = open_store(where)
    assert {e.event_id for e in store.events()} - {f"e{k}"} == known
    store.close()
