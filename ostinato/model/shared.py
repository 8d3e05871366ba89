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
from ostinato.model.hf import check_sizes, fill_decoder, load_model
from ostinato.model.tensor_file import Layout, list_shapes, plan_layout
from ostinato.model.weight_files import list_weight_files
from ostinato.model.weights import Quantised, is_quantised

_SHM = Path("/dev/shm")
_FORMAT_VERSION = 2  # version of the file; raise it also when decoders store their weights differently
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a checkpoint; the samples of a copy have the same size
_MAX_DIGEST_SAMPLES = (
    1024  # samples of the copy in its digest: all of a small copy, some milliseconds of a large copy
)
_DIGEST_BYTES = 16  # at the end of the copy
_PART_SEPARATOR = ":"  # separates the name of codes from that of their part
_FILE_END, _FOLDER_END = "safetensors", "weights"  # ends of the names of copies and of folders
_POLL_S = 0.05


def load_shared_model(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    storage: torch.dtype | None = None,
    fp32_head: bool = False,
    folder: Path | None = None,
    wait_s: float = 600.0,
) -> Decoder:
    """Return the decoder of ``hf.load_model(source, dtype, storage=storage)`` on the CPU, its weights in the
    copy that all processes of a host share, trainers and samplers alike. If there is no copy, this process
    writes it first.

    The copy is in ``folder``; None: in memory (/dev/shm), or if that is too small in the user's cache, which
    the system keeps in memory as far as it can. A file that cannot be trusted is written again, with a
    warning; if it cannot be removed, the copy is written to the next folder.

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
    shapes = list_shapes(_shape_coded_tensors(empty) if is_coded else _collect_tensors(empty))
    layout = plan_layout(shapes, {"ostinato": json.dumps({"kind": "base"})})
    name = _name_copy(source, dtype, storage)

    def fill_tensors(tensors: Mapping[str, Tensor]) -> None:
        if not is_coded:
            fill_decoder(_build_decoder(tensors, config, dtype), source)
            return
        for name, tensor in _collect_tensors(load_model(source, dtype, storage=storage)).items():
            tensors[name].copy_(tensor)

    content = _map_file(
        [folder] if folder else _list_folders(), name, layout, fill_tensors, time.monotonic() + wait_s
    )
    return _build_decoder(layout.view_tensors(content), config, dtype, fp32_head=fp32_head)


def find_shared_file(
    source: str | Path, dtype: torch.dtype = torch.float32, folder: Path | None = None
) -> Path:
    """Return the path of the copy, or the first path at which it would be written."""
    name = _name_copy(Path(source), dtype)
    paths = [parent / name for parent in ([folder] if folder else _list_folders())]
    return next(filter(Path.exists, paths), paths[0])


def sweep_copies(folder: Path | None = None) -> list[Path]:
    """Remove the user's copies and folders that no process holds; return their paths.

    It is called by the process that starts workers, before and after, and by every worker on its own host, so
    that the next run removes what a killed run left behind.
    """
    removed_paths, patterns = [], [_format_name("*", kind) for kind in (_FILE_END, _FOLDER_END)]
    folders = [folder] if folder else _list_folders()
    for path in (path for parent in folders for pattern in patterns for path in parent.glob(pattern)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # just removed by another process, or not ours: a link, another user's
            continue
        if _try_lock(fd, fcntl.LOCK_EX):
            _remove_path(path)
            removed_paths.append(path)
        os.close(fd)
    return removed_paths


def _remove_path(path: Path) -> None:
    """Remove a file or folder. It may be gone, since another process may remove it too; of a folder errors
    are ignored."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def create_own_folder(parent: Path | None = None) -> Iterator[Path]:
    """Create a folder in ``parent`` (None: in memory where possible) for files that other processes of this
    host read, and remove it when the context ends. A folder whose process was killed is removed by
    ``sweep_copies``."""
    path, lock_fd = _create_folder(parent or _list_folders()[0])
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)


def _create_folder(parent: Path) -> tuple[Path, int]:
    """Create a folder; return its path and the open file descriptor that holds its lock."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix, _, suffix = _format_name("*", _FOLDER_END).partition("*")
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        # until the folder is locked another process may remove it: then create another
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            if _try_lock(fd, fcntl.LOCK_SH) and _is_named(fd, path):
                return path, fd
            os.close(fd)


def _build_decoder(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype, *, fp32_head: bool = False
) -> Decoder:
    """Build a decoder whose weights are ``tensors``, by the names of ``_collect_tensors``."""
    num_inputs = {
        name: weight.shape[-1] for name, weight in Decoder(config, device="meta").named_parameters()
    }
    stored: dict[str, nn.Parameter | Quantised] = {}
    for name, tensor in tensors.items():
        base, _, part = name.partition(_PART_SEPARATOR)
        if not part:
            stored[name] = nn.Parameter(tensor, requires_grad=False)
        elif part == "tiles":
            scale, samples = (
                tensors[f"{base}{_PART_SEPARATOR}{part_name}"] for part_name in ("scale", "samples")
            )
            stored[base] = Quantised(tensor, scale, num_inputs[base], samples)
    return Decoder(config, dtype=dtype, fp32_head=fp32_head, stored=stored)


def _collect_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return all tensors that a decoder stores, by name. A weight in codes is three tensors."""
    tensors = {name: weight.detach() for name, weight in decoder.named_parameters()}
    for name, weight in decoder.quantised.items():
        tensors |= _split_parts(name, weight)
    return tensors


def _shape_coded_tensors(empty: Decoder) -> dict[str, Tensor]:
    """Return what ``_collect_tensors`` returns for a decoder in codes, as tensors without memory."""
    shapes: dict[str, Tensor] = {}
    for name, weight in empty.named_parameters():
        is_coded = is_quantised(name, weight.shape)
        shapes |= _split_parts(name, Quantised.like(weight)) if is_coded else {name: weight.detach()}
    return shapes


def _split_parts(name: str, weight: Quantised) -> dict[str, Tensor]:
    """Return the three tensors of a weight in codes, by their names in the copy."""
    assert weight.samples is not None, "codes of a base have samples of it"
    parts = {"tiles": weight.tiles, "scale": weight.scale, "samples": weight.samples}
    return {f"{name}{_PART_SEPARATOR}{part}": tensor for part, tensor in parts.items()}


# ---- names and folders


def _list_folders() -> list[Path]:
    """List the folders in which copies may be, the preferred one first."""
    cache = cache_folder() / "shared"
    return [_SHM, cache] if _SHM.is_dir() else [cache]


def _name_copy(source: Path, dtype: torch.dtype, storage: torch.dtype | None = None) -> str:
    """Return the file name of the copy: it depends on config.json, the dtypes, and the sizes, times and
    samples of the weight files."""
    suffix = "" if storage is None else f" {storage}"
    digest = blake2b(f"{_FORMAT_VERSION} {dtype}{suffix}".encode(), digest_size=8)
    digest.update((source / "config.json").read_bytes())
    for path in list_weight_files(source):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            for sample_idx in range(_NUM_SAMPLES):
                file.seek(status.st_size * sample_idx // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return _format_name(digest.hexdigest())


def _format_name(key: str, kind: str = _FILE_END) -> str:
    return f"ostinato-{os.getuid()}-{key}.{kind}"


# ---- the file


def _map_file(
    folders: list[Path],
    name: str,
    layout: Layout,
    fill_tensors: Callable[[dict[str, Tensor]], None],
    deadline: float,
) -> mmap.mmap:
    """Map the file. If none of ``folders`` has it, write it first, to the first of them that has room. A
    folder in which the file cannot be trusted is skipped with a warning. Raises OSError where the last folder
    fails too."""
    folders_with_copy = [folder for folder in folders if (folder / name).exists()]
    for folder in folders_with_copy or folders[:-1]:
        try:
            return _map_path(folder / name, layout, fill_tensors, deadline)
        except PermissionError as error:
            warnings.warn(f"{error.filename or folder / name} is not used: {error.strerror}", stacklevel=3)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return _map_path(folders[-1] / name, layout, fill_tensors, deadline)


def _map_path(
    path: Path, layout: Layout, fill_tensors: Callable[[dict[str, Tensor]], None], deadline: float
) -> mmap.mmap:
    """Map the file at ``path``. If it is missing, unfinished or flawed, write it first or wait for the
    process that writes it. Raises TimeoutError after ``deadline`` (time.monotonic), and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _open_trusted(path) as file:
            # exclusive to write the file, shared to map it: another process may finish it in between
            mode = fcntl.LOCK_SH if _is_finished(file) else fcntl.LOCK_EX
            if _try_lock(file.fileno(), mode) and _is_named(file.fileno(), path):
                if not _is_finished(file):
                    _write_file(file, path, layout, fill_tensors)
                fcntl.flock(file, fcntl.LOCK_SH)
                if flaw := _find_flaw(file, path, layout):
                    _discard(path, flaw)
                elif _is_named(file.fileno(), path):  # not swept in the meantime
                    return mmap.mmap(
                        file.fileno(), layout.num_bytes, access=mmap.ACCESS_COPY
                    )  # keeps the lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not finished in time by the process that writes it")
        time.sleep(_POLL_S)


@contextmanager
def _open_trusted(path: Path) -> Iterator[BinaryIO]:
    """Open the file, which is created empty if there is none, until the context ends. The file is the user's
    own and closed to others: anything else of this name is removed first, with a warning. Raises
    PermissionError where that fails."""
    while True:
        try:
            # refuse links, and do not block on a pipe
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            _discard(path, "is no file")
            continue
        status = os.fstat(fd)
        if not (flaw := _find_trust_flaw(status)):
            break
        os.close(fd)
        _discard(path, flaw)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        yield file


def _find_trust_flaw(status: os.stat_result) -> str:
    """Return why this file is not trusted as the user's own; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _discard(path: Path, flaw: str) -> None:
    """Remove the file and warn, so that it is written anew. Processes that have mapped it keep their mapping.
    Raises PermissionError, with its path and the flaw, if it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PermissionError(errno.EPERM, f"the file {flaw}, and cannot be removed", str(path)) from error
    warnings.warn(f"the shared weights {path} are written again, since the file {flaw}", stacklevel=5)


def _write_file(
    file: BinaryIO, path: Path, layout: Layout, fill_tensors: Callable[[dict[str, Tensor]], None]
) -> None:
    """Write the file. Its first eight bytes are written last, since they mark it as complete. If that fails,
    the file is removed and the error raised."""
    try:
        os.ftruncate(file.fileno(), 0)
        num_bytes = layout.num_bytes + _DIGEST_BYTES
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk is an error here, and a SIGBUS later
        content = mmap.mmap(file.fileno(), layout.num_bytes)
        fill_tensors(layout.view_tensors(content))
        content[8 : len(layout.header)] = layout.header[8:]
        content.flush()
        os.pwrite(file.fileno(), _compute_digest(file, path, layout), layout.num_bytes)
        os.fsync(file.fileno())
        os.pwrite(file.fileno(), layout.header[:8], 0)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _is_finished(file: BinaryIO) -> bool:
    """Return whether the first eight bytes are there, which are written last."""
    first_bytes = os.pread(file.fileno(), 8, 0)
    return len(first_bytes) == 8 and struct.unpack("<Q", first_bytes) != (0,)


def _find_flaw(file: BinaryIO, path: Path, layout: Layout) -> str:
    """Return what is wrong with a finished file; "" if it is complete and of this model."""
    num_bytes, expected_bytes = os.fstat(file.fileno()).st_size, layout.num_bytes + _DIGEST_BYTES
    if num_bytes != expected_bytes:
        return f"has {num_bytes} bytes instead of {expected_bytes}"
    if os.pread(file.fileno(), len(layout.header), 0) != layout.header:
        return "holds other tensors"
    if os.pread(file.fileno(), _DIGEST_BYTES, layout.num_bytes) != _compute_digest(file, path, layout):
        return "is damaged"
    return ""


def _compute_digest(file: BinaryIO, path: Path, layout: Layout) -> bytes:
    """Compute a digest of the file name, which identifies the checkpoint, and of samples of the tensors."""
    digest, start = blake2b(path.name.encode(), digest_size=_DIGEST_BYTES), len(layout.header)
    num_samples = min(_MAX_DIGEST_SAMPLES, -(-(layout.num_bytes - start) // _SAMPLE_BYTES))
    for sample_idx in range(num_samples):
        offset = start + (layout.num_bytes - start) * sample_idx // num_samples
        digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, layout.num_bytes - offset), offset))
    return digest.digest()


def _is_named(fd: int, path: Path) -> bool:
    """Return whether ``path`` still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(fd: int, kind: int) -> bool:
    """Take a lock on an open file, and return True; return False if another process has a lock that excludes
    it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
