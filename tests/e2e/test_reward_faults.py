"""Faults injected into reward functions, in real processes: each ends in bounded time with its name, nothing
is scored 0, no process is left behind, and the next group is graded by the same grader. Without isolation
where the functions write down who they are; with it: tests/unit/reward/test_isolation.py."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import gone, wait_until
from nouns import completion, episode, group_of

from ostinato.reward.workers import WorkerGrader
from ostinato.types import Group, Prompt, Reward

pytestmark = pytest.mark.slow

TIMEOUT_S = 0.5
PATIENCE_S = 30.0  # where what is tested is not the limit: on a busy machine half a second is soon over

FAULTS = r'''
import ctypes, fcntl, os, re, signal, subprocess, sys, threading, time

def reward(completions, fault, pids, **columns):
    """Does what the column says; the second group's column says "none"."""
    try:
        with open(pids[0], "a") as file:
            file.write(f"{os.getpid()}\n")
    except OSError:  # isolated: only reading is possible, and a lock
        fcntl.flock(os.open(pids[0], os.O_RDONLY), fcntl.LOCK_EX)
    return FAULTS[fault[0]](completions) or [1.0 for _ in completions]

def steady(completions, **columns):
    return [0.25 for _ in completions]

def sleeps(completions):
    time.sleep(1000)

def sleeps_in_c(completions):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the interpreter's lock: no thread of Python runs meanwhile

def regular_expression(completions):
    re.match(r"(a+)+b", "a" * 60)

def child_hangs(completions):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(os.environ["CHILD_PID"], "w") as file:
        file.write(str(child.pid))
    child.wait()

def raises(completions):
    raise KeyError("a column that is not there")

def raises_base(completions):
    raise KeyboardInterrupt

def exits(completions):
    sys.exit("done here")

def dies(completions):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(completions):
    os._exit(7)

def nan(completions):
    return [float("nan") for _ in completions]

def wrong_length(completions):
    return [1.0 for _ in range(10_000_000)]

def prints(completions):
    print("x" * 5_000_000)
    sys.stdout.flush()

def shouts(completions):
    raise ValueError("x" * 50_000_000)

def scribbles(completions):
    for fd in range(3, 64):
        try:
            os.write(fd, b"not a frame" * 100)
        except OSError:
            pass

def closes(completions):
    os.closerange(3, 64)

def leaves_a_thread(completions):
    threading.Thread(target=time.sleep, args=(1000,)).start()

def none(completions):
    return None

FAULTS = {name: value for name, value in globals().items() if callable(value)}
'''


def group(fault: Any, pids: Path) -> Group:
    requested = Prompt(uid="p", text="?", columns={"fault": fault, "pids": str(pids)})
    output = [episode(completion(1, text="a"), seed=(k,)) for k in range(3)]
    return replace(group_of(*output), prompt=requested, step=0)


def grade(grader: WorkerGrader, group: Group) -> list[Reward]:
    return asyncio.run(grader.grade(group))


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHILD_PID", str(tmp_path / "child"))
    path = tmp_path / "faulty.py"
    path.write_text(FAULTS)
    return path


@pytest.mark.parametrize(
    ("fault", "name", "detail"),
    [
        ("sleeps", "timeout", "no verdict in 0.5 s"),
        ("sleeps_in_c", "timeout", "no verdict in 0.5 s"),
        ("regular_expression", "timeout", "no verdict in 0.5 s"),
        ("child_hangs", "timeout", "no verdict in 0.5 s"),
        ("raises", "raised", "KeyError: 'a column that is not there'"),
        ("raises_base", "raised", "KeyboardInterrupt"),
        ("exits", "raised", "SystemExit: done here"),
        ("dies", "died", "killed by signal 9"),
        ("leaves", "died", "exit status 7"),
        ("nan", "non_finite", "nan"),
        ("wrong_length", "wrong_length", "10000000 values for 3"),
        ("shouts", "raised", "ValueError: xxx"),
        ("scribbles", "died", ""),
        ("closes", "died", ""),
    ],
)
def test_a_fault_is_named_counted_bounded_and_over(file: Path, fault: Any, name: str, detail: str) -> None:
    pids, limit = file.with_name("pids"), TIMEOUT_S if name == "timeout" else PATIENCE_S
    with WorkerGrader([f"{file}:reward", f"{file}:steady"], isolation="off", timeout_s=limit) as grader:
        grader.check()
        rewards = grade(grader, group(fault, pids))
        assert [reward.value for reward in rewards] == [None] * 3, (
            "never 0, nor the sum of the other functions"
        )
        assert rewards[0].reason.startswith(f"{name}: reward: ")
        assert detail in rewards[0].reason
        assert len(rewards[0].reason) < 500
        assert rewards[0].parts == {"reward": None, "steady": 0.25}
        assert grader.counters[f"rewards/reward/{name}"] == 3
        assert [reward.value for reward in grade(grader, group("none", pids))] == [1.25] * 3
    used = [int(line) for line in pids.read_text().split()]
    child = file.with_name("child")
    used += [int(child.read_text())] if child.exists() else []
    assert wait_until(lambda: all(gone(pid) for pid in used), 120), "a process was left behind"


def test_a_column_that_cannot_travel_is_named(file: Path) -> None:
    pids = file.with_name("pids")
    with WorkerGrader([f"{file}:reward", f"{file}:steady"], isolation="off") as grader:
        (reward, *_) = grade(grader, group(lambda: None, pids))
        assert reward.value is None
        assert [part.split(":")[0] for part in reward.reason.split("; ")] == ["unpicklable", "unpicklable"]
        assert grader.counters["rewards/reward/unpicklable"] == 3
        assert [reward.value for reward in grade(grader, group("none", pids))] == [1.25] * 3


def test_a_dead_worker_is_asked_again_and_a_hung_one_is_not(file: Path) -> None:
    pids = file.with_name("pids")
    with WorkerGrader([f"{file}:reward"], isolation="off", timeout_s=TIMEOUT_S) as grader:
        grade(grader, group("dies", pids))
        assert (grader.counters["reward_workers/died"], grader.counters["reward_workers/retried"]) == (2, 1)
        grade(grader, group("sleeps", pids))
        assert (grader.counters["reward_workers/hung"], grader.counters["reward_workers/retried"]) == (1, 1)


def test_prints_go_past_the_protocol_and_threads_do_not_hold_the_process(file: Path) -> None:
    pids = file.with_name("pids")
    with WorkerGrader([f"{file}:reward"], isolation="off", timeout_s=5) as grader:
        assert [reward.value for reward in grade(grader, group("prints", pids))] == [1.0] * 3
        assert [reward.value for reward in grade(grader, group("leaves_a_thread", pids))] == [1.0] * 3


def test_a_worker_killed_between_two_groups_is_replaced(file: Path) -> None:
    pids = file.with_name("pids")
    with WorkerGrader([f"{file}:reward"], isolation="off") as grader:
        grade(grader, group("none", pids))
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        assert [reward.value for reward in grade(grader, group("none", pids))] == [1.0] * 3
        assert grader.counters == {"reward_workers/died": 1, "reward_workers/retried": 1}


def test_closing_ends_a_call_in_flight(file: Path) -> None:
    async def close_early(grader: WorkerGrader) -> list[Reward]:
        task = asyncio.create_task(grader.grade(group("sleeps", file.with_name("pids"))))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(grader.close)
        return await task

    rewards = asyncio.run(close_early(WorkerGrader([f"{file}:reward"], isolation="off", timeout_s=60)))
    assert rewards[0].value is None
    assert rewards[0].reason.startswith("died: reward: ")


def test_an_import_that_hangs_or_dies_is_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for body, limit, sentence in [
        ("import time; time.sleep(1000)", TIMEOUT_S, "took more than 0.5 s"),
        ("import os; os._exit(3)", PATIENCE_S, "exit status 3"),
        ("1 / 0", PATIENCE_S, "ZeroDivisionError"),
        ("import no_such_package", PATIENCE_S, "No module named 'no_such_package'"),
        ("def reward(:", PATIENCE_S, "SyntaxError"),
    ]:
        monkeypatch.setattr("ostinato.reward.workers.START_TIMEOUT_S", limit)
        file.write_text(body)
        with WorkerGrader([f"{file}:reward"]) as grader, pytest.raises(ValueError, match=sentence):
            grader.check()


@pytest.mark.parametrize(
    ("fault", "isolation"),
    [
        ("sleeps", "off"),
        ("regular_expression", "off"),
        ("sleeps_in_c", "auto"),
        ("regular_expression", "auto"),
    ],
)
def test_no_worker_outlives_a_killed_trainer(file: Path, fault: str, isolation: str) -> None:
    """The trainer is killed with -9 while a reward hangs; a regular expression holds the interpreter's
    lock, so no thread of the worker can notice: the kernel's limit on CPU time ends it, or its keeper."""
    pids = file.with_name("pids")
    pids.touch()
    script = (
        "import asyncio, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_reward_faults import group\n"
        "from ostinato.reward.workers import WorkerGrader\n"
        "from pathlib import Path\n"
        f"grader = WorkerGrader([{str(file) + ':reward'!r}], timeout_s={TIMEOUT_S}, "
        f"isolation={isolation!r})\n"
        "grader.check()\n"
        "grader._workers[0]._timeout_s = 60\n"  # the trainer is still waiting when it is killed
        f"asyncio.run(grader.grade(group({fault!r}, Path({str(pids)!r}))))\n"
    )
    here = Path(__file__)
    paths = [str(folder) for folder in here.parents[:3]]
    trainer = subprocess.Popen([sys.executable, "-c", script, *paths])
    try:
        assert wait_until(lambda: pids.read_text().endswith("\n") or is_locked(pids), PATIENCE_S)
    finally:
        trainer.kill()
        trainer.wait()
    named = pids.read_text()
    assert wait_until(lambda: gone(int(named)) if named else not is_locked(pids), PATIENCE_S)
