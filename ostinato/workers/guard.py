"""Run a command, and end it with all processes that it started when the standard input of this process
closes.

The program that started the command holds the other end of that pipe, which closes however that program ends,
even by kill -9. Run this as a script in its own session; argv is the command.
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
    """Run the command, say how it ended, and kill the session, this process included."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    code = child.wait()
    outcome = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    print(f"the server ended: {outcome}", file=sys.stderr, flush=True)
    _kill_all()


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    """Wait until standard input closes, then terminate the child, and kill the session after GRACE_S."""
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
