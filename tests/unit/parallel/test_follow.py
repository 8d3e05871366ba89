"""What rank 0's part of a call comes back with, whenever its thread is done."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

import pytest

from ostinato.parallel.follow import Lead
from ostinato.parallel.watch import Doing
from ostinato.workers.lost import WorkerLost


class Refused(RuntimeError):
    """An answer."""


class JustThen(Future[int]):
    """Done between a wait in vain and the look at it."""

    def result(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().result()
        self.set_result(7)
        raise NotYet


def test_what_is_done_at_the_last_moment_is_a_result() -> None:
    lead = Lead(Doing(), 1.0)
    assert lead._result(JustThen()) == 7
    lead.close()


def test_a_timeout_of_the_work_itself_is_raised() -> None:
    def work() -> None:
        raise TimeoutError("of a store")

    lead = Lead(Doing(), 1.0)
    with pytest.raises(TimeoutError, match="of a store"):
        lead.run("step 1", work)
    lead.close()


def test_answers_are_counted_and_raised_as_they_are() -> None:
    """Even where they speak of connections: a sample may be called anything."""

    def work() -> None:
        raise Refused("routes of sample igloo#3")

    doing = Doing()
    lead = Lead(doing, 1.0, (Refused,))
    with pytest.raises(Refused, match="igloo#3"):
        lead.run("step 1", work)
    assert (doing.refused, doing.broken, doing.call) == (1, "", "")
    lead.close()
    strict = Lead(doing, 0.1)
    with pytest.raises(WorkerLost, match="rank 0 lost a connection in step 1"):
        strict.run("step 1", work)
    strict.close()
