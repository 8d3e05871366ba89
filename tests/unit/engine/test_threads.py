"""The choice of threads: what is tried first, what is cached, which candidates there are; the cost table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine import threads
from ostinato.engine.cost import KNOTS, CostTable
from ostinato.engine.threads import Threads, Timing

WORK = threads.Products()


def write_cache(count: int, policy: str) -> None:
    threads.cache_file(WORK).parent.mkdir(parents=True)
    threads.cache_file(WORK).write_text(json.dumps({"best": {"count": count, "policy": policy}}))


def test_the_fastest_that_did_not_fail_wins() -> None:
    slow = Timing(count=1, policy="passive", us_per_token=3.0)
    fast = Timing(count=2, policy="active", us_per_token=2.0)
    failed = Timing(count=4, policy="active", us_per_token=None)
    assert threads.find_fastest([slow, failed, fast]) is fast
    hardly = Timing(count=2, policy="passive", us_per_token=2.1)
    assert threads.find_fastest([fast, hardly]) is hardly  # spinning has to be worth it
    assert threads.find_fastest([failed]) is None


def test_given_then_environment_then_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(threads, "is_busy", lambda: False)
    count = threads.count_logical_cores()
    write_cache(count, "active")
    empty: dict[str, str] = {}
    assert threads.configure(environ=empty) == Threads(count=count, policy="active", source="cache")
    assert empty == {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
    user = {"OMP_NUM_THREADS": "5"}
    assert threads.configure(environ=user) == Threads(count=5, policy="passive", source="environment")
    assert threads.configure(7, "active", environ=user) == Threads(count=7, policy="active", source="given")
    assert user == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
    spins = {"GOMP_SPINCOUNT": "7"}
    assert threads.configure(environ=spins).policy == "active" and spins["GOMP_SPINCOUNT"] == "7"
    # written threads waited passively: 1.2 s a step, where the same number measured took 0.85
    assert threads.configure(count, environ={}) == Threads(count=count, policy="active", source="given")
    # of two runs on two cores that both spun one took 8.6 s a step, and 1.6 alone
    monkeypatch.setattr(threads, "is_busy", lambda: True)
    assert threads.configure(environ={}) == Threads(count=count, policy="passive", source="cache")
    waits = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert threads.configure(environ=waits).policy == "passive"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"best": 3}',
        '{"best": {"count": "x", "policy": "active"}}',
        '{"best": {"count": 1, "policy": "eager"}}',
        '{"best": {"count": 1, "policy": null}}',
        '{"best": {"count": 1, "policy": {}}}',
        '{"best": {"count": Infinity, "policy": "active"}}',
        '{"best": {"count": 0, "policy": "active"}}',
        '{"best": {"count": 1000000, "policy": "active"}}',
        "[" * 100_000,
        b"\xff",
    ],
    ids=repr,
)
def test_a_broken_cache_is_as_none(
    own_cache: Path, text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown policy was a KeyError, one that is null an AttributeError, and an infinity an OverflowError:
    every command ended there until somebody removed the file."""
    threads.cache_file(WORK).parent.mkdir(parents=True)
    threads.cache_file(WORK).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert threads.read_choice(WORK) is None
    (line,) = caplog.messages
    assert "is damaged or of another version" in line and "\n" not in line


def test_what_a_busy_machine_measured_holds_while_it_is_busy(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not kept at all, and busy was a load average over half of the cores, which one run leaves behind
    for a minute: on two cores each of several runs in a row began with six seconds of measuring threads."""
    us, busy = {1: 2.0}, True
    monkeypatch.setattr(
        threads, "probe", lambda work, policy, counts: dict(us) if policy == "passive" else {}
    )
    monkeypatch.setattr(threads, "is_busy", lambda: busy)
    assert threads.measure(WORK) == Threads(count=1, policy="passive", source="measured")
    assert threads.read_choice(WORK) == Threads(count=1, policy="passive", source="cache")
    busy = False
    assert threads.read_choice(WORK) is None
    threads.measure(WORK)
    quiet = threads.read_choice(WORK)
    busy, us = True, {2: 1.0}
    assert threads.measure(WORK).count == 2 and threads.read_choice(WORK) == quiet


def test_busy_is_what_the_cores_do_now(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([(100, 1000), (130, 1010), (130, 1010), (135, 1045), None])
    monkeypatch.setattr(threads, "_read_ticks", lambda: next(spent))
    monkeypatch.setattr(threads, "LOOK_S", 0.0)
    assert [threads.is_busy() for _ in range(3)] == [True, False, False]  # 30 of 40 ticks, 5 of 40, unknown


@pytest.mark.slow
def test_a_probe_times_the_products_of_the_model_that_is_run() -> None:
    """Threads were chosen by products of one small width, whatever was run: one for a server that ran 1.4
    times as fast with two."""
    timed = threads.probe(threads.Products(native=False, dtype="float32"), "passive", [1, 2])
    assert set(timed) == {1, 2} and all(us is not None and us > 0 for us in timed.values())
    assert threads.probe(threads.Products(), "active", [1]) == {}  # one thread never waits


def test_a_torch_that_was_imported_first_gets_the_number_and_never_more_than_idle_cores(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``import torch`` before ``learn`` left torch at a spinning thread per core: beside one other process
    38 s instead of 6 on two cores."""
    numbers: list[int] = []
    torch = SimpleNamespace(get_num_threads=lambda: 4, set_num_threads=numbers.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(threads, "count_logical_cores", lambda: 8)
    monkeypatch.setattr(threads, "measure_busy_share", lambda: 0.0)
    write_cache(6, "active")
    assert threads.configure(environ={}).count == 4  # the user's torch.set_num_threads(4)
    monkeypatch.setattr(threads, "measure_busy_share", lambda: 0.8)
    environ: dict[str, str] = {}
    assert threads.configure(environ=environ).count == 2 and environ["OMP_NUM_THREADS"] == "2"
    assert "its 2 threads spin while they wait" in caplog.text
    caplog.clear()
    assert threads.configure(environ={"OMP_WAIT_POLICY": "passive"}).count == 4
    assert threads.configure(environ={"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "passive"}).count == 4
    assert threads.configure(1, environ={}).count == 1
    assert numbers == [4, 2, 4, 4, 1] and not caplog.messages


# ---- the cost table: what it is measured from, how it moves, and that it stays a cost


def world(rows: int, attended: float) -> float:
    """A machine: 1 ms of weights, 30 us per row beyond 8, 0.1 us per position."""
    return 1e-3 + 3e-5 * max(0, rows - 8) + 1e-7 * attended


def test_measured_it_predicts_what_was_not_measured() -> None:
    table = CostTable.measure(lambda rows, context: world(rows, rows * context))
    for rows, context in ((1, 16), (12, 100), (200, 50), (1000, 16)):
        assert float(table.predict_seconds(rows, rows * context)) == pytest.approx(
            world(rows, rows * context), rel=0.05
        )


def test_a_slow_machine_is_not_measured_for_ever() -> None:
    requested: list[int] = []

    def slow(rows: int, context: int) -> float:
        requested.append(rows)
        return 0.1 * rows

    table = CostTable.measure(slow)
    assert max(requested) == 8
    assert float(table.predict_seconds(1000, 0)) == pytest.approx(100, rel=0.3)


def test_it_follows_the_machine() -> None:
    table = CostTable.measure(lambda rows, context: world(rows, rows * context))
    rng = np.random.default_rng(0)
    for _ in range(2000):  # which has become slower by two fifths
        rows = int(rng.choice([4, 16, 40, 100, 300]))
        noise = 5.0 if rng.random() < 0.02 else rng.normal(1, 0.05)  # now and then somebody else is working
        table.observe(rows, 0.0, 1.4 * world(rows, 0) * noise)
    for rows in (4, 16, 40, 100, 300):
        assert float(table.predict_seconds(rows, 0)) == pytest.approx(1.4 * world(rows, 0), rel=0.15)


def test_slow_first_passes_are_forgotten() -> None:
    """What an engine does once, on its first passes, was taken for what it does on every pass: drafts seemed
    to save ten times what they did, for good."""
    table = CostTable.measure(lambda rows, context: world(rows, rows * context))
    for _ in range(10):
        table.observe(4, 200.0, 0.05)
    for _ in range(40):
        table.observe(4, 200.0, world(4, 200.0))
    for rows in (4, 200):
        assert float(table.predict_seconds(rows, 1e3)) == pytest.approx(world(rows, 1e3), rel=0.15)


def test_what_the_engine_does_around_the_model_is_learnt_first() -> None:
    """The table is measured on the model alone. With a pass of 0.1 ms that the engine makes 0.4 ms of, drafts
    seemed worth a quarter of what they were, and an answer was over before that was noticed."""
    table = CostTable.measure(lambda rows, context: world(rows, rows * context) / 10)
    for _ in range(12):
        table.observe(4, 200.0, world(4, 200.0) / 10 + 3e-4)
    for rows in (1, 4, 64):
        expected = world(rows, 200.0) / 10 + 3e-4
        assert float(table.predict_seconds(rows, 200.0)) == pytest.approx(expected, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-6, 10)), max_size=50))
@settings(max_examples=40, deadline=None)
def test_more_rows_never_cost_less(passes: list[tuple[int, float]]) -> None:
    table = CostTable([1e-3 * knot for knot in KNOTS])
    for rows, seconds in passes:
        table.observe(rows, 0.0, seconds)
    costs = table.predict_seconds(np.arange(1, 4000), 0.0)
    assert (np.diff(costs) >= -1e-9 * costs[1:]).all() and (costs > 0).all()
