"""Ranks as processes: who they are, by which key they meet, what they are called, who is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import wait_until
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.parallel.control import Terms, arrive, keep_store, opened, sealed
from ostinato.parallel.follow import Lead
from ostinato.parallel.key import VARIABLE, fits, new_key, signed, users_key
from ostinato.parallel.launch import Place, Ranks, interface_towards, local_place, loopback
from ostinato.parallel.watch import COLLECTIVES, GRACE_S, Doing, Judge, Member, Sign, Watch, position
from ostinato.workers.lost import WorkerLost

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_place_is_torchruns() -> None:
    place = Place.of(TORCHRUN)
    assert place == Place(rank=3, world=4, local_rank=1, local_world=2, address="10.0.0.1", port=29500)
    assert place is not None and place.environment() == TORCHRUN
    again = Place.of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None and again.agent and again.attempt == 2


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_was_started_alone_has_no_place(missing: str) -> None:
    assert Place.of({name: value for name, value in TORCHRUN.items() if name != missing}) is None
    assert Place.of(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("RANK", "4", "RANK is '4', no whole number from 0 to 3; start"),
        ("RANK", "-1", "RANK is '-1', no whole number from 0 to 3; start"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two', no whole number of 1 or more; start"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0', no whole number from 1 to 65535; start"),
    ],
)
def test_a_place_that_cannot_be_is_refused(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Place.of(TORCHRUN | {name: value})
    assert str(caught.value) == f"{sentence} the ranks with torchrun"


SAYS = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True); "


def test_ranks_end_with_the_context(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS + "sys.stdin.read()"]
    with Ranks.open(3, 4711, tmp_path, command) as ranks:
        logs = [tmp_path / f"rank-{rank}.log" for rank in (1, 2)]
        assert wait_until(lambda: all(log.exists() and log.read_text() for log in logs), 240)
        assert [log.read_text() for log in logs] == ["1 3\n", "2 3\n"]
        assert not ranks.ended()
        children = [child for child in psutil.Process().children() if SAYS in " ".join(child.cmdline())]
        ranks.close(within_s=0.1)  # they got no order
        assert set(ranks.ended()) == {1, 2}
    assert len(children) == 2 and not any(child.is_running() for child in children)


def test_how_a_rank_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS + "sys.exit(3)"]
    with Ranks.open(2, 4711, tmp_path, command) as ranks:
        assert wait_until(ranks.ended, 240) == {
            1: f"ended: exit status 3; its last lines, in {tmp_path / 'rank-1.log'}: 1 2"
        }


LEAD = """
import sys, time
from pathlib import Path
from ostinato.parallel.launch import Ranks
follower = "import os, time; from ostinato.workers.process import end_with_parent; " \
    "end_with_parent(lambda why: os._exit(1)); time.sleep(1000)"
with Ranks.open(3, 4711, Path(sys.argv[1]), [sys.executable, "-c", follower]):
    print("begun", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_is_left_when_rank_0_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    lead = subprocess.Popen(
        [sys.executable, "-c", LEAD, str(tmp_path)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    with lead:
        assert lead.stdout is not None and lead.stdout.readline() == b"begun\n"
        children = psutil.Process(lead.pid).children()
        assert len(children) == 2
        lead.send_signal(how)
        lead.wait(120)
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive and len(gone) == 2


def test_the_interface_towards_this_host_is_its_own() -> None:
    found = interface_towards("127.0.0.1")
    assert found == (loopback() if sys.platform.startswith("linux") else None)
    assert interface_towards("256.0.0.1") is None


# ---- who may tell a rank what to do: a process with the key of the run, and none by an old message


TERMS = Terms(backend="gloo", timeout_s=60.0, silence_s=30.0, recipe="the recipe")
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


# ---- what rank 0's part of a call comes back with, whenever its thread is done


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


# ---- the verdict: who is lost, in one sentence, whatever the others say of it


MEMBERS = [Member(rank=rank, host=f"host-{'ab'[rank // 2]}", pid=100 + rank) for rank in range(4)]


class Judged:
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
    assert set(Judged().after(100)) == {None}


def test_a_silent_rank_is_named_with_where_and_what_after_so_long() -> None:
    ranks = Judged(silence_s=10)
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
    ranks = Judged(silence_s=10)
    del ranks.signs[1]
    verdicts = list(ranks.after(10))
    assert verdicts[:-1] == [None] * 9
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 1 on host-a (process 101) gave no sign of life for 10 s, before its first sign of life"
    )


def test_a_pause_of_the_judge_blames_nobody() -> None:
    ranks = Judged(silence_s=10)
    assert set(ranks.after(3)) == {None}
    assert set(ranks.after(6, still=(1,))) == {None}
    assert set(ranks.after(1)) == {None}  # it was heard of again
    assert set(ranks.after(9, still=(1,))) == {None}


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    ranks = Judged()
    assert set(ranks.after(1)) == {None}
    ranks.change(0, broken="RuntimeError: Connection closed by peer")
    (verdict,) = ranks.after(1, ended={3: "ended with signal SIGKILL"})
    assert verdict is not None
    assert verdict.startswith("rank 3 on host-b (process 103) ended with signal SIGKILL, last seen in step 7")
    assert verdict.endswith("(noticed at noon, rank 0 in step 7 at links.py:87 gathered)")


def test_who_raised_is_named_when_rank_0_does_not_raise_it_too() -> None:
    ranks = Judged()
    assert set(ranks.after(1)) == {None}
    ranks.change(1, raised="ValueError: no")
    verdicts = list(ranks.after(int(GRACE_S)))
    assert verdicts[:-1] == [None] * (int(GRACE_S) - 1)
    assert verdicts[-1] is not None and verdicts[-1].startswith(
        "rank 1 on host-a (process 101) raised ValueError: no, last seen in step 7"
    )


def test_who_hangs_is_not_who_waits_for_it() -> None:
    ranks = Judged(timeout_s=60)
    for rank in (0, 1, 3):
        ranks.change(rank, idle_s=61.0, waits=True)
    ranks.change(2, idle_s=60.0, waits=False, at="trainer.py:300 _backward")
    (verdict,) = ranks.after(1)
    assert verdict == (
        "rank 2 on host-b (process 102) hangs, for 60 s, last seen in step 7 at trainer.py:300 _backward "
        "(noticed at noon, rank 0 in step 7 at links.py:87 gathered)"
    )


def test_a_call_that_only_some_ranks_refuse_is_told_by_name() -> None:
    ranks = Judged()
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
    ranks = Judged()
    for rank in (0, 1, 3):
        ranks.change(rank, refused=1, call="")
    assert set(ranks.after(20)) == {None}  # rank 2 is at it
    ranks.change(2, call="")
    *_, last = ranks.after(int(GRACE_S))
    assert last is not None and "(process 102) has refused 0 of its calls where rank 0 refused 1" in last


def test_a_broken_connection_waits_for_a_better_reason() -> None:
    ranks = Judged(silence_s=10)
    assert set(ranks.after(2)) == {None}
    ranks.change(0, broken="RuntimeError: Connection closed by peer")
    ranks.change(1, broken="RuntimeError: Connection closed by peer")
    verdicts = list(ranks.after(20, still=(3,)))
    first = next(verdict for verdict in verdicts if verdict)
    assert first.startswith("rank 3 on host-b (process 103) gave no sign of life for 10 s")
    other = Judged(silence_s=10)
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
        assert not self.heard.is_set(), "reported twice"
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
    doing.progress = None  # unknown
    assert [doing.sign(beat, 5.0).idle_s for beat in (7, 8)] == [0, 0]


def test_a_position_is_the_innermost_line_of_ours() -> None:
    found: list[tuple[str, bool]] = []
    doing = Doing(progress=lambda: found.append(position(sys._getframe())) or 0.0)
    doing.call = "step 1"
    doing.sign(1, 1.0)
    at, waits = found[0]
    assert at.startswith("watch.py:") and at.endswith(" sign") and not waits
    assert position(None) == ("", False)
    assert all(file.is_file() for file in COLLECTIVES)  # past whose lines it looks


def test_nobody_is_in_the_store_any_more_once_it_was_stopped() -> None:
    """A process that ended then was aborted by the C++ of torch's store, under a thread that Python ends."""

    class Slow(Table):
        inside = 0

        def set(self, key: str, value: str, /) -> None:
            self.inside += 1
            requested.set()
            time.sleep(0.3)
            super().set(key, value)
            self.inside -= 1

    requested, table = threading.Event(), Slow()
    watched = Watched(table, 1, silence_s=30)
    assert requested.wait(120)
    watched.watch.stop()
    assert table.inside == 0
    assert not any(thread.is_alive() for thread in watched.watch._heart._threads)
