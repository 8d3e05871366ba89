"""Runs that are hurt, killed and hung: outcomes, what is lost, what differs; each row of the table once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import faults as bench
from lab import kills
from lab.faults_child import Heartbeat, Stopped, alive, child, descendants
from lab.faults_planted import graded, planned
from lab.faults_vllm import Wire
from ostinato.model.native import BuildError, load_kernels
from ostinato.run import RunFolder

HEAD = next(fault for fault in bench.FAULTS if fault.name == "head")
SENTENCE = "ostinato: the head of the Ray cluster, or its daemon here, has not answered for 15 s"


def row(**changes: Any) -> dict[str, Any]:
    return {"code": 1, "sentence": SENTENCE, "seconds": 20.0, "resumed": 0} | changes


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "stopped"),
        ({"code": 0, "sentence": "", "resumed": None}, "recovered"),
        ({"seconds": 61.0}, "neither"),  # in the end, but later than promised
        ({"code": 0, "resumed": None, "seconds": 61.0}, "neither"),
        ({"sentence": "Traceback (most recent call last):"}, "neither"),
        ({"sentence": "ostinato: something else"}, "neither"),
        ({"resumed": "1: ostinato: no"}, "neither"),  # named, but it cannot go on
        ({"code": -9}, "stopped"),  # Ray ended the process, and its witness spoke
        ({"code": None}, "neither"),  # it hung
    ],
)
def test_an_outcome_is_named_and_in_time_or_it_is_none(changes: dict[str, Any], outcome: str) -> None:
    assert bench.outcome(HEAD, row(**changes)) == outcome


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 9))
def test_moments_of_kills_can_be_met_in_their_order(times: int, late: int, after: int, seed: int) -> None:
    plan = kills.Kills(kills=times, late=min(late, times), after=after, steps=30, seed=seed)
    found = kills.moments(plan)
    steps = [moment.step for moment in found if moment.step is not None]
    assert len(found) == times and found == kills.moments(plan)
    assert steps == sorted(steps) and steps[-1] < plan.steps - 1
    assert sum(step > after for step in steps) >= plan.late
    assert found[0].step is not None, "before it has a folder there is nothing to resume"
    assert all(0 <= moment.part < 1 for moment in found)


EVEN: Mapping[str, float] = {}


def a_run(
    path: Path, *, places: range = range(24), twice: int = -1, last: Mapping[str, float] = EVEN
) -> RunFolder:
    folder = RunFolder.create(path, "")
    accounts = {"groups/admitted_total": 24.0, "groups/trained_total": 24.0, "groups/outstanding": 0.0}
    folder.metrics.append({"step": 6, **accounts, **last})
    for place in (*places, *([twice] if twice >= 0 else [])):
        folder.trajectories.append(*({"seed": [0, 1, place, n], "sample": n} for n in range(bench.GROUP)))
    return folder


def test_a_prompt_is_lost_by_the_books_or_by_what_was_sampled(tmp_path: Path) -> None:
    assert bench.lost(a_run(tmp_path / "a")) == 0
    assert bench.lost(a_run(tmp_path / "b", places=range(1, 24))) == 1  # nothing sampled it
    assert bench.lost(a_run(tmp_path / "c", twice=3)) == 1  # trained on twice
    assert bench.lost(a_run(tmp_path / "d", last={"groups/trained_total": 23.0})) == 1  # and nothing says why
    by_rule = {"groups/trained_total": 23.0, "groups/dropped_total/too_few_verdicts": 1.0}
    assert bench.lost(a_run(tmp_path / "e", last=by_rule)) == 0
    assert bench.dropped(a_run(tmp_path / "f", last=by_rule)) == {"too_few_verdicts": 1}


def test_processes_are_found_by_who_started_them() -> None:
    """Ray's daemons and actors are grandchildren: a list of children alone would leave them behind."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        try:
            until = time.monotonic() + 240
            while len(found := descendants(parent.pid)) < 1 and time.monotonic() < until:
                time.sleep(0.01)
            assert len(found) == 1 and alive(found[0]) and found[0] in descendants(os.getpid())
            os.kill(found[0], signal.SIGKILL)
        finally:
            parent.kill()
    until = time.monotonic() + 240
    while alive(found[0]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(found[0]) and not alive(parent.pid)


def test_a_wire_that_is_cut_carries_nothing_and_forgets_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = Wire(server.getsockname()[1])

        def serve() -> None:
            with server.accept()[0] as accepted:
                accepted.sendall(b"late")

        threading.Thread(target=serve, daemon=True).start()
        with wire.cut():
            host, _, port = wire.address.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port))) as near:
                near.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    near.recv(4)
                wire._whole.set()
                near.settimeout(20)
                assert near.recv(4) == b"late"
        wire.close()


def test_nothing_is_planted_without_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned("hang") == {} and graded([[{"content": "11"}], [{"content": "0"}]]) == [2 / 3, 0.0]


def test_a_run_beside_a_bench_that_was_stopped_is_not_believed(tmp_path: Path) -> None:
    """Somebody may stop the bench, and with it all that it has started, to measure something in peace: what
    took longer than the bound was no fault of the run then."""
    heartbeat = Heartbeat()
    with child(["-c", "pass"], tmp_path, tmp_path, heartbeat, module="timeit") as run:
        assert run.until(lambda: run.ended, 60.0)
        heartbeat.woken = time.monotonic()
        with pytest.raises(Stopped):
            run.sleep(60.0)
        run.forgive()
        assert not run.sleep(60.0)  # it has ended, at once


# ---- a run that is killed with -9 again and again: ``ostinato bench kills``, twenty times, is this at length


@pytest.mark.slow
def test_killed_while_it_steps_and_while_it_loads_it_is_as_if_nothing_had_happened() -> None:
    """Kills after later steps ended with other bytes."""
    try:
        load_kernels()
    except BuildError as error:
        pytest.skip(f"bitwise only with the native kernels: {error}")
    plan = kills.Kills(kills=2, late=1, after=1, steps=5, checkpoint_every=2)
    result = plan.measure(print)
    assert result["equal"], result["differs"]
    assert len(result["kills"]) == 2 and result["late"] >= 1


# ---- each row of the fault table once: a real run over Ray, hurt at a random moment, ends well or says why


@pytest.fixture(scope="module")
def heartbeat() -> Heartbeat:
    return Heartbeat()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, heartbeat: Heartbeat) -> dict[str, Any]:
    pytest.importorskip("ray", reason="needs Ray")
    return bench.undisturbed(tmp_path_factory.mktemp("undisturbed"), heartbeat)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", bench.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_survived_or_named_and_nothing_is_lost(
    fault: bench.Fault, tmp_path: Path, heartbeat: Heartbeat, reference: dict[str, Any]
) -> None:
    row = bench.hurt(fault, 0, tmp_path, heartbeat, reference)
    assert row["outcome"] in ("recovered", "stopped"), row
    assert row["lost"] == 0 and not row["left_behind"], row
    assert row["equal"] is not False, row["differs"]
    assert bool(row["dropped"]) == fault.takes_groups
