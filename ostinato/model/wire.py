"""Pack the weights that a trainer sends to its samplers, exact to the last bit, and fingerprint them.

    pack_adapters, unpack_adapters   adapters as values: factors in fp32 and their spec; megabytes
    pack_weights, load_weights       all weights of a decoder as a safetensors file, if all are trained
    fingerprint_adapters, ..         a digest of values: the same in the trainer and where they are served

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
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes
from ostinato.model.tensor_file import get_bytes, iterate_parts, read_tensors
from ostinato.run import atomic_write

_WEIGHTS_METADATA = {"ostinato": json.dumps({"kind": "weights", "about": {}})}
_LEAF_BYTES = 4 << 20  # bytes of a leaf of the hash tree


class NotFinite(NamedFailure):
    """A weight is NaN or infinite; the message names the tensor."""


# ---- adapters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapters:
    """Adapters without a decoder: fp32 factors on the CPU by name (``Adapters.state_dict``)."""

    spec: AdapterSpec
    factors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors.values())


def pack_adapters(adapters: Adapters | None) -> PackedAdapters | None:
    """Copy ``adapters`` to the CPU; None for None, the base. Raises NotFinite."""
    if adapters is None:
        return None
    check_finite(adapters)
    factors = {name: factor.detach().to("cpu", copy=True) for name, factor in adapters.state_dict().items()}
    return PackedAdapters(spec=adapters.spec, factors=factors)


def unpack_adapters(packed_adapters: PackedAdapters | None, config: ModelConfig) -> Adapters | None:
    """Make the adapters that ``pack_adapters`` packed, in the memory of ``packed_adapters``; None for None.
    ``config``: of the decoder that serves them.

    Raises ValueError if they do not fit the decoder, and NotFinite.
    """
    if packed_adapters is None:
        return None
    shapes, factors = compute_adapter_shapes(config, packed_adapters.spec), packed_adapters.factors
    expected = {
        f"{name}.{part}": (torch.float32, shape)
        for name, pair in shapes.items()
        for part, shape in zip("AB", pair, strict=True)
    }
    _check_fit(factors, expected, "adapter tensor", "publish to samplers of the base that is trained")
    tensors = {name: (factors[f"{name}.A"], factors[f"{name}.B"]) for name in shapes}
    adapters = Adapters(packed_adapters.spec, tensors, config)
    check_finite(adapters)
    return adapters


def fingerprint_adapters(adapters: Adapters | None) -> str:
    """Compute 16 hex digits of the values and the spec, equal on every device; "" for None, the base."""
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
    parts = iterate_parts(weights, _WEIGHTS_METADATA)

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
    decoder, or if the decoder is quantised, NotFinite, and OSError.
    """
    weights = _list_weights(decoder)
    with path.open("rb") as file:
        # the mapping is not closed here, since tensors are views of it; it ends with the last view
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata, state = read_tensors(content)
    if metadata != _WEIGHTS_METADATA:
        raise ValueError("the file is a safetensors file, but none of ours; publish with pack_weights")
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    _check_fit(state, expected, "weight", "publish to samplers of the same model and dtype")
    _check_finite(state, "weight")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(state[name])


def fingerprint_weights(decoder: Decoder) -> str:
    """Compute 16 hex digits of all values of ``decoder``. Raises ValueError if it is quantised."""
    return _compute_digest({}, _list_weights(decoder))


def _list_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Return all weights by name. Raises ValueError for a quantised decoder."""
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
    """Raise ValueError unless ``state`` has the ``expected`` names, dtypes and shapes."""
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
    """Raise NotFinite for the first tensor that is not finite. Only the extremes are tested, since NaN
    propagates to them and ``isfinite`` of all values would allocate tensors of bools."""
    for name, tensor in tensors.items():
        if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
            raise NotFinite(f"{kind} {name} is not finite, so this policy is not published")


def _compute_digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Hash by a tree of BLAKE2b (RFC 7693). Its leaves are pieces of _LEAF_BYTES, hashed in threads if a
    tensor has several. Its root is over ``about``, names with shapes and dtypes, and all leaves in order."""
    names = sorted(tensors)
    rows = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in names]
    root = blake2b(json.dumps([about, rows], sort_keys=True).encode(), digest_size=8)
    with ThreadPoolExecutor() as pool:  # starts no thread before it has work
        for name in names:
            content = get_bytes(tensors[name])
            pieces = [content[start : start + _LEAF_BYTES] for start in range(0, len(content), _LEAF_BYTES)]
            run = pool.map if len(pieces) > 1 else map  # hashing releases the GIL
            for leaf in run(_hash_leaf, pieces):
                root.update(leaf)
    return root.hexdigest()


def _hash_leaf(piece: memoryview) -> bytes:
    return blake2b(piece, digest_size=32).digest()
