"""Runs a command, and ends it and all that it started when the standard input of this process closes.

The other end of that pipe is held by the program that started the command: however that program ends, even by
kill -9, the pipe closes. Run as a script in a session of its own; argv is the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0


def main() -> None:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_parent, args=(child,), daemon=True).start()
    code = child.wait()
    how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    print(f"the server ended: {how}", file=sys.stderr, flush=True)
    _kill_all()


def _end_with_the_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1 << 12):
        pass
    child.terminate()
    time.sleep(GRACE_S)
    _kill_all()


def _kill_all() -> None:
    """Kill the whole session, including this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
