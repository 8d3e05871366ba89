"""The run folder: atomic files, logs that forgive a torn end, resume, timers."""

from __future__ import annotations

import errno
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nouns import completion

from ostinato.routes import routes_from_json
from ostinato.run import Jsonl, JsonlZst, RunFolder, atomic_folder, atomic_write, group_rows, new_run_path
from ostinato.types import Group, Prompt, Reward, Stop, Trajectory, Turn

LOGS = pytest.mark.parametrize("log_class", [Jsonl, JsonlZst])


def full_disk(path: Path) -> None:
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_atomic_write_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    source = tmp_path / "source"
    source.write_text("two")
    atomic_write(path, b"one")
    atomic_write(path, lambda temporary: shutil.copy(source, temporary))
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_full_disk_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, full_disk)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_folder_replaces_or_leaves_the_old(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for content in ("one", "two"):
        with atomic_folder(path) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text(content)
    with pytest.raises(OSError, match="No space left"), atomic_folder(path) as folder:
        full_disk(folder / "file")
    assert (path / "sub" / "file").read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_folder_after_a_crash_between_its_renames(tmp_path: Path) -> None:
    """The only window of a folder swap: the old one already moved aside, the new one not yet in place."""
    old = tmp_path / ".checkpoint.old"
    old.mkdir()
    (old / "file").write_text("survivor")
    with pytest.raises(OSError, match="No space left"), atomic_folder(tmp_path / "checkpoint") as folder:
        full_disk(folder / "file")
    assert (tmp_path / "checkpoint" / "file").read_text() == "survivor"


@LOGS
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9)), max_size=3)),
    data=st.data(),
)
def test_a_log_torn_anywhere_keeps_its_complete_rows(log_class, batches, data, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    sizes = [0]
    for batch in batches:
        log_class(path).append(*batch)
        sizes.append(path.stat().st_size)
    cut = data.draw(st.integers(0, sizes[-1]))
    with path.open("ab") as file:
        file.truncate(cut)
    rows = [row for batch in batches for row in batch]
    survivors = list(log_class(path).rows())
    assert survivors == rows[: len(survivors)]
    assert len(survivors) >= sum(len(b) for b, size in zip(batches, sizes[1:], strict=True) if size <= cut)
    log_class(path).append({"after": "the crash"})
    assert list(log_class(path).rows()) == [*survivors, {"after": "the crash"}]


@pytest.mark.parametrize("tail", [bytes(4096), b"\x28\xb5\x2f\xfd" + bytes(300), b"no frame of zstd at all"])
def test_what_a_power_cut_leaves_behind_a_log_is_cut_off(
    tail: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros behind ``inflight.jsonl.zst``, as file systems leave them after a power cut, ended every resume
    in a ZstdError."""
    log = JsonlZst(tmp_path / "inflight.jsonl.zst")
    log.append({"step": 1})
    with log.path.open("ab") as file:
        file.write(tail)
    assert list(JsonlZst(log.path).rows()) == [{"step": 1}]
    again = JsonlZst(log.path)
    again.append({"step": 2})
    assert f"{len(tail)} bytes" in caplog.text
    assert list(again.rows()) == [{"step": 1}, {"step": 2}]


def test_zeros_in_the_middle_of_a_log_name_the_file(tmp_path: Path) -> None:
    """Rows behind the damage must not be lost in silence: the user moves the file away."""
    log, random = JsonlZst(tmp_path / "trajectories.jsonl.zst"), np.random.default_rng(0)
    for step in range(3):
        log.append({"step": step, "tokens": random.integers(10**6, size=500)})
    with log.path.open("r+b") as file:
        file.seek(log.path.stat().st_size // 2)
        file.write(bytes(200))
    for reading in (log.rows, lambda: log.rows_since(2), lambda: log.keep(lambda _: True)):
        with pytest.raises(ValueError, match=r"trajectories\.jsonl\.zst is damaged .*move the file away"):
            list(reading() or ())


def test_a_log_that_grows_without_bound_is_not_expanded(tmp_path: Path) -> None:
    """640 kB in the place of ``trajectories.jsonl.zst`` became 20 GB of memory."""
    path, bomb = tmp_path / "log.zst", zstandard.ZstdCompressor(level=1).compressobj()
    path.write_bytes(b"".join(bomb.compress(bytes(1 << 23)) for _ in range(64)) + bomb.flush())
    with pytest.raises(ValueError, match=r"log\.zst grows"):
        list(JsonlZst(path).rows())


@LOGS
@pytest.mark.parametrize("row", [b"null\n", b"[1]\n", b"3\n"])
def test_a_line_that_is_no_row_names_the_file(log_class, row: bytes, tmp_path: Path) -> None:
    """``null`` and ``[1]`` in metrics.jsonl ended a resume in an AttributeError."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(row if log_class is Jsonl else zstandard.ZstdCompressor().compress(row))
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        list(log_class(path).rows())


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl"):
        list(Jsonl(path).rows())


@LOGS
def test_append_on_a_full_disk_writes_all_of_a_row_or_nothing(log_class, tmp_path: Path) -> None:
    """A full disk takes the first bytes of a write and refuses the rest; half a row must not stay behind,
    or the next one is glued to it. A file size limit does the same as a full disk, for this process only."""
    log = log_class(tmp_path / "log")
    log.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            log.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append({"step": 3})
    assert [row["step"] for row in log.rows()] == [1, 3]


@pytest.mark.parametrize("log_class", [Jsonl, JsonlZst])
def test_a_text_that_is_no_unicode_is_written_and_reads_back(
    log_class: type[Jsonl] | type[JsonlZst], tmp_path: Path
) -> None:
    """Half of a surrogate pair, in a row's column or the text of an exception, ended the run where it was
    logged, and again in every resume."""
    log, row = log_class(tmp_path / "log"), {"step": 1, "reason": "a\ud83d", "ok\ude00": "\U0001f600"}
    log.append(row)
    log.keep(lambda _: True)
    assert list(log.rows()) == [row]


def test_a_text_of_a_whole_file_is_always_written(tmp_path: Path) -> None:
    atomic_write(tmp_path / "page.html", "a\ud83d\U0001f600")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a\\ud83d\U0001f600"


def make_group(step: int) -> Group:
    answer = completion([5, 2], text="7", experts=np.zeros((2, 1, 2), np.int16))
    turn = Turn(context=np.array([1, 4], np.int32), completion=answer)
    graded = Trajectory(turns=(turn,), stop=Stop.EOS, seed=(0, step, 0, 0), reward=Reward(value=1.0))
    failed = Trajectory(turns=(), stop=Stop.ERROR, seed=(0, step, 0, 1), error="the engine gave up")
    prompt = Prompt(uid="sum/3", text="3+4=", columns={"answer": "7"})
    return Group(prompt=prompt, trajectories=(graded, failed), step=step)


def test_group_rows_hold_the_whole_trajectory(tmp_path: Path) -> None:
    log = JsonlZst(tmp_path / "t.zst")
    log.append(*group_rows(make_group(step=2)))
    first, second = log.rows()
    assert (first["step"], first["uid"], first["sample"], first["reward"]) == (2, "sum/3", 0, 1.0)
    assert first["turns"][0]["tokens"] == [5, 2] and first["turns"][0]["stop"] == "eos"
    assert routes_from_json(first["turns"][0]["experts"]).tolist() == [[[0, 0]], [[0, 0]]]
    assert second["reward"] is None and second["error"] == "the engine gave up"


def test_truncate_after_forgets_later_steps_everywhere(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", 'name = "x"\n')
    for step in range(4):
        run.write(step, {"reward": 0.5})
        run.trajectories.append(*group_rows(make_group(step)))
        run.ledger.append({"event": "step", "step": step})
    run.watch.append({"machine": "a row without a step stays"})
    for name in ("step-00000001", "step-00000002", ".step-00000001.half"):
        (run.scored / name).mkdir(parents=True)
    run.truncate_after(1)
    assert [path.name for path in run.scored.iterdir()] == ["step-00000001"]
    assert [row["step"] for row in run.metrics.rows()] == [0, 1]
    assert [row["step"] for row in run.trajectories.rows()] == [0, 0, 1, 1]
    assert len(list(run.watch.rows())) == 1
    assert len(list(run.ledger.rows())) == 4  # what is done again was paid for
    run.write(2, {"reward": 0.75})
    assert [row["step"] for row in RunFolder.open(run.path).metrics.rows()] == [0, 1, 2]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "")
    with pytest.raises(ValueError, match="is not empty; name another one or run: ostinato resume"):
        RunFolder.create(tmp_path / "run", "")
    with pytest.raises(ValueError, match=r"holds no recipe\.toml"):
        RunFolder.open(tmp_path)


def test_a_run_path_is_taken_by_one_alone(tmp_path: Path) -> None:
    """Three `train` that began in one second had one folder; two of them then got a hint to resume the live
    run of the third."""
    now = datetime(2025, 1, 2, 3, 4, 5)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: new_run_path(tmp_path, "quickstart", now), range(8)))
    name = "quickstart-20250102-030405"
    assert {path.name for path in paths} == {name, *(f"{name}-{n}" for n in range(2, 9))}
    assert all(path.is_dir() for path in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/quickstart.* cannot be written .*; set log\.dir"):
        new_run_path(tmp_path / "file", "quickstart", now)


def test_half_written_files_of_a_killed_process_are_swept_and_no_others(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "")
    run.adapter.mkdir()
    stale = [run.path / ".metrics.jsonl.a1b2c3d4", run.path / ".recipe.toml.x", run.adapter / ".adapter.x"]
    kept = [run.path / ".report.html.somebody", run.path / ".lock", run.adapter / "adapter_config.json"]
    for path in (*stale, *kept):
        path.write_text("")
    run.sweep()
    assert [path.exists() for path in (*stale, *kept)] == [False] * 3 + [True] * 3


def test_later_rows_are_read_without_the_others(tmp_path: Path) -> None:
    """Also of a log whose rows do not begin with their step, and of one that is torn."""
    log = JsonlZst(tmp_path / "log.zst")
    for step in range(1, 6):
        log.append({"step": step, "n": 1}, {"step": step, "n": 2})
    log.append({"n": 3, "step": 2}, {"n": 4, "step": 5})
    for step in range(8):
        wanted = [row for row in log.rows() if row["step"] >= step]
        assert list(log.rows_since(step)) == wanted
