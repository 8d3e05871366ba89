"""One copy of the base weights for all processes of a host.

The tensors lie in a file as the decoder stores them (``model.weights``). Every process maps it copy-on-write
and computes with the pages where they are; nothing writes to a frozen base, so no page is ever copied, which
/proc/PID/smaps can be queried about. A process that does write (training of all weights) gets pages of its
own and disturbs no other process.

A file is named after the checkpoint and dtype that it was made of. The first process that needs it writes it,
straight from the checkpoint, so that the weights are never in memory twice; the others wait. Who maps it
holds a shared lock, which the kernel takes back however the process ends. So a file that can be locked for
oneself is unused, and ``sweep`` removes it; so is a folder (``own_folder``).

/dev/shm is writable by all users, and the name can be guessed. A file is mapped only if it is the user's own,
for no other user to open, of the size and header that the model calls for, with a digest of samples of its
content at its end: never by way of a link, and never cut off, where reading the mapping ends in SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import stat
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from ostinato.files import cache_folder
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import check_sizes, fill, load_model
from ostinato.model.tensor_file import Layout, layout, shapes_of
from ostinato.model.weight_files import weight_files
from ostinato.model.weights import Quantised, is_quantised

_SHM = Path("/dev/shm")
_FORMAT = 2  # of the file; a change of how decoders store their weights counts too
_SAMPLES, _SAMPLE = 16, 4096  # places of a checkpoint that are looked at, and bytes of each
_PROOFS = (
    1024  # places of the copy that its digest is of: all of a small one, some milliseconds of a large one
)
_DIGEST_BYTES = 16  # at the end of the copy
_PART = ":"  # between the name of codes and of their parts
_FILE, _FOLDER = "safetensors", "weights"  # what our names end in
_POLL_S = 0.05


def shared_model(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    storage: torch.dtype | None = None,
    fp32_head: bool = False,
    folder: Path | None = None,
    wait_s: float = 600.0,
) -> Decoder:
    """The decoder that ``hf.load_model(source, dtype, storage=storage)`` gives, on the CPU, over the copy
    that all processes of a host share, trainers and samplers alike.

    The copy is in ``folder``; None: in memory (/dev/shm), or where that is too small in the user's cache,
    which the system keeps in memory as far as it can.

    A file that is not to be trusted is written again, elsewhere if it cannot be removed, with a warning.

    Raises ValueError as ``load_model`` does and off Linux, OSError where no folder has room or can be used,
    and TimeoutError when another process has not finished writing within ``wait_s``.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"weights are shared by processes on Linux, not on {sys.platform}; set cluster.samplers to 0"
        )
    source, config = Path(source), read_config(source)
    coded = storage == torch.int8
    empty = Decoder(config, dtype=dtype, storage=torch.bfloat16 if coded else storage, device="meta")
    check_sizes(empty, source)
    shapes = shapes_of(_coded_shapes(empty) if coded else _tensors(empty))
    plan = layout(shapes, {"ostinato": json.dumps({"kind": "base"})})
    name = _name(source, dtype, storage)

    def write(tensors: Mapping[str, Tensor]) -> None:
        if not coded:
            fill(_over(tensors, config, dtype), source)
            return
        for name, tensor in _tensors(load_model(source, dtype, storage=storage)).items():
            tensors[name].copy_(tensor)

    content = _mapped([folder] if folder else _folders(), name, plan, write, time.monotonic() + wait_s)
    return _over(plan.views(content), config, dtype, fp32_head=fp32_head)


def shared_file(source: str | Path, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Path:
    """Where the copy is, or would be first."""
    name = _name(Path(source), dtype)
    paths = [each / name for each in ([folder] if folder else _folders())]
    return next(filter(Path.exists, paths), paths[0])


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove the copies, and the folders, that no process holds; the paths of those that are gone.

    For the process that starts workers, before and after, and for every worker on its own host: what a
    killed run left behind is found the next time.
    """
    removed, patterns = [], [_name_of("*", kind) for kind in (_FILE, _FOLDER)]
    folders = [folder] if folder else _folders()
    for path in (path for each in folders for pattern in patterns for path in each.glob(pattern)):
        try:
            held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # removed by another process just now, or never ours: a link, another user's
            continue
        if _has_locked(held, fcntl.LOCK_EX):
            _remove(path)
            removed.append(path)
        os.close(held)
    return removed


def _remove(path: Path) -> None:
    """If it is there: another process may remove it too."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def own_folder(folder: Path | None = None) -> Iterator[Path]:
    """A new folder in ``folder`` (None: in memory where there is some) for what other processes of this host
    are to read, until the context ends. If this process cannot remove it any more, ``sweep`` does."""
    path, held = _new_folder(folder or _folders()[0])
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _new_folder(within: Path) -> tuple[Path, int]:
    """Its path, and the lock on it, open."""
    within.mkdir(parents=True, exist_ok=True)
    before, _, after = _name_of("*", _FOLDER).partition("*")
    while True:
        path = Path(tempfile.mkdtemp(prefix=before, suffix=after, dir=within))
        with suppress(FileNotFoundError):  # swept just now, as it may be until it is locked
            held = os.open(path, os.O_RDONLY)
            if _has_locked(held, fcntl.LOCK_SH) and _is_named(held, path):
                return path, held
            os.close(held)


def _over(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype, *, fp32_head: bool = False
) -> Decoder:
    """A decoder whose weights are ``tensors``, as ``_tensors`` names them."""
    inputs = {name: weight.shape[-1] for name, weight in Decoder(config, device="meta").named_parameters()}
    stored: dict[str, nn.Parameter | Quantised] = {}
    for name, tensor in tensors.items():
        own, _, part = name.partition(_PART)
        if not part:
            stored[name] = nn.Parameter(tensor, requires_grad=False)
        elif part == "tiles":
            scale, samples = (tensors[f"{own}{_PART}{other}"] for other in ("scale", "samples"))
            stored[own] = Quantised(tensor, scale, inputs[own], samples)
    return Decoder(config, dtype=dtype, fp32_head=fp32_head, stored=stored)


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    """All that a decoder stores, by name; of codes their three tensors."""
    plain = {name: weight.detach() for name, weight in decoder.named_parameters()}
    for name, weight in decoder.quantised.items():
        plain |= _parts(name, weight)
    return plain


def _coded_shapes(empty: Decoder) -> dict[str, Tensor]:
    """``_tensors`` of a decoder in codes, without memory."""
    found: dict[str, Tensor] = {}
    for name, weight in empty.named_parameters():
        coded = is_quantised(name, weight.shape)
        found |= _parts(name, Quantised.like(weight)) if coded else {name: weight.detach()}
    return found


def _parts(name: str, weight: Quantised) -> dict[str, Tensor]:
    assert weight.samples is not None, "codes of a base have samples of it"
    parts = {"tiles": weight.tiles, "scale": weight.scale, "samples": weight.samples}
    return {f"{name}{_PART}{part}": tensor for part, tensor in parts.items()}


# ---- where


def _folders() -> list[Path]:
    cache = cache_folder() / "shared"
    return [_SHM, cache] if _SHM.is_dir() else [cache]


def _name(source: Path, dtype: torch.dtype, storage: torch.dtype | None = None) -> str:
    """Of the copy: changes with config, dtypes, and size, time and samples of the weight files."""
    kept = "" if storage is None else f" {storage}"
    digest = blake2b(f"{_FORMAT} {dtype}{kept}".encode(), digest_size=8)
    digest.update((source / "config.json").read_bytes())
    for path in weight_files(source):
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
            for number in range(_SAMPLES):
                file.seek(facts.st_size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return _name_of(digest.hexdigest())


def _name_of(key: str, kind: str = _FILE) -> str:
    return f"ostinato-{os.getuid()}-{key}.{kind}"


# ---- the file


def _mapped(
    folders: list[Path], name: str, plan: Layout, write: Callable[[dict[str, Tensor]], None], deadline: float
) -> mmap.mmap:
    """The whole file, mapped; written first where it is in none of ``folders`` that has room for it."""
    existing = [folder for folder in folders if (folder / name).exists()]
    for folder in existing or folders[:-1]:
        try:
            return _mapped_at(folder / name, plan, write, deadline)
        except PermissionError as error:
            warnings.warn(f"{error.filename or folder / name} is not used: {error.strerror}", stacklevel=3)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return _mapped_at(folders[-1] / name, plan, write, deadline)


def _mapped_at(
    path: Path, plan: Layout, write: Callable[[dict[str, Tensor]], None], deadline: float
) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _opened(path) as file:
            # to write it if no other does, to map it once it is whole: that changes while others are at it
            mode = fcntl.LOCK_SH if _is_finished(file) else fcntl.LOCK_EX
            if _has_locked(file.fileno(), mode) and _is_named(file.fileno(), path):
                if not _is_finished(file):
                    _write(file, path, plan, write)
                fcntl.flock(file, fcntl.LOCK_SH)
                if flaw := _flaw(file, path, plan):
                    _refuse(path, flaw)
                elif _is_named(file.fileno(), path):  # and was not swept just now
                    return mmap.mmap(file.fileno(), plan.size, access=mmap.ACCESS_COPY)  # keeps the lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not finished in time by the process that writes it")
        time.sleep(_POLL_S)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, empty where there was none: the user's own, and for no one else. Whatever else has its name
    is removed first. Raises PermissionError where it cannot be."""
    while True:
        try:
            # no link, and nothing that opening waits for
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            held = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            _refuse(path, "is no file")
            continue
        facts = os.fstat(held)
        if not (flaw := _distrusted(facts)):
            break
        os.close(held)
        _refuse(path, flaw)
    with os.fdopen(held, "r+b", buffering=0) as file:
        yield file


def _distrusted(facts: os.stat_result) -> str:
    """Why this file cannot be the user's own; empty where it is."""
    if not stat.S_ISREG(facts.st_mode):
        return "is no file"
    if facts.st_uid != os.geteuid():
        return f"belongs to user {facts.st_uid}, not to {os.geteuid()}"
    if facts.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(facts.st_mode):o})"
    return ""


def _refuse(path: Path, flaw: str) -> None:
    """Remove it, so that it is written anew; who has mapped it keeps what is mapped. Raises PermissionError,
    with its path and the flaw, where it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PermissionError(errno.EPERM, f"the file {flaw}, and cannot be removed", str(path)) from error
    warnings.warn(f"the shared weights {path} are written again, since the file {flaw}", stacklevel=5)


def _write(file: BinaryIO, path: Path, plan: Layout, write: Callable[[dict[str, Tensor]], None]) -> None:
    """The first eight bytes come last: without them the file is not whole."""
    try:
        os.ftruncate(file.fileno(), 0)
        size = plan.size + _DIGEST_BYTES
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a SIGBUS later
        content = mmap.mmap(file.fileno(), plan.size)
        write(plan.views(content))
        content[8 : len(plan.header)] = plan.header[8:]
        content.flush()
        os.pwrite(file.fileno(), _digest(file, path, plan), plan.size)
        os.fsync(file.fileno())
        os.pwrite(file.fileno(), plan.header[:8], 0)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _is_finished(file: BinaryIO) -> bool:
    """By its writer, who writes the first eight bytes last."""
    start = os.pread(file.fileno(), 8, 0)
    return len(start) == 8 and struct.unpack("<Q", start) != (0,)


def _flaw(file: BinaryIO, path: Path, plan: Layout) -> str:
    """What is wrong with a finished file; empty where it is whole and of this model."""
    size, expected = os.fstat(file.fileno()).st_size, plan.size + _DIGEST_BYTES
    if size != expected:
        return f"has {size} bytes instead of {expected}"
    if os.pread(file.fileno(), len(plan.header), 0) != plan.header:
        return "holds other tensors"
    if os.pread(file.fileno(), _DIGEST_BYTES, plan.size) != _digest(file, path, plan):
        return "is damaged"
    return ""


def _digest(file: BinaryIO, path: Path, plan: Layout) -> bytes:
    """Of the name, which stands for the checkpoint, and of samples of the tensors."""
    digest, start = blake2b(path.name.encode(), digest_size=_DIGEST_BYTES), len(plan.header)
    count = min(_PROOFS, -(-(plan.size - start) // _SAMPLE))
    for number in range(count):
        place = start + (plan.size - start) * number // count
        digest.update(os.pread(file.fileno(), min(_SAMPLE, plan.size - place), place))
    return digest.digest()


def _is_named(held: int, path: Path) -> bool:
    """Is it still what ``path`` leads to?"""
    try:
        return os.path.samestat(os.fstat(held), path.stat())
    except FileNotFoundError:
        return False


def _has_locked(held: int, kind: int) -> bool:
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
