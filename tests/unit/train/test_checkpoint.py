"""Checkpoints are whole or not there, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.train import checkpoint as module
from ostinato.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoints,
    find_damage,
    load_checkpoint,
    mend,
    save_checkpoint,
)

IDENTITY = {"model": "tiny", "base": "0123"}


def checkpoint_of(step: int, size: int = 10) -> Checkpoint:
    return Checkpoint(
        step=step,
        tensors={
            "parameters.x.A": torch.arange(size) / 7 + step,
            "optimizer.x.A.step": torch.tensor(float(step)),
        },
        state={"trainer": {"version": step}, "loop": {"cursor": 3 * step, "note": "ä"}},
        identity=IDENTITY,
        files={"pending.npz": bytes(range(256))},
    )


def load(folder: Path, **options) -> Checkpoint | None:
    return load_checkpoint(folder, **{"identity": IDENTITY, **options})


def test_round_trip_is_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoint_of(20)
    path = save_checkpoint(tmp_path, saved)
    assert path.name == "step-00000020"
    assert find_damage(path) == ""
    loaded = load(tmp_path)
    assert loaded is not None
    assert not caplog.messages
    assert (loaded.step, loaded.state, loaded.identity, loaded.files) == (
        20,
        saved.state,
        IDENTITY,
        saved.files,
    )
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 30, 100):
        save_checkpoint(tmp_path, checkpoint_of(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-00000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000100"]
    early = load(tmp_path, step=30)
    assert early is not None
    assert early.step == 30


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint_of(5))
    again = Checkpoint(step=5, tensors={"y": torch.ones(2)}, state={}, identity=IDENTITY)
    save_checkpoint(tmp_path, again)
    loaded = load(tmp_path)
    assert loaded is not None
    assert list(loaded.tensors) == ["y"]
    assert loaded.files == {}
    assert len(list(tmp_path.iterdir())) == 1


def truncate(path: Path) -> None:
    file = path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip(path: Path) -> None:
    file = path / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def cut_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:30])


def forget_state(path: Path) -> None:
    (path / "state.json").unlink()


def another_format(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (truncate, "tensors.safetensors has"),
        (flip, "tensors.safetensors has changed"),
        (cut_manifest, "manifest.json is missing or not readable"),
        (forget_state, "state.json is missing"),
        (another_format, "its format is 99"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_sentence_or_named(
    tmp_path: Path, harm, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, checkpoint_of(step))
    harm(tmp_path / "step-00000002")
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    (warned,) = caplog.messages
    assert told in warned
    with pytest.raises(CheckpointError, match=f"step-00000002 is damaged .*{told}"):
        load(tmp_path, step=2)
    harm(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        load(tmp_path)


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint_of(4))
    with pytest.raises(CheckpointError, match=r"step-00000009 does not exist.*step-00000004"):
        load(tmp_path, step=9)


def test_what_a_killed_process_left_is_ignored_and_cleared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, checkpoint_of(1))
    torn = tmp_path / ".step-00000002.abc"
    torn.mkdir()
    (torn / "tensors.safetensors").write_bytes(b"half")
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (1, [])
    save_checkpoint(tmp_path, checkpoint_of(3))
    assert not torn.exists()


def test_a_replacement_that_was_killed_between_two_renames_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replacing a folder takes two renames; killed between them, the old version lies under a hidden name."""
    path = save_checkpoint(tmp_path, checkpoint_of(1))
    path.rename(tmp_path / ".step-00000001.old")
    for found in (load(tmp_path), load(tmp_path, step=1)):
        assert found is not None
        assert (found.step, caplog.messages) == (1, [])
    assert not path.exists(), "who only reads, beside a run, moves nothing"
    (tmp_path / ".step-00000002.abc").mkdir()
    mend(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("when", ["before it is looked at", "while it is read"])
def test_a_reader_beside_a_run_finds_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval` of a live run: the run saves two more and deletes the one that is being read."""
    save_checkpoint(tmp_path, checkpoint_of(1), keep=1)
    name = "find_damage" if when == "before it is looked at" else "_read"
    plain, calls = getattr(module, name), list[Path]()

    def overtaken(path: Path, *more: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            save_checkpoint(tmp_path, checkpoint_of(2), keep=1)
        return plain(path, *more)

    monkeypatch.setattr(module, name, overtaken)
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (2, [])


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on file size stands for the full disk: to the writer both are an error of write()."""
    save_checkpoint(tmp_path, checkpoint_of(1), keep=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 if size == 10 else 100_000, limit[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000002 could not be written .*the last good one is"
        ):
            save_checkpoint(tmp_path, checkpoint_of(2, size), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (1, [])
    save_checkpoint(tmp_path, checkpoint_of(2, size), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
