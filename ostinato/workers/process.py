"""A child process: killed as a group, its exit described in words, ended when its parent ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TAIL_BYTES = 1 << 14
REAP_S = 30.0  # limit for the kernel to end a killed process


class Child:
    """``command`` as a process in its own session, so that the parent handles Ctrl-C, and the whole group can
    be killed. Its output is appended to ``log``, or goes to the stderr of this process.

    With ``lifeline`` its stdin is a pipe whose other end only this process has. The pipe closes however this
    process ends, even by kill -9; the child has to watch it (``end_with_parent``, or ``guard.py`` around
    another command). Without, stdin is empty.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        lifeline: bool = False,
        environ: Mapping[str, str] | None = None,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._log = log
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("ab")) if log is not None else 2
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
                cwd=folder,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def describe_end(self) -> str:
        """The end of the process: "exit status 3", "killed by signal 9"; "" while it runs."""
        code = self._process.poll()
        return "" if code is None else describe_ending(code)

    def wait(self, within_s: float) -> str:
        """``describe_end``, after at most ``within_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, within_s))
        return self.describe_end()

    def hang_up(self) -> None:
        """Close the lifeline, if there is one."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill_group(self) -> None:
        """Kill its process group: the process and those that it started, unless they have left the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # EPERM: a zombie on macOS
            os.killpg(self.pid, signal.SIGKILL)

    def close(self, within_s: float) -> str:
        """Hang up, wait for ``within_s``, kill its group and reap it; returns its end as ``describe_end``
        does."""
        self.hang_up()
        self.wait(within_s)
        self.kill_group()
        return self.wait(REAP_S)

    def last_lines(self, count: int) -> str:
        """The last ``count`` lines of its log, as one line."""
        return last_lines(self._log, count) if self._log is not None else ""


def describe_ending(code: int) -> str:
    """A return code of ``subprocess`` in words."""
    return f"exit status {code}" if code >= 0 else f"killed by signal {-code}"


def last_lines(log: Path, count: int) -> str:
    """The last ``count`` lines of a file that are not empty, as one line: "a | b"; "" for an empty file, and
    a note for an unreadable one. Only the last ``TAIL_BYTES`` are read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"not to be read ({error})"
    return " | ".join([line.strip() for line in lines if line.strip()][-count:])


def end_with_parent(leave: Callable[[str], None]) -> None:
    """In a child with a lifeline: start a thread that calls ``leave`` with a sentence when the parent has
    ended."""

    def wait_for_parent() -> None:
        while os.read(0, 1 << 10):
            pass
        leave("the process that started this one has ended")

    threading.Thread(target=wait_for_parent, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def witness(sentence: str, folder: Path | None) -> Iterator[None]:
    """If this process ends in the block, for any reason, a helper prints ``sentence`` and, 5 s later, removes
    ``folder``.

    The helper is a shell that reads from a pipe, which the kernel closes even if this process is killed.
    """
    script = (
        'read -r word; [ "$word" = done ] && exit; echo "$1" >&2; [ -z "$2" ] || { sleep 5; rm -rf "$2"; }'
    )
    command = ["/bin/sh", "-c", script, "witness", sentence, str(folder or "")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as helper:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                helper.communicate(b"done\n")
