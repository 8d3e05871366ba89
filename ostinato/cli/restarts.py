"""``--restarts N``: the session of a run is a child process, and is begun again after a loss.

    ostinato train RECIPE --restarts 3   ->   ostinato session RUN --recipe RECIPE   ->   ... the same again

A loss is an end that Python could not handle (``kill -9``, no memory, a crash in C, Ray's exit when its
daemon is gone), or the exit code LOST, by which a ``failure.Lost`` ends a run. A session that finds a recipe
in RUN resumes it, to the same bits, so a loss costs only time. Any other end is final."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ostinato.lock import is_abandoned
from ostinato.parallel.launch import Place
from ostinato.run import RunFolder
from ostinato.terminal import say
from ostinato.workers.process import describe_ending, end_with_parent

LOST = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
MOST_IDLE = 2  # restarts in a row without a step that no session had done before
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(run: Path, restarts: int, command: Sequence[str]) -> int:
    """Run ``command`` as sessions of ``run``, at most 1 + ``restarts``, fewer after MOST_IDLE restarts in a
    row without a new step; returns the exit code of the last, for a signal 128 + its number. Each restart is
    a row of restarts.jsonl.

    Raises ValueError for a rank that torchrun has started."""
    if Place.of(os.environ) is not None:
        raise ValueError(
            "--restarts is for ranks that ostinato starts; torchrun has --max-restarts (ostinato resume RUN)"
        )
    folder = RunFolder(run)
    most_steps, idle = _steps(folder), 0
    with _Session(command) as session:
        for number in range(restarts + 1):
            code = session.run()
            num_steps = _steps(folder)
            idle = idle + 1 if number and num_steps <= most_steps else 0
            most_steps = max(most_steps, num_steps)
            if session.stopped or not is_loss(code, run):
                break
            cause = describe_ending(code) if code != LOST else "it lost what its last line names"
            if number == restarts or idle == MOST_IDLE:
                reason = (
                    "all restarts are used" if number == restarts else f"{idle} in a row made no progress"
                )
                say(f"ostinato: {cause}; {reason}; to go on: ostinato resume {run}", error=True)
                break
            row = {
                "at": time.time(),
                "restart": number + 1,
                "of": restarts,
                "step": num_steps,
                "cause": cause,
            }
            folder.restarts.append(row)
            say(f"restart {number + 1} of {restarts} after step {num_steps}: {cause}", error=True)
    return code if code >= 0 else 128 - code


def session_of(run: Path, *arguments: str) -> list[str]:
    """The command of a session of ``run``."""
    return [sys.executable, "-m", "ostinato", "session", str(run), *arguments]


def is_loss(code: int, run: Path) -> bool:
    """Whether an exit code of a session of ``run``, negative for a signal, is a loss."""
    return code == LOST or (code < 0 and -code not in PASSED_ON) or (code == 1 and is_abandoned(run))


def end_with_supervisor() -> None:
    """In a session: finish the step and save, as after SIGTERM, when the supervising process is gone."""
    end_with_parent(lambda why: os.kill(os.getpid(), signal.SIGTERM))


class _Session:
    """Runs ``command`` as a child in its own process group and passes signals on to it, so that each arrives
    once. The child ends when this process does (``end_with_supervisor``)."""

    def __init__(self, command: Sequence[str]) -> None:
        self.stopped = False  # by a signal to this process
        self._command, self._waiting = command, list[int]()  # signals that came before the child was there
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Session:
        ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]  # nohup
        self._before = {
            number: signal.signal(number, self._pass_on) for number in PASSED_ON if number not in ignored
        }
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
    """Number of finished steps, by metrics.jsonl."""
    return max((row["step"] for row in folder.metrics.rows()), default=0)
