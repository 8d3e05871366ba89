"""The weight files of a Hugging Face folder, and whether its head is its embedding. No torch here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.inputs import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE = "pytorch_model.bin"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAX_HEADER_BYTES = 100_000_000  # bytes, the limit of the safetensors library
_BLOCK_BYTES = 1 << 24


def list_weight_files(folder: Path) -> dict[Path, list[str]]:
    """List the safetensors files of a Hugging Face folder, each with the tensors that the index lists for it
    (none without an index). Without safetensors, list torch's pickles (``pytorch_model.bin``) likewise.
    Raises ValueError if a file is missing, if an index cannot be read, or if the folder has both a single
    file and an index that does not list it."""
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
    """Return the files of an index of safetensors or pickles, each with the tensors that it lists. Raises
    ValueError for a file that is no index."""
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
    """Return whether the bytes of the head differ from those of the embedding. False if one of the two is
    missing, and for files that cannot be read: their loader reports these."""
    try:
        places = {
            name: place for path in list_weight_files(folder) for name, place in _locate_tensors(path).items()
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
    num_bytes: int


def _locate_tensors(path: Path) -> dict[str, _Place]:
    """Return the places of those of head and embedding that are in the file; none where its header is larger
    than _MAX_HEADER_BYTES. Raises struct.error, ValueError or KeyError for a file that is no safetensors
    file."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = (
            parse_json(file.read(header_bytes)) if header_bytes <= _MAX_HEADER_BYTES else {}
        )
    places = {}
    for name in {HEAD, EMBEDDING} & header.keys():
        start, end = header[name]["data_offsets"]
        places[name] = _Place(
            path, header[name]["dtype"], header[name]["shape"], 8 + header_bytes + start, end - start
        )
    return places


def _has_same_bytes(first_place: _Place, second_place: _Place) -> bool:
    with first_place.path.open("rb") as first_file, second_place.path.open("rb") as second_file:
        first_file.seek(first_place.start)
        second_file.seek(second_place.start)
        for offset in range(0, first_place.num_bytes, _BLOCK_BYTES):
            block_bytes = min(_BLOCK_BYTES, first_place.num_bytes - offset)
            if first_file.read(block_bytes) != second_file.read(block_bytes):
                return False
    return first_place.num_bytes == second_place.num_bytes
