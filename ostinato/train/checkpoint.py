"""Checkpoints: everything a resumed run needs, in folders that are either whole or not there.

    checkpoints/
        step-00000020/
            manifest.json        size and SHA-256 of every other file, written last
            state.json           step, identity, counters of the trainer and the loop
            tensors.safetensors  parameters and optimizer moments, by name
            pending.npz ...      whatever the loop adds, as bytes
        step-00000030/

No random-number state is saved, because there is none: randomness in Ostinato is addressed by (run seed,
step, prompt, sample, position), so the step alone says which noise comes next. That, bitwise optimizer state
and one order of summation make a resumed run on CPU equal to one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ostinato.failure import NamedFailure
from ostinato.files import find_remedy
from ostinato.inputs import parse_json
from ostinato.run import atomic_folder

if TYPE_CHECKING:  # the newest step of a run is looked up before its threads are chosen
    from torch import Tensor

logger = logging.getLogger(__name__)
FORMAT = 1
ASIDE_SUFFIX = ".old"  # see `run.atomic_folder`
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"


class CheckpointError(NamedFailure):
    """A checkpoint could not be written, or the one that was requested cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The state of a run after ``step`` steps.

    ``identity`` says what must be unchanged for a resume to make sense (base weights, adapter shape, ...), as
    strings a person can compare; ``state`` is JSON; ``files`` are opaque bytes by file name.
    """

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    identity: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Clean ``folder`` up (``repair_folder``), write ``checkpoint`` into it, then delete all but the newest
    ``keep``. Returns its path.

    The new folder appears under its name only when all of it is on the disk, and nothing is deleted before
    that: whenever the process or the disk fails, the last good checkpoint is still there.

    Raises:
        CheckpointError: the checkpoint could not be written: the disk is full, or writing is not permitted.
    """
    path = folder / f"step-{checkpoint.step:08d}"
    repair_folder(folder)
    try:
        with atomic_folder(path) as temporary:
            _write(temporary, checkpoint)
    except (OSError, SafetensorError) as error:
        kept_paths = list_checkpoints(folder)
        fallback = f"the last good one is {kept_paths[-1]}" if kept_paths else "there is no earlier one"
        raise CheckpointError(
            f"checkpoint {path} could not be written ({error}); {find_remedy(error)}: {fallback}"
        ) from error
    for path_to_remove in list_checkpoints(folder)[:-keep]:
        _remove_checkpoint(path_to_remove)
    return path


def repair_folder(folder: Path) -> None:
    """Clean up after a killed process: give a checkpoint that it had moved aside its name back, and remove
    what it had half written or half deleted. Only the holder of the run's lock may call it."""
    for path in list_checkpoints(folder):
        if path.suffix == ASIDE_SUFFIX:
            path.rename(folder / _strip_aside(path))
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(folder: Path, *, identity: Mapping[str, str]) -> Checkpoint | None:
    """The newest whole checkpoint in ``folder``; None when the folder has none at all.

    Damaged checkpoints are skipped with a warning. Nothing is written, and the run may continue
    meanwhile: if it deletes a checkpoint that is being read, the newer ones are tried.

    Raises:
        CheckpointError: every checkpoint is damaged.
        ValueError: the checkpoint was made with another ``identity``.
    """
    while True:
        paths, warnings = list_checkpoints(folder), list[str]()
        try:
            checkpoint = _load(folder, paths, identity, warnings.append)
        except (OSError, CheckpointError):
            if all(map(Path.exists, paths)):
                raise
            continue
        if warnings and not all(map(Path.exists, paths)):
            continue
        for sentence in warnings:
            logger.warning(sentence)
        return checkpoint


def _load(
    folder: Path, paths: list[Path], identity: Mapping[str, str], warn: Callable[[str], None]
) -> Checkpoint | None:
    """The newest whole checkpoint among ``paths``, which are oldest first; None without paths. ``warn`` gets
    a sentence for each damaged one. Raises CheckpointError if all are damaged, and ValueError for another
    ``identity``."""
    for path in reversed(paths):
        if damage := find_damage(path):
            warn(f"checkpoint {path} is damaged ({damage}) and was skipped")
        else:
            return _read(path, identity)
    if paths:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {folder} is whole; start a new run")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` by step, oldest first; `find_damage` says whether they are whole. One
    that `atomic_folder` has moved aside is included until its replacement appears."""
    path_by_name = {_strip_aside(path): path for path in folder.glob(f".step-*{ASIDE_SUFFIX}")}
    path_by_name |= {path.name: path for path in folder.glob("step-*") if path.is_dir()}
    return [path_by_name[name] for name in sorted(path_by_name)]


def find_oldest_step(folder: Path) -> int:
    """The step of the oldest checkpoint, the earliest from which a run may have to resume. There must be
    one."""
    return int(_strip_aside(list_checkpoints(folder)[0]).removeprefix("step-"))


def find_newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, 0 without any."""
    paths = list_checkpoints(folder)
    return int(_strip_aside(paths[-1]).removeprefix("step-")) if paths else 0


def _strip_aside(path: Path) -> str:
    """The name of a checkpoint at ``path``, which may have been moved aside."""
    return path.name.removeprefix(".").removesuffix(ASIDE_SUFFIX)


def find_damage(path: Path) -> str:
    """The first fault of a checkpoint, compared with its manifest; empty when it is whole."""
    try:
        manifest = parse_json((path / MANIFEST).read_bytes(), surrogates=True)
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or not readable"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')}, this version reads {FORMAT}"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _hash_file(file) != digest:
            return f"{name} has changed since it was written"
    return ""


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write all files of a checkpoint into ``folder``, the manifest last."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}, folder / TENSORS
    )
    state = {"step": checkpoint.step, "identity": dict(checkpoint.identity), "state": dict(checkpoint.state)}
    (folder / STATE).write_text(json.dumps(state, indent=1))
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    entries = {
        file.name: {"bytes": file.stat().st_size, "sha256": _hash_file(file)}
        for file in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=1))


def _read(path: Path, identity: Mapping[str, str]) -> Checkpoint:
    """The checkpoint at ``path``, which is whole. Raises ValueError if its identity is not ``identity``."""
    state = parse_json((path / STATE).read_bytes(), surrogates=True)
    saved = state["identity"]
    for name in sorted(saved.keys() | identity.keys()):
        if saved.get(name) != identity.get(name):
            raise ValueError(
                f"checkpoint {path} was made with {name} = {saved.get(name)}, this run has "
                f"{identity.get(name)}; use the recipe and the model that it was made with"
            )
    from safetensors.torch import load_file

    own_files = {MANIFEST, STATE, TENSORS}
    names = parse_json((path / MANIFEST).read_bytes(), surrogates=True)["files"].keys() - own_files
    return Checkpoint(
        step=state["step"],
        tensors=load_file(path / TENSORS),
        state=state["state"],
        identity=saved,
        files={name: (path / name).read_bytes() for name in sorted(names)},
    )


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: it is moved to a hidden folder first, so that its name never holds half of it."""
    grave = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    path.rename(grave / path.name)
    shutil.rmtree(grave)
