"""One copy of the base weights for all processes of a host.

The tensors lie in a file as the decoder stores them (``model.weights``). Every process maps it copy-on-write
and computes with the pages where they are; nothing writes to a frozen base, so no page is ever copied, which
/proc/PID/smaps shows. A process that does write (training of all weights) gets pages of its own and disturbs
no other process.

A file is named after the checkpoint and dtype that it was made of. The first process that needs it writes it,
straight from the checkpoint, so that the weights are never in memory twice; the others wait. A process that
maps it holds a shared lock, which the kernel releases however the process ends. So a file that can be locked
exclusively is unused, and ``sweep`` removes it; the same holds for a folder (``own_folder``).

/dev/shm is writable by all users, and the name can be guessed. A file is mapped only if the user owns it,
no other user can open it, its size and header are those of the model, and a digest of samples of its content
is at its end. It is never opened by way of a link, and never truncated: reading a truncated mapping ends in
SIGBUS.
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
_FORMAT = 2  # version of the file; raise it also when decoders store their weights differently
_SAMPLES, _SAMPLE = 16, 4096  # number of samples of a checkpoint, and bytes of each
_PROOFS = 1024  # samples of the copy in its digest: all of a small copy, some milliseconds of a large copy
_DIGEST_BYTES = 16  # at the end of the copy
_PART = ":"  # separates the name of codes from that of their part
_FILE, _FOLDER = "safetensors", "weights"  # ends of the names of copies and of folders
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
    """Return the decoder of ``hf.load_model(source, dtype, storage=storage)`` on the CPU, its weights in the
    copy that all processes of a host share, trainers and samplers alike.

    The copy is in ``folder``; None: in memory (/dev/shm), or where that is too small in the user's cache,
    which the system keeps in memory as far as it can.

    A file that cannot be trusted is written again, elsewhere if it cannot be removed, with a warning.

    Raises ValueError as ``load_model`` does and off Linux, OSError where no folder has room or can be used,
    and TimeoutError when another process has not finished writing within ``wait_s``.
    """
    if sys.platform != "linux":
        raise ValueError(
            f"weights are shared by processes on Linux, not on {sys.platform}; set cluster.samplers to 0"
        )
    source, config = Path(source), read_config(source)
    is_coded = storage == torch.int8
    empty = Decoder(config, dtype=dtype, storage=torch.bfloat16 if is_coded else storage, device="meta")
    check_sizes(empty, source)
    shapes = shapes_of(_shape_coded_tensors(empty) if is_coded else _collect_tensors(empty))
    plan = layout(shapes, {"ostinato": json.dumps({"kind": "base"})})
    name = _name_copy(source, dtype, storage)

    def write(tensors: Mapping[str, Tensor]) -> None:
        if not is_coded:
            fill(_build_decoder(tensors, config, dtype), source)
            return
        for name, tensor in _collect_tensors(load_model(source, dtype, storage=storage)).items():
            tensors[name].copy_(tensor)

    content = _map([folder] if folder else _list_folders(), name, plan, write, time.monotonic() + wait_s)
    return _build_decoder(plan.views(content), config, dtype, fp32_head=fp32_head)


def shared_file(source: str | Path, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Path:
    """The path of the copy, or the first path at which it would be written."""
    name = _name_copy(Path(source), dtype)
    paths = [place / name for place in ([folder] if folder else _list_folders())]
    return next(filter(Path.exists, paths), paths[0])


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove the copies and folders that no process holds; return their paths.

    Called by the process that starts workers, before and after, and by every worker on its own host, so that
    the next run removes what a killed run left behind.
    """
    removed, patterns = [], [_format_name("*", kind) for kind in (_FILE, _FOLDER)]
    folders = [folder] if folder else _list_folders()
    for path in (path for place in folders for pattern in patterns for path in place.glob(pattern)):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # just removed by another process, or not ours: a link, another user's
            continue
        if _try_lock(handle, fcntl.LOCK_EX):
            _remove(path)
            removed.append(path)
        os.close(handle)
    return removed


def _remove(path: Path) -> None:
    """Remove a file or folder, if it is there: another process may remove it too."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def own_folder(folder: Path | None = None) -> Iterator[Path]:
    """Create a folder in ``folder`` (None: in memory where possible) for files that other processes of this
    host read, and remove it when the context ends. If this process dies first, ``sweep``
    removes it."""
    path, lock = _new_folder(folder or _list_folders()[0])
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Create a folder; return its path and the open file descriptor that holds its lock."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix, _, suffix = _format_name("*", _FOLDER).partition("*")
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        with suppress(FileNotFoundError):  # another process may sweep it until it is locked
            handle = os.open(path, os.O_RDONLY)
            if _try_lock(handle, fcntl.LOCK_SH) and _is_named(handle, path):
                return path, handle
            os.close(handle)


def _build_decoder(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype, *, fp32_head: bool = False
) -> Decoder:
    """Build a decoder whose weights are ``tensors``, by the names of ``_collect_tensors``."""
    inputs = {name: weight.shape[-1] for name, weight in Decoder(config, device="meta").named_parameters()}
    stored: dict[str, nn.Parameter | Quantised] = {}
    for name, tensor in tensors.items():
        base, _, part = name.partition(_PART)
        if not part:
            stored[name] = nn.Parameter(tensor, requires_grad=False)
        elif part == "tiles":
            scale, samples = (tensors[f"{base}{_PART}{other}"] for other in ("scale", "samples"))
            stored[base] = Quantised(tensor, scale, inputs[base], samples)
    return Decoder(config, dtype=dtype, fp32_head=fp32_head, stored=stored)


def _collect_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """All tensors that a decoder stores, by name; codes are three tensors."""
    tensors = {name: weight.detach() for name, weight in decoder.named_parameters()}
    for name, weight in decoder.quantised.items():
        tensors |= _split_parts(name, weight)
    return tensors


def _shape_coded_tensors(empty: Decoder) -> dict[str, Tensor]:
    """The tensors of ``_collect_tensors`` for a decoder in codes, without memory."""
    shapes: dict[str, Tensor] = {}
    for name, weight in empty.named_parameters():
        is_coded = is_quantised(name, weight.shape)
        shapes |= _split_parts(name, Quantised.like(weight)) if is_coded else {name: weight.detach()}
    return shapes


def _split_parts(name: str, weight: Quantised) -> dict[str, Tensor]:
    assert weight.samples is not None, "codes of a base have samples of it"
    parts = {"tiles": weight.tiles, "scale": weight.scale, "samples": weight.samples}
    return {f"{name}{_PART}{part}": tensor for part, tensor in parts.items()}


# ---- names and folders


def _list_folders() -> list[Path]:
    cache = cache_folder() / "shared"
    return [_SHM, cache] if _SHM.is_dir() else [cache]


def _name_copy(source: Path, dtype: torch.dtype, storage: torch.dtype | None = None) -> str:
    """The name of the copy, from config, dtypes, and size, time and samples of the weight files."""
    suffix = "" if storage is None else f" {storage}"
    digest = blake2b(f"{_FORMAT} {dtype}{suffix}".encode(), digest_size=8)
    digest.update((source / "config.json").read_bytes())
    for path in weight_files(source):
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
            for number in range(_SAMPLES):
                file.seek(facts.st_size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return _format_name(digest.hexdigest())


def _format_name(key: str, kind: str = _FILE) -> str:
    return f"ostinato-{os.getuid()}-{key}.{kind}"


# ---- the file


def _map(
    folders: list[Path], name: str, plan: Layout, write: Callable[[dict[str, Tensor]], None], deadline: float
) -> mmap.mmap:
    """Map the file. If none of ``folders`` has it, write it first, to the first of them that has room."""
    existing = [folder for folder in folders if (folder / name).exists()]
    for folder in existing or folders[:-1]:
        try:
            return _map_at(folder / name, plan, write, deadline)
        except PermissionError as error:
            warnings.warn(f"{error.filename or folder / name} is not used: {error.strerror}", stacklevel=3)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return _map_at(folders[-1] / name, plan, write, deadline)


def _map_at(
    path: Path, plan: Layout, write: Callable[[dict[str, Tensor]], None], deadline: float
) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _open(path) as file:
            # exclusive to write the file, shared to map it: another process may finish it in between
            mode = fcntl.LOCK_SH if _is_finished(file) else fcntl.LOCK_EX
            if _try_lock(file.fileno(), mode) and _is_named(file.fileno(), path):
                if not _is_finished(file):
                    _write(file, path, plan, write)
                fcntl.flock(file, fcntl.LOCK_SH)
                if flaw := _find_flaw(file, path, plan):
                    _refuse(path, flaw)
                elif _is_named(file.fileno(), path):  # not swept in the meantime
                    return mmap.mmap(file.fileno(), plan.size, access=mmap.ACCESS_COPY)  # keeps the lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not finished in time by the process that writes it")
        time.sleep(_POLL_S)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open the file, created empty where there is none, owned by the user and closed to others. Anything else
    of this name is removed first. Raises PermissionError where that fails."""
    while True:
        try:
            # refuse links, and do not block on a pipe
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            _refuse(path, "is no file")
            continue
        facts = os.fstat(handle)
        if not (flaw := _find_trust_flaw(facts)):
            break
        os.close(handle)
        _refuse(path, flaw)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        yield file


def _find_trust_flaw(facts: os.stat_result) -> str:
    """Return why this file is not trusted as the user's own; empty if it is."""
    if not stat.S_ISREG(facts.st_mode):
        return "is no file"
    if facts.st_uid != os.geteuid():
        return f"belongs to user {facts.st_uid}, not to {os.geteuid()}"
    if facts.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(facts.st_mode):o})"
    return ""


def _refuse(path: Path, flaw: str) -> None:
    """Remove the file, so that it is written anew; processes that have mapped it keep their mapping. Raises
    PermissionError, with its path and the flaw, where it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PermissionError(errno.EPERM, f"the file {flaw}, and cannot be removed", str(path)) from error
    warnings.warn(f"the shared weights {path} are written again, since the file {flaw}", stacklevel=5)


def _write(file: BinaryIO, path: Path, plan: Layout, write: Callable[[dict[str, Tensor]], None]) -> None:
    """Write the file, its first eight bytes last: they mark it as complete."""
    try:
        os.ftruncate(file.fileno(), 0)
        size = plan.size + _DIGEST_BYTES
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a SIGBUS later
        content = mmap.mmap(file.fileno(), plan.size)
        write(plan.views(content))
        content[8 : len(plan.header)] = plan.header[8:]
        content.flush()
        os.pwrite(file.fileno(), _compute_digest(file, path, plan), plan.size)
        os.fsync(file.fileno())
        os.pwrite(file.fileno(), plan.header[:8], 0)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _is_finished(file: BinaryIO) -> bool:
    """Whether the first eight bytes are there, which are written last."""
    start = os.pread(file.fileno(), 8, 0)
    return len(start) == 8 and struct.unpack("<Q", start) != (0,)


def _find_flaw(file: BinaryIO, path: Path, plan: Layout) -> str:
    """Return what is wrong with a finished file; empty if it is complete and of this model."""
    size, expected = os.fstat(file.fileno()).st_size, plan.size + _DIGEST_BYTES
    if size != expected:
        return f"has {size} bytes instead of {expected}"
    if os.pread(file.fileno(), len(plan.header), 0) != plan.header:
        return "holds other tensors"
    if os.pread(file.fileno(), _DIGEST_BYTES, plan.size) != _compute_digest(file, path, plan):
        return "is damaged"
    return ""


def _compute_digest(file: BinaryIO, path: Path, plan: Layout) -> bytes:
    """Digest of the file name, which identifies the checkpoint, and of samples of the tensors."""
    digest, start = blake2b(path.name.encode(), digest_size=_DIGEST_BYTES), len(plan.header)
    count = min(_PROOFS, -(-(plan.size - start) // _SAMPLE))
    for number in range(count):
        offset = start + (plan.size - start) * number // count
        digest.update(os.pread(file.fileno(), min(_SAMPLE, plan.size - offset), offset))
    return digest.digest()


def _is_named(handle: int, path: Path) -> bool:
    """Whether ``path`` still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
