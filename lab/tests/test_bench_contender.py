"""A contender of a benchmark that goes wrong is named, and nothing of it stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lab.contender import Contender, ContenderFailed

READY = "import sys, json; print(json.dumps({'ready': 'me'}), flush=True);"


def start(script: str, tmp_path: Path, limit_s: float = 20.0) -> Contender:
    return Contender("peer", [sys.executable, "-c", script], tmp_path / "log", limit_s=limit_s)


def test_it_answers(tmp_path: Path) -> None:
    with start(
        READY + "print(json.dumps({'n': json.loads(input())['n'] + 1}), flush=True)", tmp_path
    ) as peer:
        assert peer.label == "me" and peer.ask(n=3) == {"n": 4}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('no such model')", "peer ended; .* no such model"),
        ("print('Loading weights')", "peer answered what is no JSON"),
    ],
)
def test_one_that_fails_is_named(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match=said):
        start(script, tmp_path)


def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    """It runs in a session of its own: when its constructor failed it outlived the benchmark."""
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ContenderFailed, match="gave no answer"):
        start(script, tmp_path, limit_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
