"""A headless browser, where this machine has one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def a_browser() -> str:
    """Its path; without one the test is skipped."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    return found


def dump_dom(address: str, profile: Path, *, budget_ms: int = 8000, width: int = 1280) -> str:
    """The document after its scripts have run for a while."""
    more = (f"--virtual-time-budget={budget_ms}", f"--window-size={width},900", "--dump-dom", address)
    command = [*_headless(profile), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@contextmanager
def open_page(address: str, profile: Path) -> Iterator[None]:
    """A page that runs in real time while the context lasts: streams do not come in virtual time."""
    process = subprocess.Popen(
        [*_headless(profile), "--remote-debugging-port=0", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _headless(profile: Path) -> list[str]:
    return [
        *(a_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={profile}",
    ]
