"""Weights on their way from the trainer to the samplers, exact in the last bit, and their fingerprints.

    pack, unpack                 adapters as values: factors in fp32 and the spec they belong to; megabytes
    pack_weights, load_weights   all weights of a decoder as a safetensors file, where all of them are trained
    fingerprint(...)             which values these are: the same here and where they are served

Values that are not finite are refused by name before anything is sent, loaded or served: a policy that broke
must not reach a sampler.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.failure import NamedFailure
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.shapes import AdapterSpec, adapter_shapes
from ostinato.model.tensor_file import joined, raw, read
from ostinato.run import atomic_write

_METADATA = {"ostinato": json.dumps({"kind": "weights", "about": {}})}
_LEAF = 4 << 20  # bytes that are hashed in one piece


class NotFinite(NamedFailure):
    """A weight is NaN or infinite; the message names the tensor."""


# ---- adapters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Adapters apart from any decoder: fp32 factors on the CPU by name (``Adapters.state_dict``)."""

    spec: AdapterSpec
    factors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors.values())


def pack(adapters: Adapters | None) -> Packed | None:
    """A copy of ``adapters``; None for None, the base. Raises NotFinite."""
    if adapters is None:
        return None
    check_finite(adapters)
    factors = {name: one.detach().to("cpu", copy=True) for name, one in adapters.state_dict().items()}
    return Packed(spec=adapters.spec, factors=factors)


def unpack(packed: Packed | None, config: ModelConfig) -> Adapters | None:
    """What ``pack`` was given, over the same memory; ``config`` is of the decoder that is to serve it.

    Raises ValueError where it does not fit the decoder, and NotFinite.
    """
    if packed is None:
        return None
    shapes, factors = adapter_shapes(config, packed.spec), packed.factors
    expected = {
        f"{name}.{part}": (torch.float32, shape)
        for name, pair in shapes.items()
        for part, shape in zip("AB", pair, strict=True)
    }
    _check_fit(factors, expected, "adapter tensor", "publish to samplers of the base that is trained")
    tensors = {name: (factors[f"{name}.A"], factors[f"{name}.B"]) for name in shapes}
    adapters = Adapters(packed.spec, tensors, config)
    check_finite(adapters)
    return adapters


def fingerprint(adapters: Adapters | None) -> str:
    """16 hex digits of the values and of the spec, wherever the tensors lie; "" for None, the base."""
    return "" if adapters is None else _digest(_spec(adapters), adapters.state_dict())


def check_finite(adapters: Adapters) -> None:
    """Raises NotFinite naming the first tensor that is not."""
    _check_finite(adapters.state_dict(), "adapter tensor")


def _spec(adapters: Adapters) -> dict[str, Any]:
    return asdict(adapters.spec)


# ---- all weights


def pack_weights(decoder: Decoder, path: Path) -> None:
    """All weights of ``decoder``, as it stores them, into a file that appears whole or not at all.

    Raises NotFinite, ValueError for a quantised decoder, and OSError.
    """
    weights = _weights(decoder)
    _check_finite(weights, "weight")
    parts = joined(weights, _METADATA)

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest.nbytes:  # one call writes 2 GB at most
                    rest = rest[file.write(rest) :]

    atomic_write(path, write)


def load_weights(decoder: Decoder, path: Path) -> None:
    """The values in ``path`` into the tensors of ``decoder``, in place: who computes with them sees the new.

    All is checked before anything is changed. Raises ValueError where the file is damaged or of another
    decoder, NotFinite, and OSError.
    """
    own = _weights(decoder)
    with path.open("rb") as file:  # the mapping ends with the last of its views: closed before, these dangle
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata, state = read(content)
    if metadata != _METADATA:
        raise ValueError("the file is a safetensors file, but none of ours; publish with pack_weights")
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    _check_fit(state, expected, "weight", "publish to samplers of the same model and dtype")
    _check_finite(state, "weight")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def fingerprint_weights(decoder: Decoder) -> str:
    """16 hex digits of all values that ``decoder`` computes with."""
    return _digest({}, _weights(decoder))


def _weights(decoder: Decoder) -> dict[str, Tensor]:
    if decoder.quantised:
        raise ValueError(
            "a sampler with quantised weights cannot take all weights of a policy; "
            'use engine.weights="model" with adapter.kind="full"'
        )
    return {name: weight.detach() for name, weight in decoder.named_parameters()}


# ---- both


def _check_fit(
    state: Mapping[str, Tensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    what: str,
    fix: str,
) -> None:
    if odd := sorted(state.keys() ^ expected.keys()):
        where = "is missing" if odd[0] in expected else "is unknown to this model"
        raise ValueError(f"{what} {odd[0]} {where}; {fix}")
    for name, (dtype, shape) in expected.items():
        tensor = state[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise ValueError(
                f"{what} {name} is {tensor.dtype} {list(tensor.shape)}, this model needs {dtype} "
                f"{list(shape)}; {fix}"
            )


def _check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """By the extremes: one pass at memory speed, in which NaN wins; ``isfinite`` makes tensors of bools."""
    for name, tensor in tensors.items():
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            raise NotFinite(f"{what} {name} is not finite, so this policy is not published")


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A tree of BLAKE2b (RFC 7693): leaves of 4 MB, those of a large tensor in threads, and a root over names
    with their shapes and dtypes, and all leaves in order."""
    names = sorted(tensors)
    rows = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in names]
    root = blake2b(json.dumps([about, rows], sort_keys=True).encode(), digest_size=8)
    with ThreadPoolExecutor() as pool:  # has no thread before it has work
        for name in names:
            content = raw(tensors[name])
            pieces = [content[start : start + _LEAF] for start in range(0, len(content), _LEAF)]
            run = pool.map if len(pieces) > 1 else map  # hashing lets go of the GIL
            for leaf in run(_leaf, pieces):
                root.update(leaf)
    return root.hexdigest()


def _leaf(piece: memoryview) -> bytes:
    return blake2b(piece, digest_size=32).digest()
