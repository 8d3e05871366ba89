"""One copy of the base for all processes of a host: the same model, written once, held by kernel locks."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import KINDS, tiny

from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.model.shared import create_own_folder, find_shared_file, load_shared_model, sweep_copies
from ostinato.model.wire import fingerprint_weights, load_weights, pack_weights


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_model(tiny("softmax"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def hidden(decoder: Decoder) -> torch.Tensor:
    return decoder.forward(torch.arange(11), torch.arange(11), CausalAttention())[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_that_would_have_been_loaded(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tiny(kind), tmp_path / "model")
    plain = load_model(tmp_path / "model", dtype, fp32_head=True)
    for _ in range(2):
        shared = load_shared_model(tmp_path / "model", dtype, fp32_head=True, folder=tmp_path / "shared")
        assert shared.fp32_head and shared.dtype == dtype
        assert fingerprint_weights(shared) == fingerprint_weights(plain)
        assert not any(weight.requires_grad for weight in shared.parameters())
        assert torch.equal(hidden(shared), hidden(plain))


def test_it_is_written_once(source: Path, folder: Path) -> None:
    """The head is no part of it; another dtype and another checkpoint are other files."""
    one = [load_shared_model(source, folder=folder)]
    (path,) = folder.iterdir()
    written = path.stat()
    one.append(load_shared_model(source, fp32_head=True, folder=folder))
    assert path.stat().st_mtime_ns == written.st_mtime_ns and path.stat().st_mode & 0o777 == 0o600
    one.append(load_shared_model(source, torch.bfloat16, folder=folder))
    save_model(tiny("softmax").init_weights(2), source)
    one.append(load_shared_model(source, folder=folder))
    assert len(list(folder.iterdir())) == 3
    assert fingerprint_weights(one[0]) != fingerprint_weights(one[3])


def test_two_that_come_at_once_have_one_copy(source: Path, folder: Path) -> None:
    found: list[Decoder] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_shared_model(source, folder=folder)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(folder.iterdir())) == 1
    assert {fingerprint_weights(one) for one in found} == {fingerprint_weights(load_model(source))}


def test_it_is_swept_when_nobody_holds_it(source: Path, folder: Path) -> None:
    """However the holder ended; and a name without a file does not take a mapping from its holder."""
    one, other = load_shared_model(source, folder=folder), load_shared_model(source, folder=folder)
    assert sweep_copies(folder) == []
    del one
    assert sweep_copies(folder) == []
    (path,) = folder.iterdir()
    path.unlink()
    assert torch.equal(hidden(other), hidden(load_model(source)))
    other = load_shared_model(source, folder=folder)
    del other
    assert sweep_copies(folder) == [path] and not list(folder.iterdir())


def test_a_folder_of_weights_is_swept_when_its_process_was_killed(folder: Path) -> None:
    """The driver kept up to three copies of all weights in memory, unknown to all once it was gone."""
    with create_own_folder(folder) as mine:
        if not (child := os.fork()):
            _killed_in_a_folder(folder)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        left = {path for path in folder.iterdir() if (path / "weights").exists()}
        assert len(left) == 1 and {*sweep_copies(folder)} == left and [*folder.iterdir()] == [mine]
    assert not [*folder.iterdir()]


def _killed_in_a_folder(folder: Path) -> None:
    with create_own_folder(folder) as path:
        (path / "weights").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)


def test_half_a_file_is_written_again(source: Path, folder: Path) -> None:
    """A writer was killed: its lock is gone, and what it left is not whole."""
    load_shared_model(source, folder=folder)
    (path,) = folder.iterdir()
    for content in (b"", b"\0" * 100, b"\0" * 8 + path.read_bytes()[8:]):
        path.write_bytes(content)
        assert torch.equal(hidden(load_shared_model(source, folder=folder)), hidden(load_model(source)))


def spoilt(path: Path, how: str) -> None:
    """As somebody else, or a disk, leaves it."""
    content = path.read_bytes()
    if how == "open":
        path.chmod(0o644)
    elif how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        cut = {"cut": content[:-1], "half": content[: len(content) // 2], "start": content[:9]}
        changed = {"values": len(content) * 2 // 3, "digest": len(content) - 1, "names": 40}
        at = changed.get(how, 0)
        path.write_bytes(cut.get(how) or content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("cut", "has [0-9]+ bytes instead of"),
        ("half", "has [0-9]+ bytes instead of"),
        ("start", "has 9 bytes instead of"),
        ("names", "holds other tensors"),
        ("values", "is damaged"),
        ("digest", "is damaged"),
        ("open", "is open to others .mode 644"),
        ("link", "is no file"),
        ("pipe", "is no file"),
    ],
)
def test_a_file_that_is_not_to_be_trusted_is_written_again(
    source: Path, folder: Path, how: str, why: str
) -> None:
    """It was mapped without a look: one that was cut off ended in SIGBUS, other values were the model."""
    load_shared_model(source, folder=folder)
    (path,) = folder.iterdir()
    spoilt(path, how)
    with pytest.warns(UserWarning, match=f"are written again, since the file {why}") as output:
        again = load_shared_model(source, folder=folder)
    assert len(output) == 1 and torch.equal(hidden(again), hidden(load_model(source)))
    assert path.stat(follow_symlinks=False).st_mode & 0o7777 == 0o600
    load_shared_model(source, folder=folder)  # without a warning, which would be an error


def test_a_damaged_file_is_not_taken_from_who_has_mapped_it(source: Path, folder: Path) -> None:
    one = load_shared_model(source, folder=folder)
    (path,) = folder.iterdir()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))  # whatever it was: a fixed byte may be what stands there
    with pytest.warns(UserWarning, match="is damaged"):
        other = load_shared_model(source, folder=folder)
    assert torch.equal(hidden(one), hidden(other))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_a_file_of_another_user_is_not_mapped(source: Path, folder: Path) -> None:
    """Anybody may put a file of that name into /dev/shm before a run begins."""
    load_shared_model(source, folder=folder)
    (path,) = folder.iterdir()
    os.chown(path, 12345, -1)
    with pytest.warns(UserWarning, match="belongs to user 12345, not to 0"):
        load_shared_model(source, folder=folder)
    assert path.stat().st_uid == 0


def test_what_cannot_be_removed_is_left_for_the_next_folder(
    source: Path, folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /dev/shm no user removes what is another's; here it is a folder that stands in the way."""
    folder.mkdir()
    monkeypatch.setattr("ostinato.model.shared._SHM", folder)
    name = find_shared_file(source).name
    (folder / name).mkdir()
    with pytest.warns(UserWarning, match=f"{name} is not used: the file is no file, and cannot be removed"):
        one = load_shared_model(source)
    assert (own_cache / "ostinato" / "shared" / name).is_file()
    assert torch.equal(hidden(one), hidden(load_model(source)))
    sweep_copies()  # does not wait for it, nor fail


def test_waiting_is_bounded_and_says_for_whom(source: Path, folder: Path) -> None:
    load_shared_model(source, folder=folder)
    (path,) = folder.iterdir()
    with path.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=rf"{path.name} was not finished in time"):
            load_shared_model(source, folder=folder, wait_s=0.01)


def test_a_broken_checkpoint_leaves_nothing(source: Path, folder: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated"):
        load_shared_model(source, folder=folder)
    assert not folder.exists()
    save_model(tiny("softmax"), source)
    save_file({name: one.to(torch.int8) for name, one in load_file(weights).items()}, weights)
    with pytest.raises(ValueError, match="quantised weights are not supported"):
        load_shared_model(source, folder=folder)
    assert not list(folder.iterdir())


def test_without_room_it_is_in_the_cache(
    source: Path, folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm is 64 MB in many containers: room is checked before anything is written, since a write to
    a mapping without room behind it is a SIGBUS. Who comes later finds the file where it is."""
    folder.mkdir()
    monkeypatch.setattr("ostinato.model.shared._SHM", folder)
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    one = load_shared_model(source)
    monkeypatch.undo()
    assert not list(folder.iterdir()) and len(list((own_cache / "ostinato" / "shared").iterdir())) == 1
    assert torch.equal(hidden(one), hidden(load_model(source)))


def test_who_writes_has_pages_of_its_own(source: Path, folder: Path, tmp_path: Path) -> None:
    """Training of all weights, or a publish of them, on a shared base: the others keep theirs."""
    one, other = load_shared_model(source, folder=folder), load_shared_model(source, folder=folder)
    before = fingerprint_weights(other)
    pack_weights(tiny("softmax").init_weights(8), tmp_path / "weights")
    load_weights(one, tmp_path / "weights")
    one.norm.data[0] = math.pi
    assert fingerprint_weights(one) != fingerprint_weights(other) == before
    assert fingerprint_weights(load_shared_model(source, folder=folder)) == before


def test_a_copy_of_the_checkpoint_shares_only_if_nothing_changed(source: Path, folder: Path) -> None:
    """The name looks at values too: packagers give all files one time, and finetunes have one size."""
    model = load_shared_model(source, folder=folder)
    same = source.with_name("same")
    shutil.copytree(source, same)  # with its times
    again = load_shared_model(same, folder=folder)
    assert len(list(folder.iterdir())) == 1
    weights = same / "model.safetensors"
    facts, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert fingerprint_weights(load_shared_model(same, folder=folder)) != fingerprint_weights(again)
    assert fingerprint_weights(model) == fingerprint_weights(again)
