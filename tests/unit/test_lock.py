"""The lock of a run folder: one writer, named to all others, gone with its process however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.config import Recipe, dump_toml
from ostinato.launch import session
from ostinato.launch.session import learn, resume
from ostinato.lock import LOCK, Locked, hold_lock
from ostinato.run import RunFolder

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from ostinato.lock import hold_lock

with hold_lock(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "600"], close_fds=False)  # as a reward worker, a rank ...
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_with_folder_holder_and_fix(tmp_path: Path) -> None:
    named = rf"run folder {tmp_path} is in use by process {os.getpid()} on \S+ since \d{{4}}-.*"
    with hold_lock(tmp_path):
        with pytest.raises(Locked, match=rf"{named}; wait .*kill {os.getpid()}"), hold_lock(tmp_path):
            pass
        (tmp_path / LOCK).write_text("")  # its holder has not written its name yet
        with pytest.raises(Locked, match="in use by another process; wait"), hold_lock(tmp_path):
            pass
    with hold_lock(tmp_path):
        pass


def test_a_killed_holder_holds_nothing_though_its_children_live(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(Locked, match=f"process {holder.pid} on"), hold_lock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        try:
            os.kill(child, 0)
            with hold_lock(tmp_path):
                pass
        finally:
            os.kill(child, 9)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A colleague's ``resume`` of a run ended in the bare error of a hidden file."""
    (tmp_path / "run").touch()
    with (
        pytest.raises(OSError, match=r"run cannot be written \(Not a directory\)"),
        hold_lock(tmp_path / "run"),
    ):
        pass


def test_a_file_system_without_locks_is_named_and_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with hold_lock(tmp_path):
        pass
    assert f"{tmp_path / LOCK} cannot be locked" in caplog.text


def test_two_never_resume_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each removed the checkpoint that the other one was writing and said "free disk space"; a third one left
    steps 1, 2, 3, 4, 4, 5, 6, 5, 7, 8 in metrics.jsonl."""
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.load("quickstart")))
    before = sorted(run.path.iterdir())

    def work(*arguments: object, **more: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(session, "_run_session", work)
    with hold_lock(run.path), pytest.raises(ValueError, match="is in use by process"):
        resume(run.path, "trainer.steps=200", quiet=True)
    assert sorted(run.path.iterdir()) == [run.path / LOCK, *before]
    with pytest.raises(AssertionError, match="work began"):
        resume(run.path, quiet=True)


@pytest.mark.parametrize("error", [ValueError("a bad recipe"), KeyboardInterrupt()])
def test_a_run_that_did_not_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def work(*arguments: object, path: Path, **more: object) -> None:
        with pytest.raises(Locked), hold_lock(path):
            pass
        raise error

    monkeypatch.setattr(session, "_run_session", work)
    with pytest.raises(type(error)):
        learn("quickstart", f"log.dir={tmp_path}", quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of an environment that did ``os.chdir("/")`` lost the folder of a relative log.dir."""
    monkeypatch.chdir(tmp_path)
    with session.open_new_folder(Recipe.parse({"log": {"dir": "here"}})) as path:
        monkeypatch.chdir("/")
        assert path.is_dir() and path.parent == tmp_path / "here"
        (path / "recipe.toml").write_text("")
    assert path.is_dir()
