"""``--restarts N``: the session of a run is a child process, and is begun again after a loss.

    ostinato train RECIPE --restarts 3   ->   ostinato session RUN --recipe RECIPE   ->   ... the same again

A loss is an end that Python knew nothing of (``kill -9``, no memory, a crash in C, Ray's exit where its
daemon is gone), or one by the exit code LOST: a ``failure.Lost`` ended the run by name. A session that finds
a recipe in RUN resumes it, to the same bits: a loss costs time and nothing else. Other ends are the run's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ostinato.lock import is_left
from ostinato.parallel.launch import Place
from ostinato.run import RunFolder
from ostinato.terminal import say
from ostinato.workers.process import end_with_parent, ending

LOST = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
MOST_IDLE = 2  # restarts in a row without a step that no session had done before
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(run: Path, restarts: int, command: Sequence[str]) -> int:
    """The exit code of the last session of ``run``, each of which is ``command``; 128 and its number for a
    signal. There are at most 1 + ``restarts``, fewer after MOST_IDLE restarts in a row without a new step.
    Each restart is a row of restarts.jsonl.

    Raises ValueError for a rank that torchrun has started."""
    if Place.of(os.environ) is not None:
        raise ValueError(
            "--restarts is for ranks that ostinato starts; torchrun has --max-restarts (ostinato resume RUN)"
        )
    folder = RunFolder(run)
    most, idle = _steps(folder), 0
    with _Session(command) as session:
        for number in range(restarts + 1):
            code = session.run()
            done = _steps(folder)
            idle = idle + 1 if number and done <= most else 0
            most = max(most, done)
            if session.stopped or not is_loss(code, run):
                break
            cause = ending(code) if code != LOST else "it lost what its last line names"
            if number == restarts or idle == MOST_IDLE:
                why = "all restarts are used" if number == restarts else f"{idle} in a row made no progress"
                say(f"ostinato: {cause}; {why}; to go on: ostinato resume {run}", error=True)
                break
            row = {"at": time.time(), "restart": number + 1, "of": restarts, "step": done, "cause": cause}
            folder.restarts.append(row)
            say(f"restart {number + 1} of {restarts} after step {done}: {cause}", error=True)
    return code if code >= 0 else 128 - code


def session_of(run: Path, *arguments: str) -> list[str]:
    """The command of a session."""
    return [sys.executable, "-m", "ostinato", "session", str(run), *arguments]


def is_loss(code: int, run: Path) -> bool:
    """Of the exit code of a session of ``run``, as ``subprocess`` has it."""
    return code == LOST or (code < 0 and -code not in PASSED_ON) or (code == 1 and is_left(run))


def end_with_supervisor() -> None:
    """In a session: when the process that restarts it is gone, finish the step and save, as after SIGTERM."""
    end_with_parent(lambda why: os.kill(os.getpid(), signal.SIGTERM))


class _Session:
    """``command`` as a child in a process group of its own, so that each signal to this process reaches it
    once, from here. It ends when this process does (``end_with_supervisor``)."""

    def __init__(self, command: Sequence[str]) -> None:
        self.stopped = False  # by a signal to this process
        self._command, self._waiting = command, list[int]()  # signals that came before the child was there
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Session:
        ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]  # nohup
        self._before = {n: signal.signal(n, self._pass_on) for n in PASSED_ON if n not in ignored}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self) -> int:
        with subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0) as child:
            self._child = child
            while self._waiting:
                child.send_signal(self._waiting.pop())
            code = child.wait()
            self._child = None
        return code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self._child is None:
            self._waiting.append(number)
        else:
            self._child.send_signal(number)


def _steps(folder: RunFolder) -> int:
    """Finished ones, as the newest row of metrics.jsonl has them."""
    return max((row["step"] for row in folder.metrics.rows()), default=0)
