"""A headless Chromium at work for one process: JavaScript in one page, by the DevTools protocol over pipes.

    Browser.evaluate(expression) -> value       at most ``timeout_s``; then the browser is killed
    Browser.screenshot(width, height) -> PNG

No port is opened and nothing is fetched (no name resolves). What goes wrong is a BrowserFailed, and the next
call starts a new browser. Not for several threads at once.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import weakref
from typing import Any

DEBIAN = "/usr/lib/chromium"  # the programs themselves; on the path there are scripts that start them
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 30.0
READ_BYTES = 1 << 16
GONE = ("Target.targetCrashed", "Target.detachedFromTarget", "Inspector.targetCrashed")
FIRST_FREE = 10  # file descriptors below are given to the browser
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *(
        "--disable-extensions",
        "--disable-breakpad",
        "--no-zygote",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ),
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-blink-features=ComputedAccessibilityInfo",
    "--remote-debugging-pipe",
)


class BrowserFailed(Exception):
    """It is not installed, did not start, ended, or did not answer in time."""


def installed() -> str:
    """The path of a browser; empty where there is none."""
    places = (DEBIAN, None)  # None: the path
    return next((path for name in NAMES for place in places if (path := shutil.which(name, path=place))), "")


class Browser:
    """Started by the first call. ``starts`` counts processes; ``timeout_s`` is of a call, a start aside."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.starts = 0
        self.pid = 0  # of a running browser
        self.timeout_s = timeout_s
        self._pipes: tuple[int, int] = (-1, -1)  # to read from, to write to
        self._buffer = b""
        self._calls = 0
        self._session = ""
        self._profile = ""
        weakref.finalize(self, _end, state := {"pid": 0, "profile": ""})
        self._state = state

    def evaluate(self, expression: str) -> Any:
        """The value of the expression, or of the promise that it is."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        found = self._call("Runtime.evaluate", given)
        if "exceptionDetails" in found:
            detail = found["exceptionDetails"]
            text = detail.get("exception", {}).get("description", detail.get("text", ""))
            raise BrowserFailed(f"the page's script failed: {text[:300]}")
        return found["result"].get("value")

    def screenshot(self, width: int, height: int) -> bytes:
        """PNG of the page at this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)
        found = self._call("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(found["data"])

    def close(self) -> None:
        """Kill it, with all its processes."""
        _end(self._state)
        for end in self._pipes:
            if end >= 0:
                os.close(end)
        self.pid, self._pipes, self._buffer, self._session = 0, (-1, -1), b"", ""

    # ---- the process

    def _start(self) -> None:
        path = installed()
        if not path:
            raise BrowserFailed(f"no browser is installed: none of {', '.join(NAMES)}")
        self._state["profile"] = tempfile.mkdtemp(prefix="ostinato-browser-")
        command = [path, *FLAGS, f"--user-data-dir={self._state['profile']}", "about:blank"]
        ours, theirs = _pipes()
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        moved = [(os.POSIX_SPAWN_DUP2, end, fd) for fd, end in zip((3, 4), theirs, strict=True)]
        environ = {**os.environ, "HOME": self._state["profile"], "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
        try:
            self.pid = os.posix_spawn(path, command, environ, file_actions=[*quiet, *moved])
        except OSError as error:
            raise BrowserFailed(f"{path} cannot be started: {error}") from error
        finally:
            for end in theirs:
                os.close(end)
        self._pipes, self._state["pid"] = ours, self.pid
        self.starts += 1
        # A worker of rewards has a limit on CPU time for each call, which is not meant for a browser.
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(self.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (hard, hard))
        self._attach(time.monotonic() + START_S)

    def _attach(self, deadline: float) -> None:
        """To the one page."""
        while True:
            targets = self._exchange("Target.getTargets", {}, deadline)["targetInfos"]
            if pages := [one["targetId"] for one in targets if one["type"] == "page"]:
                break
            time.sleep(0.02)
        given = {"targetId": pages[0], "flatten": True}
        self._session = self._exchange("Target.attachToTarget", given, deadline)["sessionId"]

    def _call(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        try:
            if not self.pid:
                self._start()
            return self._exchange(method, given, time.monotonic() + self.timeout_s)
        except (OSError, TimeoutError, EOFError, ValueError, BrowserFailed) as error:
            self.close()
            if isinstance(error, BrowserFailed):
                raise
            raise BrowserFailed(f"{method}: {type(error).__name__} {error}".strip()) from error

    def _exchange(self, method: str, given: dict[str, Any], deadline: float) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": given}
        message |= {"sessionId": self._session} if self._session else {}
        self._write(json.dumps(message).encode() + b"\0", deadline)
        while True:
            answer = json.loads(self._read(deadline))
            if answer.get("method") in GONE:
                raise EOFError("the page has crashed")
            if answer.get("id") != self._calls:  # another event
                continue
            if "error" in answer:
                raise BrowserFailed(f"{method}: {answer['error'].get('message')}")
            return answer["result"]

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _, ready, _ = select.select([], [self._pipes[1]], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("it does not read")
            view = view[os.write(self._pipes[1], view) :]

    def _read(self, deadline: float) -> bytes:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._pipes[0]], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer in {self.timeout_s:g} s")
            chunk = os.read(self._pipes[0], READ_BYTES)
            if not chunk:
                raise EOFError("the browser has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """((ours to read, ours to write), (theirs to read, theirs to write)), none of which is inherited."""
    down, up = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for end in (*down, *up)]
    for end in (*down, *up):
        os.close(end)
    read_down, write_down, read_up, write_up = ends
    os.set_blocking(write_down, False)
    return (read_up, write_down), (read_down, write_up)


def _end(state: dict[str, Any]) -> None:
    """Its other processes end as the first one's pipes close."""
    if pid := state["pid"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if state["profile"]:
        shutil.rmtree(state["profile"], ignore_errors=True)
    state.update(pid=0, profile="")


__all__ = ["Browser", "BrowserFailed", "installed"]
