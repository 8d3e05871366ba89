"""The verdict: who is lost, in one sentence, whatever the others say of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.parallel.watch import GRACE_S, Doing, Judge, Member, Sign, Watch, position

MEMBERS = [Member(rank=rank, host=f"host-{'ab'[rank // 2]}", pid=100 + rank) for rank in range(4)]


class Ranks:
    """Four ranks that beat once a second, and the judge who looks at them."""

    def __init__(self, silence_s: float = 10, timeout_s: float = 60) -> None:
        self.judge = Judge(MEMBERS, silence_s, timeout_s)
        self.signs = {rank: Sign(beat=0, call="step 7", at="links.py:87 gathered") for rank in range(4)}

    def after(
        self, seconds: int, still: Sequence[int] = (), ended: Mapping[int, str] | None = None
    ) -> Iterator[str | None]:
        for _ in range(seconds):
            for rank, sign in self.signs.items():
                if rank not in still:
                    self.signs[rank] = replace(sign, beat=sign.beat + 1)
            yield self.judge.see(dict(self.signs), ended or {}, 1.0, "noon")

    def change(self, rank: int, **what: Any) -> None:
        self.signs[rank] = replace(self.signs[rank], **what)


def test_ranks_that_beat_are_not_lost() -> None:
    assert set(Ranks().after(100)) == {None}


def test_a_silent_rank_is_named_with_where_and_what_after_so_long() -> None:
    ranks = Ranks(silence_s=10)
    assert set(ranks.after(3)) == {None}
    verdicts = list(ranks.after(10, still=(2, 3)))
    assert verdicts[:-1] == [None] * 9
    assert verdicts[-1] == (
        "rank 2 on host-b (process 102) gave no sign of life for 10 s, last seen in step 7 at links.py:87 "
        "gathered; "
        "rank 3 on host-b (process 103) gave no sign of life for 10 s, last seen in step 7 at links.py:87 "
        "gathered "
        "(noticed at noon, rank 0 in step 7 at links.py:87 gathered)"
    )


def test_a_rank_that_never_gave_a_sign_is_silent_too() -> None:
    ranks = Ranks(silence_s=10)
    del ranks.signs[1]
    verdicts = list(ranks.after(10))
    assert verdicts[:-1] == [None] * 9
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 1 on host-a (process 101) gave no sign of life for 10 s, before its first sign of life"
    )


def test_a_pause_of_the_judge_blames_nobody() -> None:
    ranks = Ranks(silence_s=10)
    assert set(ranks.after(3)) == {None}
    assert set(ranks.after(6, still=(1,))) == {None}
    assert set(ranks.after(1)) == {None}  # it was heard of again
    assert set(ranks.after(9, still=(1,))) == {None}


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    ranks = Ranks()
    assert set(ranks.after(1)) == {None}
    ranks.change(0, broken="RuntimeError: Connection closed by peer")
    (verdict,) = ranks.after(1, ended={3: "ended with signal SIGKILL"})
    assert verdict is not None
    assert verdict.startswith("rank 3 on host-b (process 103) ended with signal SIGKILL, last seen in step 7")
    assert verdict.endswith("(noticed at noon, rank 0 in step 7 at links.py:87 gathered)")


def test_who_raised_is_named_when_rank_0_does_not_raise_it_too() -> None:
    ranks = Ranks()
    assert set(ranks.after(1)) == {None}
    ranks.change(1, raised="ValueError: no")
    verdicts = list(ranks.after(int(GRACE_S)))
    assert verdicts[:-1] == [None] * (int(GRACE_S) - 1)
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 1 on host-a (process 101) raised ValueError: no, last seen in step 7"
    )


def test_who_hangs_is_not_who_waits_for_it() -> None:
    ranks = Ranks(timeout_s=60)
    for rank in (0, 1, 3):
        ranks.change(rank, idle_s=61.0, waits=True)
    ranks.change(2, idle_s=60.0, waits=False, at="trainer.py:300 _backward")
    (verdict,) = ranks.after(1)
    assert verdict == (
        "rank 2 on host-b (process 102) hangs, for 60 s, last seen in step 7 at trainer.py:300 _backward "
        "(noticed at noon, rank 0 in step 7 at links.py:87 gathered)"
    )


def test_a_call_that_only_some_ranks_refuse_is_told_by_name() -> None:
    ranks = Ranks()
    for rank in range(4):
        ranks.change(rank, refused=1)
    assert set(ranks.after(20)) == {None}  # all alike
    ranks.change(2, refused=2, call="")
    assert set(ranks.after(20)) == {None}  # rank 0 may be about to
    ranks.change(0, waits=True)
    verdicts = list(ranks.after(int(GRACE_S)))
    assert verdicts[:-1] == [None] * (int(GRACE_S) - 1)
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 2 on host-b (process 102) has refused 2 of its calls where rank 0 refused 1, last seen "
        "between two calls"
    )


def test_a_rank_that_has_not_refused_what_rank_0_has_is_named() -> None:
    ranks = Ranks()
    for rank in (0, 1, 3):
        ranks.change(rank, refused=1, call="")
    assert set(ranks.after(20)) == {None}  # rank 2 is at it
    ranks.change(2, call="")
    verdicts = list(ranks.after(int(GRACE_S)))
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 2 on host-b (process 102) has refused 0 of its calls where rank 0 refused 1"
    )


def test_a_broken_connection_waits_for_a_better_reason() -> None:
    ranks = Ranks(silence_s=10)
    assert set(ranks.after(2)) == {None}
    ranks.change(0, broken="RuntimeError: Connection closed by peer")
    ranks.change(1, broken="RuntimeError: Connection closed by peer")
    verdicts = list(ranks.after(20, still=(3,)))
    first = next(verdict for verdict in verdicts if verdict)
    assert first.startswith("rank 3 on host-b (process 103) gave no sign of life for 10 s")
    other = Ranks(silence_s=10)
    other.change(0, broken="RuntimeError: Connection closed by peer")
    first = next(verdict for verdict in other.after(30) if verdict)
    assert first.startswith("rank 0 on host-a (process 100) lost a connection: RuntimeError: Connection")


# ---- the watch itself, over a store that is a dict


class Table:
    """``watch.Store`` in this process; ``broken`` makes it raise, as one that cannot be reached."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.broken = False

    def set(self, key: str, value: str, /) -> None:
        self._check()
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        self._check()
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self._check()
        return all(key in self.values for key in keys)

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer\nat TCPStore.cpp")


class Watched:
    def __init__(self, table: Table, rank: int, silence_s: float = 0.5) -> None:
        self.heard, self.sentence = threading.Event(), ""
        self.watch = Watch(
            lambda: table,
            MEMBERS[:2],
            rank,
            Doing(call="step 3"),
            silence_s=silence_s,
            timeout_s=30,
            on_lost=self.hear,
        )

    def hear(self, sentence: str) -> None:
        assert not self.heard.is_set(), "told twice"
        self.sentence = sentence
        self.heard.set()


def test_all_ranks_hear_one_verdict() -> None:
    table = Table()
    first, second = Watched(table, 0), Watched(table, 1)
    assert not first.heard.wait(1.5)
    second.watch.stop()
    assert first.heard.wait(120)
    assert first.sentence.startswith("rank 1 on host-a (process 101) gave no sign of life for")
    late = Watched(table, 1)
    assert late.heard.wait(120)
    assert late.sentence == first.sentence
    for one in (first, second, late):
        one.watch.stop()


def test_a_store_that_cannot_be_reached_is_rank_0_lost() -> None:
    table = Table()
    watched = Watched(table, 1)
    assert not watched.heard.wait(1.0)
    table.broken = True
    assert watched.heard.wait(120)
    assert watched.sentence.startswith(
        "rank 0 on host-a (process 100), where the ranks meet, could not be reached from rank 1 on host-a"
    )
    assert "(Connection reset by peer)" in watched.sentence


def test_rank_0_can_end_all_by_itself() -> None:
    table = Table()
    first, second = Watched(table, 0, silence_s=5), Watched(table, 1, silence_s=5)
    first.watch.accuse("rank 0 on host-a (process 100) ended the run: KeyboardInterrupt", 10)
    assert second.heard.wait(120)
    assert second.sentence == "rank 0 on host-a (process 100) ended the run: KeyboardInterrupt"


def test_idle_time_counts_while_a_call_does_not_get_on() -> None:
    steps = [0.0]
    doing = Doing(progress=lambda: steps[0])
    assert doing.sign(1, 5.0).idle_s == 0  # between calls
    doing.call = "step 1"
    assert [doing.sign(beat, 5.0).idle_s for beat in (2, 3, 4)] == [0, 5, 10]
    steps[0] += 1
    assert [doing.sign(beat, 5.0).idle_s for beat in (5, 6)] == [0, 5]
    doing.progress = None  # nobody can tell
    assert [doing.sign(beat, 5.0).idle_s for beat in (7, 8)] == [0, 0]


def test_a_position_is_the_innermost_line_of_ours() -> None:
    found: list[tuple[str, bool]] = []
    doing = Doing(progress=lambda: found.append(position(sys._getframe())) or 0.0)
    doing.call = "step 1"
    doing.sign(1, 1.0)
    at, waits = found[0]
    assert at.startswith("watch.py:") and at.endswith(" sign") and not waits
    assert position(None) == ("", False)


def test_nobody_is_in_the_store_any_more_once_it_was_stopped() -> None:
    """A process that ended then was aborted by the C++ of torch's store, under a thread that Python ends."""

    class Slow(Table):
        inside = 0

        def set(self, key: str, value: str, /) -> None:
            self.inside += 1
            asked.set()
            time.sleep(0.3)
            super().set(key, value)
            self.inside -= 1

    asked, table = threading.Event(), Slow()
    watched = Watched(table, 1, silence_s=30)
    assert asked.wait(120)
    watched.watch.stop()
    assert table.inside == 0
    assert not any(thread.is_alive() for thread in watched.watch._heart._threads)
