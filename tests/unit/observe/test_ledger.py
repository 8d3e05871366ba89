"""The ledger: what is spent adds up, whatever kills the run, wherever the file is cut, whatever changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_ledger import a_step, an_eval, killed_and_resumed, start

from ostinato.observe.ledger import (
    AXES,
    Ledger,
    SteadyClock,
    Terms,
    check_ledger,
    read,
    set_price,
    spent,
    summary,
)
from ostinato.run import RunFolder

Row = dict[str, Any]


def folder(path: Path) -> RunFolder:
    path.mkdir(parents=True, exist_ok=True)
    return RunFolder(path)


def test_a_killed_and_resumed_run_by_hand() -> None:
    rows = killed_and_resumed()
    hours = {step: 3600 * value for step, value in spent(rows, "hours").items()}
    first = 5 + 10 + 1 + 10 + 12 + 6  # all of session 1 but its evaluation
    assert hours == pytest.approx({0: 0, 1: 15, 2: first + 7 + 10, 3: first + 7 + 20})
    device_hours = {step: 3600 * value for step, value in spent(rows, "device-hours").items()}
    assert device_hours == pytest.approx({0: 0, 1: 15, 2: first + 4 * 17, 3: first + 4 * 27})
    assert spent(rows, "gpu-hours") == spent(rows, "device-hours")
    assert 3600 * spent(rows, "money")[3] == pytest.approx(2 * first + 3 * 4 * 27)
    assert spent(rows, "flops") == {0: 0, 1: 3500, 2: 3 * 3500 + 2500, 3: 4 * 3500 + 2500}
    assert spent(rows, "tokens") == {0: 0, 1: 100, 2: 300, 3: 400}
    assert spent(rows, "steps") == {0: 0, 1: 1, 2: 2, 3: 3}

    found = summary(rows)
    assert (found.sessions, found.restarts, found.steps, found.repeated) == (2, 1, 3, 2)
    assert found.wall == {
        **{"steps": 50.0, "evaluation": 4.0},
        **{"loading": 12.0, "between": 4.0, "lost": 6.0},
    }
    pool = found.pools["local"]
    assert pool.busy == {"eval": 4.0, "sample": 44.0, "grade": 11.0, "train": 33.0, "measure": 11.0}
    assert pool.idle == 5 + 1 + 2 + 3 + 4 * (7 + 2 + 1)  # loading, a save, a gap, rests of steps; and again
    assert (pool.lost, pool.total) == (6.0, first + 4 + 4 * 28)
    assert found.tokens["sampled"] == 400 and found.tokens["trained"] == 210
    assert found.dropped == {"zero_variance": 90, "unused": 100}
    assert found.flops == {"sample": 4000, "train": 10_000, "measure": 2500}
    assert (found.evaluation.times, found.evaluation.flops, found.evaluation.tokens) == (1, 400, 40)
    assert found.money is not None and 3600 * found.money == 2 * (first + 4) + 3 * 4 * 28


# ---- laws, on ledgers of runs that go on, are killed and resumed at random


@st.composite
def histories(draw: st.DrawFn) -> list[Row]:
    """What one process after another writes: each goes on from a step that one before had finished."""
    number = st.integers(0, 10**19)
    rows: list[Row] = []
    at, done = 0.0, 0
    for session in range(1, draw(st.integers(1, 4)) + 1):
        devices, step = draw(st.integers(1, 64)), draw(st.integers(0, done))
        at = max(0.0, at + draw(st.floats(-100, 100)))  # its clock may be behind
        rows.append(start(session, at, step, devices, loading=draw(st.floats(0, 20))))
        now, earlier = rows[-1]["at"], {row["step"] for row in rows if row["event"] == "step"}
        for _ in range(draw(st.integers(0, 4))):
            gap = draw(st.floats(0, 5))
            kind = draw(st.sampled_from(["step", "step", "eval"]))
            if kind == "step":
                step, now = step + 1, now + gap + 10
                sampled, train, measure = draw(number), draw(number), draw(number)
                row = a_step(session, step, now, devices)
                row["tokens"]["sampled"] = draw(st.integers(0 if step in earlier else 100, 200))
                rows.append(row | {"flops": {"sample": sampled, "train": train, "measure": measure}})
            else:
                now += gap + 4
                rows.append(an_eval(session, step, now, devices))
        done, at = step, now
        if draw(st.booleans()):
            lost = draw(st.floats(0, 50))
            now += lost
            more = {"why": "failed", "seconds": lost, "part": draw(st.sampled_from(["train", "eval"]))}
            rows.append({"event": "end", "session": session, "step": step, "at": now, **more})
    return rows


def device_seconds(rows: list[Row]) -> float:
    """The slow twin: session by session, devices times the seconds from its begin to its last row."""
    total = 0.0
    for first in (row for row in rows if row["event"] == "start"):
        own = [row for row in rows if row["session"] == first["session"]]
        devices = first["pools"]["local"]["devices"]
        ends = [row.get("ended_at") or row["at"] for row in own]
        total += devices * (max(ends) - first["process_started"])
    return total


@given(histories())
def test_every_row_is_in_the_sums_and_every_sampled_token_was_trained_or_dropped(rows: list[Row]) -> None:
    found = summary(rows)
    all_rows = sum(sum(row["flops"].values()) for row in rows if row["event"] == "step")
    assert sum(found.flops.values()) == all_rows
    assert found.tokens.get("sampled", 0) == found.tokens.get("trained", 0) + sum(found.dropped.values())


@given(histories())
def test_busy_idle_and_lost_are_all_device_seconds(rows: list[Row]) -> None:
    found = summary(rows)
    pool = found.pools["local"]
    assert pool.total == pytest.approx(device_seconds(rows))
    assert min(pool.idle, pool.lost, *pool.busy.values(), *found.wall.values(), 0) >= -1e-9
    tail = [row for row in rows if row["event"] != "start"]
    if all(row["event"] == "step" for row in tail) and len(tail):
        upto = spent(rows, "device-hours")
        assert 3600 * max(upto.values()) <= pool.total + 1e-6


@given(histories())
def test_nothing_that_was_spent_vanishes_when_the_run_is_killed_again(rows: list[Row]) -> None:
    """Resumed from step 1 and killed before it had taken one: 3 steps had been paid for, and the compute of
    the run was that of the first."""
    found = summary(rows)
    assert found.compute["flops"] == sum(found.flops.values())
    training = found.pools["local"].total - found.evaluation.device_seconds
    assert 3600 * found.compute["device-hours"] == pytest.approx(training)
    assert found.compute["steps"] == found.steps


@given(histories(), st.sampled_from(sorted(AXES)))
def test_compute_grows_from_step_to_step_and_no_row_changes_what_was_before(
    rows: list[Row], axis: str
) -> None:
    whole = spent(rows, axis)
    steps = sorted(whole)
    assert steps == list(range(len(steps))) and whole[0] == 0
    assert all(whole[one] <= whole[one + 1] for one in steps[:-1])
    for cut in range(len(rows)):
        if not any(row["event"] == "start" for row in rows[cut:]):
            assert spent(rows[:cut], axis).items() <= whole.items()


def test_cut_at_every_byte_nothing_but_the_torn_row_is_lost(tmp_path: Path) -> None:
    """A kill in the middle of a line: readers leave the torn row out, the next writer cuts it off."""
    run, rows = folder(tmp_path), [killed_and_resumed()[at] for at in (0, 3, 9)]
    run.ledger.append(*rows)
    content = run.ledger.path.read_bytes()
    ends = [at for at, byte in enumerate(content, start=1) if byte == ord("\n")]
    for size in range(len(content) + 1):
        run.ledger.path.write_bytes(content[:size])
        whole = sum(end <= size for end in ends)
        assert read(run) == rows[:whole]
        if size % 37 == 0 and 0 < whole < len(rows):
            with ledger(RunFolder(run.path)).session(0):
                pass
            assert read(run)[:whole] == rows[:whole]
            assert [row["event"] for row in read(run)[whole:]] == ["start", "end"]


@settings(max_examples=20, deadline=None)
@given(histories())
def test_where_a_session_is_split_changes_no_sum(rows: list[Row]) -> None:
    """A process that ends and is followed at once by another has spent what one would have."""
    for at in range(1, len(rows)):
        row = rows[at - 1]
        if row["event"] not in ("step", "eval") or rows[at]["event"] == "end":
            continue
        first = next(one for one in rows if one["event"] == "start" and one["session"] == row["session"])
        more = start(99, row["ended_at"], row["step"], first["pools"]["local"]["devices"], loading=0.0)
        split = [*rows[:at], more, *rows[at:]]
        for axis in ("device-hours", "flops", "tokens", "money"):
            assert spent(split, axis) == pytest.approx(spent(rows, axis))


# ---- the writer


class Clock(SteadyClock):
    """Time that a test moves."""

    def __init__(self, started: float = 0.0) -> None:
        self.started = self.now = started

    def __call__(self) -> float:
        return self.now


def ledger(run: RunFolder, at: float | Clock = 0.0, **terms: Any) -> Ledger:
    clock = at if isinstance(at, Clock) else Clock(at)
    return Ledger(folder=run, terms=Terms(**terms), clock=clock)


def work(**changes: Any) -> Row:
    row = a_step(1, 1, 0.0)
    return {key: row[key] for key in ("tokens", "flops")} | changes


def test_the_rows_of_a_session(tmp_path: Path) -> None:
    clock = Clock(100.0)
    accounts = ledger(
        folder(tmp_path), clock, devices=8, price_per_device_hour=2.5, currency="EUR", recipe="ab"
    )
    with accounts.session(0), accounts.session(0):  # the loop's is that of the one around it
        clock.now = 110.0
        accounts.step(1, 6.0, {"sample": 3.0, "train": 2.0}, work())
        accounts.evaluation(1, "eval", 2.0, {"tokens": {"sampled": 9}})
        accounts.why = "interrupted"
    first, step, scored, end = read(accounts.folder)
    assert (first["session"], first["process_started"], first["recipe"]) == (1, 100.0, "ab")
    assert step["pools"]["local"] == {"devices": 8, "busy": {"sample": 3.0, "train": 2.0}, "idle": 1.0}
    assert (scored["set"], scored["pools"]["local"]["busy"]) == ("eval", {"eval": 2.0})
    assert (end["why"], end["step"]) == ("interrupted", 1) and "seconds" not in end
    assert summary(read(accounts.folder)).currency == "EUR"


def test_work_that_an_exception_ends_is_lost_and_the_session_says_why(tmp_path: Path) -> None:
    clock = Clock()
    accounts = ledger(folder(tmp_path), clock)
    with pytest.raises(ZeroDivisionError), accounts.session(0):
        accounts.step(1, 0.0, {}, work())
        clock.now = 7.0
        raise ZeroDivisionError
    rows = read(accounts.folder)
    assert [row["event"] for row in rows] == ["start", "step", "end"]
    assert rows[2]["seconds"] == 7.0 and rows[2]["why"] == "failed: ZeroDivisionError"
    assert summary(rows).wall["lost"] == 7.0 and summary(rows).wall["between"] == 0.0


def killed(run: RunFolder, at: float) -> None:
    """A process that began at ``at``, finished one step in the same second, and was killed later."""
    one = ledger(run, at)
    one._append_start(0)
    one.step(1, 0.0, {}, work())


def test_what_a_killed_process_did_after_its_last_row_is_unknown(tmp_path: Path) -> None:
    """It is in no sum, and the notes name its bound; the clock of the next one may be behind."""
    run = folder(tmp_path)
    killed(run, 1000.0)
    for began in (1020.0, 900.0):
        with ledger(run, began).session(1):
            pass
    rows = read(run)
    assert [row["event"] for row in rows] == ["start", "step", "start", "end", "start", "end"]
    assert rows[4]["clock_back"] == 120.0
    notes = summary(rows).notes
    assert any("Session 1 was killed" in note and "20 s later" in note for note in notes)
    assert any("120 s behind" in note for note in notes)
    assert not any("Session 2 was" in note for note in notes)
    assert summary(rows).wall["lost"] == 0.0


# ---- what is refused


def test_money_needs_a_price_and_one_currency() -> None:
    rows = killed_and_resumed()
    free = [row | {"price_per_device_hour": 0.0} if row["event"] == "start" else row for row in rows]
    with pytest.raises(
        ValueError,
        match=r"session 1 .* no price: give it one with --price-per-device-hour, or count in device-hours",
    ):
        spent(free, "money")
    assert summary(free).money is None and "money" not in summary(free).compute
    mixed = [
        row | {"currency": "EUR"} if row["event"] == "start" and row["session"] == 2 else row for row in rows
    ]
    with pytest.raises(ValueError, match="paid in EUR and USD"):
        spent(mixed, "money")
    assert summary(mixed).money is None


def test_a_price_may_come_later_and_a_bill_says_why_it_is_missing() -> None:
    rows = killed_and_resumed()
    assert not summary(rows).notes
    free = [row | {"price_per_device_hour": 0.0} if row["event"] == "start" else row for row in rows]
    ask = "is not known (--price-per-device-hour gives one)."
    assert summary(free).notes == (f"There is no bill: the price of the run {ask}",)
    half = killed_and_resumed(price=0.0)
    assert summary(half).notes == (f"There is no bill: the price of session 1 {ask}",)
    assert set_price(half, 2.0) == rows and set_price(rows, 9.0) == rows
    assert spent(set_price(half, 2.0), "money") == spent(rows, "money")
    mixed = [row | {"currency": "EUR"} if row.get("session") == 2 else row for row in rows]
    assert summary(mixed).notes == ("There is no bill: it was paid in EUR and USD.",)


def test_a_ledger_that_was_begun_anew_does_not_look_whole() -> None:
    """A damaged ledger was to be renamed, "and a new ledger begins": at step 40, and steps 41 and 42 were
    then the whole compute of the run."""
    rows = [start(1, 0.0, step=40), a_step(1, 41, 20.0), a_step(1, 42, 30.0)]
    for axis in set(AXES) - {"steps"}:
        with pytest.raises(ValueError, match=r"ledger of the run begins at step 40, .* count in steps"):
            spent(rows, axis)
    found = summary(rows)
    assert spent(rows, "steps")[42] == 42 and found.compute == {"steps": 42}
    assert found.notes == ("The ledger begins at step 40: what was spent before is not in these sums.",)


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("not json", "line 2 of .* is not JSON"),
        ('{"step":1,"wall_s":2.0}', "line 2 of .* has no 'event': .* damaged, or of a version"),
        ('{"event":"step","session":1,"step":1}', "line 2 of .* has no 'seconds'"),
        ('{"event":"eval","session":1,"step":1,"seconds":null}', "line 2 of .* has None for 'seconds'"),
        ('{"event":"dance"}', "line 2 of .* has no 'event'"),
        ("7", "line 2 of .* is no JSON object"),
        (json.dumps(a_step(1, 1, 10.0) | {"pools": {"local": 1}}), "has {'local': 1} for 'pools'"),
        (json.dumps(a_step(1, 1, 10.0) | {"tokens": {}}), "does not say how many tokens were sampled"),
    ],
)
def test_a_ledger_that_breaks_in_the_middle_is_refused_in_words(
    tmp_path: Path, line: str, output: str
) -> None:
    run = folder(tmp_path)
    run.ledger.append(start(1, 0.0))
    with run.ledger.path.open("a") as file:
        file.write(line + "\n" + json.dumps(a_step(1, 1, 10.0)) + "\n")
    with pytest.raises(ValueError, match=output):
        read(run)
    with pytest.raises(ValueError, match=output), ledger(run).session(0):
        pass


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree of lists and dicts, as the keys that lead there."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*above, key)
        if isinstance(below, dict | list):
            yield from places(below, (*above, key))


@given(st.data())
def test_whatever_stands_in_a_row_is_added_up_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows = json.loads(json.dumps(killed_and_resumed()))
    *above, last = data.draw(st.sampled_from([place for place in places(rows) if len(place) > 1]))
    within = reduce(lambda tree, key: tree[key], above, rows)
    junk = data.draw(st.sampled_from([None, [], {}, "x", {"x": None}, {"x": {"x": 1}}, [1], 7, 2.5, "gone"]))
    if junk == "gone":
        del within[last]
    else:
        within[last] = junk
    run = folder(tmp_path_factory.mktemp("run"))
    run.ledger.append(*rows)
    try:
        read(run)
    except ValueError as error:
        assert str(error).startswith("line ") and "the ledger is damaged" in str(error)
    else:
        summary(rows)


def test_a_ledger_begins_with_a_start(tmp_path: Path) -> None:
    """Its first row says on what the run is; without it no second has a price or a device."""
    run = folder(tmp_path)
    run.ledger.append(a_step(1, 1, 10.0))
    with pytest.raises(ValueError, match=r"line 1 of .* is not the start of a session"):
        list(check_ledger(run.ledger))


def test_several_pools_each_on_its_own_devices() -> None:
    """What a pipeline of processes will write: samplers and a trainer side by side, idle where they wait."""

    def pool(devices: int, idle: float, **busy: float) -> Mapping[str, Any]:
        return {"devices": devices, "busy": busy, "idle": idle}

    pools = {"samplers": pool(6, 1.0, sample=9.0), "trainer": pool(2, 6.0, train=4.0)}
    held = {name: {"devices": one["devices"], "device": "H200"} for name, one in pools.items()}
    rows = [start(1, 0.0) | {"pools": held}, a_step(1, 1, 16.0) | {"pools": pools}]
    found = summary(rows)
    assert found.pools["samplers"].busy == {"sample": 54.0} and found.pools["samplers"].idle == 6 * (
        5 + 1 + 1
    )
    assert found.pools["trainer"].total == 2 * 16
    assert 3600 * spent(rows, "device-hours")[1] == pytest.approx(8 * 16)
