"""Between server and store: bounded, counted, nothing acknowledged that is not committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from product_rows import event, exchange

from ostinato.apps.product.events import Event, Exchange, Kind
from ostinato.apps.product.intake import Full, Intake
from ostinato.apps.product.store import Outcome, Store, open_store
from ostinato.database import Unavailable


class Gate:
    """A store behind a gate, which may be broken."""

    def __init__(self, store: Store, opened: threading.Event) -> None:
        self._store, self._opened, self.broken = store, opened, 0

    def write(self, events: Sequence[Event], exchanges: Sequence[Exchange]) -> list[Outcome]:
        assert self._opened.wait(60)
        if self.broken:
            self.broken -= 1
            raise Unavailable("gone")
        return self._store.write(events, exchanges)

    def close(self) -> None:
        self._store.close()


def gated(path: Path, broken: int = 0) -> tuple[threading.Event, Callable[[], Store]]:
    opened, left = threading.Event(), [broken]

    def reach() -> Store:
        gate = Gate(open_store(path), opened)
        gate.broken, left[0] = left[0], max(0, left[0] - 1)
        return gate  # pyright: ignore[reportReturnType]

    return opened, reach


def rated(id_: str) -> Event:
    return event(Kind.ACCEPT, event_id=id_)


def test_senders_of_one_batch_get_their_own_outcomes(tmp_path: Path) -> None:
    opened, reach = gated(tmp_path / "f.db")
    intake = Intake(reach)
    first = intake.submit([rated("a"), rated("b")])
    second = intake.submit([rated("b"), rated("c"), event(Kind.REJECT, event_id="a")])
    opened.set()
    assert first.result(60) == [Outcome.ACCEPTED] * 2
    assert second.result(60) == [Outcome.REPEATED, Outcome.ACCEPTED, Outcome.CONFLICT]
    intake.close()
    assert (intake.counts["accepted"], intake.counts["repeated"], intake.counts["conflict"]) == (3, 1, 1)


def test_nobody_waits_for_a_store_that_does_not_answer(tmp_path: Path) -> None:
    opened, reach = gated(tmp_path / "f.db")
    intake = Intake(reach, most_events=3, most_exchanges=4)
    futures: list[Future[list[Outcome]]] = [intake.submit([rated("a"), rated("b")])]
    with pytest.raises(Full):
        intake.submit([rated("c"), rated("d")])
    kept = [intake.record(lambda k=k: exchange(f"r{k}")) for k in range(700)]
    assert 4 <= sum(kept) <= 8 and intake.counts["dropped"] == 700 - sum(kept)
    assert not futures[0].done()
    opened.set()
    futures[0].result(60)
    intake.close()
    with open_store(tmp_path / "f.db") as store:
        counts = store.counts()
    assert (counts["events"], counts["exchanges"]) == (2, sum(kept)) == (2, intake.counts["written"])
    assert intake.counts["turned_away"] == 2 and intake.waiting == 0


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    intake = Intake(lambda: open_store(tmp_path / "f.db"))
    futures = [intake.submit([rated(f"e{k}")]) for k in range(50)]
    assert all(intake.record(lambda k=k: exchange(f"r{k}")) for k in range(50))
    intake.close()
    assert all(future.result(0) == [Outcome.ACCEPTED] for future in futures)
    assert not intake.record(exchange)
    with pytest.raises(Full):
        intake.submit([rated("late")])
    with open_store(tmp_path / "f.db") as store:
        assert store.counts()["events"] == store.counts()["exchanges"] == 50


def test_a_store_that_went_away_is_reached_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender gets an error, sends the same event again, and the answers that waited are not lost."""
    monkeypatch.setattr("ostinato.apps.product.intake.AGAIN_S", 0.01)
    opened, reach = gated(tmp_path / "f.db", broken=1)
    intake = Intake(reach)
    receipt = intake.submit([rated("a")])
    intake.record(exchange)
    opened.set()
    with pytest.raises(Unavailable):
        receipt.result(60)
    assert intake.submit([rated("a")]).result(60) == [Outcome.ACCEPTED]
    intake.close()
    assert intake.counts["failures"] == 1 and intake.counts["written"] == 1


def test_an_answer_that_cannot_be_made_is_dropped_and_counted(tmp_path: Path) -> None:
    intake = Intake(lambda: open_store(tmp_path / "f.db"))

    def broken() -> Exchange:
        raise ValueError("no such token")

    assert intake.record(broken) and intake.record(exchange)
    intake.close()
    assert (intake.counts["dropped"], intake.counts["written"]) == (1, 1)
