"""Ranks as processes: who they are, how they end, where they meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import wait_until

from ostinato.parallel.launch import Place, Ranks, find_interface, local_place, loopback
from ostinato.parallel.ranks import keep_store

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
        assert not ranks.find_ended()
        children = [child for child in psutil.Process().children() if SAYS in " ".join(child.cmdline())]
        ranks.close(within_s=0.1)  # they got no order
        assert set(ranks.find_ended()) == {1, 2}
    assert len(children) == 2 and not any(child.is_running() for child in children)


def test_how_a_rank_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYS + "sys.exit(3)"]
    with Ranks.open(2, 4711, tmp_path, command) as ranks:
        assert wait_until(ranks.find_ended, 240) == {
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
    found = find_interface("127.0.0.1")
    assert found == (loopback() if sys.platform.startswith("linux") else None)
    assert find_interface("256.0.0.1") is None


def test_a_local_store_listens_on_the_loopback_alone() -> None:
    """torch's own listens on every interface, also where it is given 127.0.0.1."""
    store = keep_store()
    mine = [one for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in mine if one.laddr.port == store.port} == {"127.0.0.1"}
    assert local_place(2, 1).is_local
