"""The weight files of a Hugging Face folder, and whether its head is its embedding. No torch here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.inputs import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE = "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
_BLOCK = 1 << 24


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a Hugging Face folder, and the tensors that an index lists for each; without
    an index, none. Pickles of torch (``pytorch_model.bin``) where there are no others. Raises ValueError
    where a file is missing, and where two sets of weights are there."""
    index = folder / INDEX
    if not index.is_file() and not (folder / SINGLE).is_file():
        if (pickles := folder / f"{PICKLE}.index.json").is_file():
            index = pickles
        elif (folder / PICKLE).is_file():
            return {folder / PICKLE: []}
    if not index.is_file():
        listed: dict[Path, list[str]] = {folder / SINGLE: []}
    else:
        listed = _read_index(index)
        if (folder / SINGLE).is_file() and folder / SINGLE not in listed:
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE} and the files of {INDEX}; remove the older one"
            )
    for path in listed:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; download the model again, as safetensors")
    return listed


def _read_index(index: Path) -> dict[Path, list[str]]:
    """Files of a weight index, of safetensors or pickles, and the tensors that it lists in each."""
    listed: dict[Path, list[str]] = {}
    try:
        for name, file in parse_json(index.read_text(encoding="utf-8"))["weight_map"].items():
            listed.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index} is not an index of weights ({error!r}); download the model again"
        ) from error
    return dict(sorted(listed.items()))


def has_own_head(folder: Path) -> bool:
    """Whether there is a head that differs from the embedding, byte for byte. False without weights, and for
    files that cannot be read, which their loader names."""
    try:
        places = {name: place for path in weight_files(folder) for name, place in _places(path).items()}
        head, embedding = places[HEAD], places[EMBEDDING]
        return head[1:3] != embedding[1:3] or not _is_same(head, embedding)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return False


class _Place(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: str
    shape: list[int]
    start: int  # bytes from the beginning of the file
    size: int  # bytes


def _places(path: Path) -> dict[str, _Place]:
    """Head and embedding, as far as the file has them."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = parse_json(file.read(length)) if length <= _LARGEST_HEADER else {}
    found = {}
    for name in {HEAD, EMBEDDING} & header.keys():
        start, end = header[name]["data_offsets"]
        found[name] = _Place(
            path, header[name]["dtype"], header[name]["shape"], 8 + length + start, end - start
        )
    return found


def _is_same(one: _Place, other: _Place) -> bool:
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.size, _BLOCK):
            size = min(_BLOCK, one.size - done)
            if first.read(size) != second.read(size):
                return False
    return one.size == other.size
