"""Pack the weights that a trainer sends to its samplers, exact to the last bit, and fingerprint them.

    pack, unpack                 adapters as values: factors in fp32 and their spec; megabytes
    pack_weights, load_weights   all weights of a decoder as a safetensors file, if all of them are trained
    fingerprint(...)             identifies values: the same in the trainer and where they are served

Values that are not finite are refused by name before anything is sent, loaded or served: a diverged policy
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
from ostinato.model.tensor_file import file_parts, raw_bytes, read
from ostinato.run import atomic_write

_METADATA = {"ostinato": json.dumps({"kind": "weights", "about": {}})}
_LEAF = 4 << 20  # bytes of a leaf of the hash tree


class NotFinite(NamedFailure):
    """A weight is NaN or infinite; the message names the tensor."""


# ---- adapters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Adapters without a decoder: fp32 factors on the CPU by name (``Adapters.state_dict``)."""

    spec: AdapterSpec
    factors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors.values())


def pack(adapters: Adapters | None) -> Packed | None:
    """Copy ``adapters``; None for None, the base. Raises NotFinite."""
    if adapters is None:
        return None
    check_finite(adapters)
    factors = {name: factor.detach().to("cpu", copy=True) for name, factor in adapters.state_dict().items()}
    return Packed(spec=adapters.spec, factors=factors)


def unpack(packed: Packed | None, config: ModelConfig) -> Adapters | None:
    """Restore the argument of ``pack``, in the same memory; ``config``: of the decoder that serves it.

    Raises ValueError if it does not fit the decoder, and NotFinite.
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
    """16 hex digits of the values and the spec, on whatever device; "" for None, the base."""
    return "" if adapters is None else _compute_digest(_describe_spec(adapters), adapters.state_dict())


def check_finite(adapters: Adapters) -> None:
    """Raise NotFinite, naming the first tensor that is not finite."""
    _check_finite(adapters.state_dict(), "adapter tensor")


def _describe_spec(adapters: Adapters) -> dict[str, Any]:
    return asdict(adapters.spec)


# ---- all weights


def pack_weights(decoder: Decoder, path: Path) -> None:
    """Write all weights of ``decoder``, as it stores them, to a file, completely or not at all.

    Raises NotFinite, ValueError for a quantised decoder, and OSError.
    """
    weights = _list_weights(decoder)
    _check_finite(weights, "weight")
    parts = file_parts(weights, _METADATA)

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                remaining = memoryview(part)
                while remaining.nbytes:  # a call writes 2 GB at most
                    remaining = remaining[file.write(remaining) :]

    atomic_write(path, write)


def load_weights(decoder: Decoder, path: Path) -> None:
    """Copy the values in ``path`` into the tensors of ``decoder``, in place, so that all users of these see
    the new values.

    Everything is checked before anything is changed. Raises ValueError if the file is damaged or of another
    decoder, NotFinite, and OSError.
    """
    weights = _list_weights(decoder)
    with path.open(
        "rb"
    ) as file:  # not closed here: the views of the mapping would dangle; it ends with the last
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata, state = read(content)
    if metadata != _METADATA:
        raise ValueError("the file is a safetensors file, but none of ours; publish with pack_weights")
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    _check_fit(state, expected, "weight", "publish to samplers of the same model and dtype")
    _check_finite(state, "weight")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(state[name])


def fingerprint_weights(decoder: Decoder) -> str:
    """16 hex digits of all values of ``decoder``."""
    return _compute_digest({}, _list_weights(decoder))


def _list_weights(decoder: Decoder) -> dict[str, Tensor]:
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
    kind: str,
    fix: str,
) -> None:
    if names := sorted(state.keys() ^ expected.keys()):
        problem = "is missing" if names[0] in expected else "is unknown to this model"
        raise ValueError(f"{kind} {names[0]} {problem}; {fix}")
    for name, (dtype, shape) in expected.items():
        tensor = state[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise ValueError(
                f"{kind} {name} is {tensor.dtype} {list(tensor.shape)}, this model needs {dtype} "
                f"{list(shape)}; {fix}"
            )


def _check_finite(tensors: Mapping[str, Tensor], kind: str) -> None:
    """Check the extremes, in a pass at memory speed to which NaN propagates; ``isfinite`` of all values would
    allocate tensors of bools."""
    for name, tensor in tensors.items():
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            raise NotFinite(f"{kind} {name} is not finite, so this policy is not published")


def _compute_digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Hash by a tree of BLAKE2b (RFC 7693): leaves of 4 MB, for a large tensor in threads, and a root over
    names with shapes and dtypes, and all leaves in order."""
    names = sorted(tensors)
    rows = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in names]
    root = blake2b(json.dumps([about, rows], sort_keys=True).encode(), digest_size=8)
    with ThreadPoolExecutor() as pool:  # starts no thread before it has work
        for name in names:
            content = raw_bytes(tensors[name])
            pieces = [content[start : start + _LEAF] for start in range(0, len(content), _LEAF)]
            run = pool.map if len(pieces) > 1 else map  # hashing releases the GIL
            for leaf in run(_hash_leaf, pieces):
                root.update(leaf)
    return root.hexdigest()


def _hash_leaf(piece: memoryview) -> bytes:
    return blake2b(piece, digest_size=32).digest()
