"""The weight files of a Hugging Face folder, and whether its head is its embedding. No torch here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.inputs import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE = "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
_BLOCK = 1 << 24


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a Hugging Face folder, each with the tensors that the index lists for it (none
    without an index). If there are no such files, pickles of torch (``pytorch_model.bin``). Raises ValueError
    if a file is missing, or if there are two sets of weights."""
    index = folder / INDEX
    if not index.is_file() and not (folder / SINGLE).is_file():
        if (pickle_index := folder / f"{PICKLE}.index.json").is_file():
            index = pickle_index
        elif (folder / PICKLE).is_file():
            return {folder / PICKLE: []}
    if not index.is_file():
        names_by_file: dict[Path, list[str]] = {folder / SINGLE: []}
    else:
        names_by_file = _read_index(index)
        if (folder / SINGLE).is_file() and folder / SINGLE not in names_by_file:
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE} and the files of {INDEX}; remove the older one"
            )
    for path in names_by_file:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; download the model again, as safetensors")
    return names_by_file


def _read_index(index: Path) -> dict[Path, list[str]]:
    """Read an index of safetensors or pickles: its files, each with the tensors that it lists."""
    names_by_file: dict[Path, list[str]] = {}
    try:
        for name, file in parse_json(index.read_text(encoding="utf-8"))["weight_map"].items():
            names_by_file.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index} is not an index of weights ({error!r}); download the model again"
        ) from error
    return dict(sorted(names_by_file.items()))


def has_own_head(folder: Path) -> bool:
    """Whether there is a head whose bytes differ from those of the embedding. False without weights, and for
    files that cannot be read, which their loader reports."""
    try:
        places = {
            name: place for path in weight_files(folder) for name, place in _locate_tensors(path).items()
        }
        head, embedding = places[HEAD], places[EMBEDDING]
        return head[1:3] != embedding[1:3] or not _has_same_bytes(head, embedding)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return False


class _Place(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    dtype: str
    shape: list[int]
    start: int  # bytes from the beginning of the file
    size: int  # bytes


def _locate_tensors(path: Path) -> dict[str, _Place]:
    """The places of head and embedding, as far as the file has them."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = parse_json(file.read(length)) if length <= _LARGEST_HEADER else {}
    places = {}
    for name in {HEAD, EMBEDDING} & header.keys():
        start, end = header[name]["data_offsets"]
        places[name] = _Place(
            path, header[name]["dtype"], header[name]["shape"], 8 + length + start, end - start
        )
    return places


def _has_same_bytes(place: _Place, other: _Place) -> bool:
    with place.path.open("rb") as file, other.path.open("rb") as other_file:
        file.seek(place.start)
        other_file.seek(other.start)
        for offset in range(0, place.size, _BLOCK):
            size = min(_BLOCK, place.size - offset)
            if file.read(size) != other_file.read(size):
                return False
    return place.size == other.size
