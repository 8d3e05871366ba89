"""What ``--restarts`` begins again, what it leaves, and when it gives up; sessions here are shell scripts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ostinato.cli.restarts import LOST, session_of, supervise
from ostinato.run import RunFolder

STEP = "echo '{\"step\": '$(($(cat metrics.jsonl 2>/dev/null | wc -l) + 1))'}' >> metrics.jsonl; "
COUNT = "echo >> sessions; "


def sessions(run: Path, script: str, restarts: int) -> tuple[int, int]:
    """(exit code, sessions) of a run whose sessions are ``script``."""
    code = supervise(run, restarts, ["/bin/sh", "-c", f"cd {run}; {COUNT}{script}"])
    return code, len((run / "sessions").read_text())


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", (0, 1)),
        ("exit 1", (1, 1)),  # a named failure
        ("exit 2", (2, 1)),  # the user's
        ("exit 130", (130, 1)),  # Ctrl-C
        ("kill -TERM $$", (143, 1)),  # of somebody else: it is meant to end
        (f"{STEP} exit {LOST}", (LOST, 4)),
        (f"{STEP} kill -KILL $$", (137, 4)),
        (
            f"{STEP} echo me > .lock; exit 1",
            (1, 4),
        ),  # past all of Python: the lock was not given back
        (f"{STEP} kill -SEGV $$", (139, 4)),
        (f"exit {LOST}", (LOST, 3)),  # two restarts in a row without a step
    ],
)
def test_only_a_loss_is_begun_again(tmp_path: Path, script: str, expected: tuple[int, int]) -> None:
    assert sessions(tmp_path, script, 3) == expected
    rows = list(RunFolder(tmp_path).restarts.rows())
    assert [row["restart"] for row in rows] == list(range(1, expected[1]))


def test_a_restart_that_is_not_lost_ends_it(tmp_path: Path) -> None:
    assert sessions(tmp_path, f"{STEP} [ $(wc -l < metrics.jsonl) = 2 ] || kill -9 $$", 5) == (0, 2)
    (row,) = RunFolder(tmp_path).restarts.rows()
    assert (row["step"], row["of"], row["cause"]) == (1, 5, "killed by signal 9")


def test_a_signal_reaches_the_session_once_and_ends_the_restarts(tmp_path: Path) -> None:
    script = f"trap 'echo >> heard; exit {LOST}' INT; touch begun; while :; do sleep 0.02; done"

    def interrupt() -> None:
        while not (tmp_path / "begun").exists():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt).start()
    assert sessions(tmp_path, script, 3) == (LOST, 1)
    assert len((tmp_path / "heard").read_text()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_of_torchrun_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--max-restarts"):
        supervise(tmp_path, 1, session_of(tmp_path))
