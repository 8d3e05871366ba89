"""A process that answers benchmark tasks: one JSON object in, one out, every wait bounded."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.settings import environment


class ContenderFailed(Exception):
    """One sentence: who, in what, and the end of its output."""


class Contender:
    """Start ``command`` and wait until it says that it is ready; a context manager that ends it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environ: Mapping[str, str] | None = None,
        limit_s: float = 600.0,
    ) -> None:
        self.name, self._log, self._limit_s = name, log, limit_s
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(environ or {}),
                start_new_session=True,
            )
        self._pending = b""
        try:
            self.label = str(self._answer()["ready"])
        except BaseException:  # Ctrl-C too: in a session of its own it would outlive us
            self.close(patience_s=0)
            raise

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, **task: Any) -> dict[str, Any]:
        """The answer to one task; before and after it the contender is stopped. Raises ContenderFailed.

        Idle, some engines spin for a while: whatever is measured next would pay for it.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self, patience_s: float = 5.0) -> None:
        """End it, politely first, and everything that it has started."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # what an ended process was still to read
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience_s)
        self._signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failed(f"gave no answer in {self._limit_s:.0f} s")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise self._failed("ended")
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise self._failed("answered what is no JSON") from None

    def _failed(self, what: str) -> ContenderFailed:
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        return ContenderFailed(f"{self.name} {what}; the last line of {self._log} is: {last[0][:300]}")


def serve(ready: str, answer: Any) -> None:
    """The other end, for contenders written by us: ``answer(task) -> dict`` for every line of standard input.

    Standard output is kept for answers: whatever else prints goes to standard error.
    """
    import sys

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    out.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
