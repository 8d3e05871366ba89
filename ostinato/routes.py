"""Expert routes as arrays and as bytes: the narrowest type in memory, a few bits for each id on disk.

A routing is an integer array [T, layers, K]: the experts that token t went to. A row is known in all layers
or NO_EXPERT in all of them. The order of the K ids is kept, as their outputs are added in this order.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from ostinato.types import NO_EXPERT


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """The narrowest type that holds the ids and NO_EXPERT: int8 up to 128 experts, int16 up to 32768."""
    if not 1 <= num_experts <= 1 << 15:
        raise ValueError(f"num_experts is {num_experts}; use 1 to 32768")
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


def id_bits(num_experts: int) -> int:
    """Bits of an expert's id; 1 for a single expert."""
    return max(1, (num_experts - 1).bit_length())


def route_bytes(layers: int, top_k: int, num_experts: int) -> tuple[int, float]:
    """Bytes of the routes of one token, (in memory, packed): its ids, and packed one bit for a known row."""
    ids = layers * top_k
    return ids * route_dtype(num_experts).itemsize, (ids * id_bits(num_experts) + 1) / 8


def pack_ids(ids: np.ndarray, bits: int) -> bytes:
    """Pack integers below 2**bits, 1 to 16 bits each: eight of them take ``bits`` bytes, the first one
    lowest.

    Of integers above a byte, all low bytes come first, and then the high bits, packed.
    """
    flat = ids.reshape(-1)
    if bits > 8:
        return (flat & 255).astype(np.uint8).tobytes() + pack_ids(flat >> 8, bits - 8)
    groups = np.zeros(((len(flat) + 7) // 8, 8), flat.dtype)
    groups.reshape(-1)[: len(flat)] = flat
    words = np.zeros(len(groups), "<u8")
    for index in range(8):
        words |= groups[:, index].astype(np.uint64) << np.uint64(bits * index)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()


def unpack_ids(data: bytes, count: int, bits: int) -> np.ndarray:
    """The first ``count`` integers, [count] uint16, of the result of ``pack_ids``."""
    if bits > 8:
        low = np.frombuffer(data, np.uint8, count).astype(np.uint16)
        return low | unpack_ids(data[count:], count, bits - 8) << np.uint16(8)
    num_groups = (count + 7) // 8
    padded = np.zeros((num_groups, 8), np.uint8)
    padded[:, :bits] = np.frombuffer(data, np.uint8, num_groups * bits).reshape(-1, bits)
    words, ids = padded.reshape(-1).view("<u8"), np.empty((num_groups, 8), np.uint16)
    for index in range(8):
        ids[:, index] = words >> np.uint64(bits * index) & np.uint64((1 << bits) - 1)
    return ids.reshape(-1)[:count]


def routes_to_json(routes: np.ndarray) -> dict[str, Any]:
    """A routing [T, layers, K] as JSON: in base64 a bitmap of known rows, then their ids with the bits of the
    largest.

    Raises ValueError for a partly known row.
    """
    absent = routes == NO_EXPERT
    is_known = ~absent.all(axis=(1, 2))
    if absent[is_known].any():
        raise ValueError(
            f"routes have a row with some ids {NO_EXPERT}; a row is known in all layers or in none"
        )
    ids = routes[is_known]
    bits = id_bits(int(ids.max(initial=0)) + 1)
    data = np.packbits(is_known).tobytes() + pack_ids(ids, bits)
    return {
        "routes": base64.b64encode(data).decode(),
        "shape": list(routes.shape),
        "dtype": str(routes.dtype),
        "bits": bits,
    }


def routes_from_json(row: Mapping[str, Any]) -> np.ndarray:
    """The array that was given to ``routes_to_json``."""
    data, (rows, layers, top_k) = base64.b64decode(row["routes"]), row["shape"]
    bitmap = np.frombuffer(data, np.uint8, (rows + 7) // 8)
    is_known = np.unpackbits(bitmap, count=rows).astype(bool)
    routes = np.full((rows, layers, top_k), NO_EXPERT, row["dtype"])
    ids = unpack_ids(data[len(bitmap) :], int(is_known.sum()) * layers * top_k, row["bits"])
    routes[is_known] = ids.reshape(-1, layers, top_k)
    return routes
