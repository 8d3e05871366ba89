"""Read weights that are published in few bits as plain tensors, under the names that the model has for them.

The table ``FORMS`` has a row for each format: the names of the parts of a weight, and a pure function of
them. ``config.json``'s ``quantization_config`` chooses the row; the tensors in the files decide which maps
are quantised. Weights are widened to float32 one at a time, when they are read.

N outputs, K inputs, G groups of inputs, E experts, b bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato.model.config_keys import Quantisation, read_quantisation
from ostinato.model.weight_files import list_weight_files

Parts = Mapping[str, Tensor]  # by the ends of their names
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the eight columns in a word of AutoAWQ's kernels
FP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # E2M1 by its code


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack int32 [..., W] into unsigned codes [..., W * 32 / b] int32, the lowest bits first. ``order``:
    the place of each column in its word; None: the columns are in order."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes if order is None else codes[..., list(order)]).flatten(-2)


def scale_groups(
    codes: Tensor, zero: Tensor | int, scale: Tensor, input_groups: Tensor | None = None
) -> Tensor:
    """Compute (codes [N, K] - zero [N, G]) * scale [N, G] in fp32. ``input_groups`` [K] are the groups of the
    inputs; None: the inputs are in G runs of equal length."""
    equal_runs = torch.arange(codes.shape[1], device=codes.device) // -(-codes.shape[1] // scale.shape[1])
    index = equal_runs if input_groups is None else input_groups.long()
    return (codes - (zero if isinstance(zero, int) else zero[:, index])) * scale.float()[:, index]


def widen_float8(parts: Parts, form: Quantisation) -> Tensor:
    """Widen codes [..., N, K] in float8 with a scale per block (DeepSeek-V3, arXiv 2412.19437 section 3.3).
    Raises ValueError for scales of another number of blocks."""
    codes, scale = parts[""], parts["_scale_inv"].float()
    (outputs, inputs), (rows, columns) = codes.shape[-2:], form.blocks
    if tuple(scale.shape) != (*codes.shape[:-2], -(-outputs // rows), -(-inputs // columns)):
        raise ValueError(
            f"scales have shape {list(scale.shape)}, which does not fit blocks of {rows} by {columns}"
        )
    scales = scale.repeat_interleave(rows, -2)[..., :outputs, :].repeat_interleave(columns, -1)[..., :inputs]
    return codes.float() * scales


def widen_float8_rows(parts: Parts, form: Quantisation) -> Tensor:
    """Widen codes [N, K] in float8 with one scale, or with a scale per output [N, 1] (compressed-tensors,
    ModelOpt). Raises ValueError for another number of scales."""
    codes = parts[".weight"]
    scale = parts[".weight_scale"] if ".weight_scale" in parts else parts[".weight_scale_inv"]
    if scale.numel() not in (1, len(codes)):
        raise ValueError(f"scales have shape {list(scale.shape)}, which does not fit {len(codes)} outputs")
    return codes.float() * scale.float().reshape(-1, 1)


def widen_nvfp4(parts: Parts, form: Quantisation) -> Tensor:
    """Widen E2M1 codes [N, K / 2] with a float8 scale per 16 inputs, [N, K / 16], and a scale for the whole
    tensor, which is a factor in ModelOpt and a divisor in compressed-tensors."""
    values = unpack_fp4(parts[".weight_packed"] if ".weight_packed" in parts else parts[".weight"])
    scale = parts[".weight_scale"].float()
    if ".weight_scale_2" in parts:
        scale = scale * parts[".weight_scale_2"].float()
    else:
        scale = scale / parts[".weight_global_scale"].float()
    return (values.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)


def unpack_fp4(codes: Tensor) -> Tensor:
    """Unpack uint8 [..., B] to fp32 [..., 2 B]: a byte has two E2M1 numbers, the lower half first."""
    table = torch.tensor(FP4, device=codes.device)
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)


def widen_packed(parts: Parts, form: Quantisation) -> Tensor:
    """Widen ``pack-quantized`` of compressed-tensors: signed codes in words along K, and zeros in words along
    N."""
    half = 1 << (form.bits - 1)
    codes = unpack_words(parts[".weight_packed"], form.bits) - half
    zero: Tensor | int = 0
    if (words := parts.get(".weight_zero_point")) is not None:
        zero = unpack_words(words.T, form.bits).T[: len(codes)] - half
    return scale_groups(codes, zero, parts[".weight_scale"], parts.get(".weight_g_idx"))


def widen_gptq(parts: Parts, form: Quantisation) -> Tensor:
    """Widen GPTQ as AutoGPTQ and GPTQModel write it: words along K, [K b / 32, N], and zeros [G, N b / 32],
    which are stored less 1 in their first format."""
    codes = unpack_words(parts[".qweight"].T, form.bits)
    zero = unpack_words(parts[".qzeros"], form.bits) + form.zero_shift
    return scale_groups(codes, zero.T, parts[".scales"].T, parts.get(".g_idx"))


def widen_awq(parts: Parts, form: Quantisation) -> Tensor:
    """Widen AWQ as AutoAWQ writes it for its GEMM: words along N, [K, N / 8], whose columns are in
    AWQ_ORDER."""
    codes = unpack_words(parts[".qweight"], form.bits, AWQ_ORDER)
    zero = unpack_words(parts[".qzeros"], form.bits, AWQ_ORDER)
    return scale_groups(codes.T, zero.T, parts[".scales"].T)


def widen_mxfp4(parts: Parts, form: Quantisation) -> Tensor:
    """Widen the MXFP4 of gpt-oss's experts (OCP Microscaling (MX) v1.0 section 5.3.3) to [E, K, N], the
    layout of transformers. Blocks [E, N, G, 16] have two E2M1 numbers per byte, the lower half first; scales
    [E, N, G] are exponents of 2, plus 127."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    return torch.ldexp(unpack_fp4(blocks), scales.int().unsqueeze(-1) - 127).flatten(-2).mT.contiguous()


class Form(NamedTuple):
    """A format of quantised weights: the ends of the names of a weight and of its parts, and functions that
    compute its shape and its values."""

    weight_end: str  # of the weight's name
    main_end: str  # of the name of its main part
    required_ends: tuple[str, ...]
    optional_ends: tuple[str, ...]
    shape: Callable[[Callable[[str], list[int]], Quantisation], tuple[int, ...]]
    widen: Callable[[Parts, Quantisation], Tensor]


def _count_codes(rows: int, form: Quantisation) -> int:
    return rows * 32 // form.bits


NAMES_PER_OPENING = 32  # tensors that are read before a file is opened anew
# scales of activations and of keys and values, for serving them in few bits, which is not computed here
SCALES = (".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
FORMS = {
    "fp8": Form("", "", ("_scale_inv",), (), lambda get_shape, _: tuple(get_shape("")), widen_float8),
    "fp8-map": Form(
        ".weight",
        ".weight",
        (".weight_scale_inv",),
        SCALES,
        lambda get_shape, _: tuple(get_shape(".weight")),
        widen_float8_rows,
    ),
    "fp8-rows": Form(
        ".weight",
        ".weight",
        (".weight_scale",),
        SCALES,
        lambda get_shape, _: tuple(get_shape(".weight")),
        widen_float8_rows,
    ),
    "nvfp4": Form(
        ".weight",
        ".weight_packed",
        (".weight_scale", ".weight_global_scale"),
        SCALES,
        lambda get_shape, _: (get_shape(".weight_packed")[0], get_shape(".weight_packed")[1] * 2),
        widen_nvfp4,
    ),
    "nvfp4-modelopt": Form(
        ".weight",
        ".weight",
        (".weight_scale", ".weight_scale_2"),
        SCALES,
        lambda get_shape, _: (get_shape(".weight")[0], get_shape(".weight")[1] * 2),
        widen_nvfp4,
    ),
    "compressed-tensors": Form(
        ".weight",
        ".weight_packed",
        (".weight_scale",),
        (".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        lambda get_shape, form: (
            get_shape(".weight_packed")[0],
            _count_codes(get_shape(".weight_packed")[1], form),
        ),
        widen_packed,
    ),
    "gptq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (".g_idx",),
        lambda get_shape, form: (get_shape(".qweight")[1], _count_codes(get_shape(".qweight")[0], form)),
        widen_gptq,
    ),
    "awq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (),
        lambda get_shape, form: (_count_codes(get_shape(".qweight")[1], form), get_shape(".qweight")[0]),
        widen_awq,
    ),
    "mxfp4": Form(
        "",
        "_blocks",
        ("_scales",),
        (),
        lambda get_shape, _: (get_shape("_blocks")[0], get_shape("_blocks")[2] * 32, get_shape("_blocks")[1]),
        widen_mxfp4,
    ),
}


class Weights:
    """The weights of a Hugging Face folder; those that are quantised are widened when they are read.
    ``files``: those of ``list_weight_files``, with the names of weights in place of those of parts. Raises
    ValueError as ``list_weight_files`` does, for a quantisation that is not read, and for a quantised weight
    that lacks a part."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        names_by_path, self._form = list_weight_files(folder), read_quantisation(config)
        self._paths: dict[str, Path] = {}  # of every tensor, where some are quantised
        # for every quantised weight, the names of its parts by their ends
        self._parts: dict[str, dict[str, str]] = {}
        if self._form is not None:
            for path, names in names_by_path.items():
                self._paths |= dict.fromkeys(names or list_names(path), path)
            self._parts = dict(_find_quantised(self._paths, FORMS[self._form.method]))
        form = FORMS[self._form.method] if self._form is not None else None
        self._weight_names = (
            {parts[form.main_end]: name for name, parts in self._parts.items()} if form else {}
        )
        self._part_names = {part for parts in self._parts.values() for part in parts.values()}
        if form is not None:  # scales of keys and values occur beside plain weights, too
            self._part_names |= {name for name in self._paths if name.endswith(form.optional_ends)}
        self._part_names -= self._weight_names.keys()
        self.files = {path: list(self.iterate_weight_names(names)) for path, names in names_by_path.items()}

    def iterate_weight_names(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names of weights for the names of tensors in a file: the name of a main part is replaced
        by that of its weight, and other parts are left out."""
        return (self._weight_names.get(name, name) for name in names if name not in self._part_names)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[Tensors]:
        """Open one of ``files`` until the context ends. Raises ValueError as ``open_tensors`` does."""
        with open_tensors(path) as file:
            yield Tensors(file, self)

    def iterate_file(self, path: Path) -> Iterator[tuple[str, Tensors]]:
        """Yield the names in one of ``files``, each with the open file. The file is opened anew every
        NAMES_PER_OPENING names, because the pages that were read of a mapped file count as memory of this
        process until it is closed."""
        with self.open_file(path) as file:
            names = file.keys()
        step = (
            max(1, len(names)) if path.suffix == ".bin" else NAMES_PER_OPENING
        )  # a pickle is read as a whole
        for start in range(0, len(names), step):
            with self.open_file(path) as file:
                for name in names[start : start + step]:
                    yield name, file

    def iterate_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights with their names, cast to ``dtype``; integers stay integers. Raises ValueError
        for a weight in fewer than 16 bits that has no scales, and for files and parts that cannot be read."""
        for path in self.files:
            for name, file in self.iterate_file(path):
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.element_size() < 2:
                    raise ValueError(f"{name} in {path} is {tensor.dtype} without scales")
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def find_quantised(self, name: str) -> WidenedWeight | None:
        """Return the weight of this name if it is quantised; None for a plain weight."""
        if self._form is None or (parts := self._parts.get(name)) is None:
            return None
        return WidenedWeight(
            name, self._form, {end: (self._paths[part], part) for end, part in parts.items()}
        )


class Tensors:
    """An open file of weights, with the methods of a safetensors file. A quantised weight is widened."""

    def __init__(self, file: Any, weights: Weights) -> None:
        self._file, self._weights = file, weights

    def keys(self) -> list[str]:
        return list(self._weights.iterate_weight_names(self._file.keys()))

    def get_slice(self, name: str) -> Any:
        return self._weights.find_quantised(name) or self._file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        weight = self._weights.find_quantised(name)
        return self._file.get_tensor(name) if weight is None else weight.tensor


@dataclass(frozen=True)
class WidenedWeight:
    """A quantised weight, with the methods of a slice of a safetensors file. ``parts``: (file, name) by the
    ends of the names."""

    name: str
    form: Quantisation
    parts: Mapping[str, tuple[Path, str]]

    def get_shape(self) -> list[int]:
        return list(FORMS[self.form.method].shape(self._read_shape, self.form))

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    @cached_property
    def tensor(self) -> Tensor:
        """The weight in fp32, which is read at the first access and then kept. Raises ValueError for parts
        that do not fit each other."""
        tensors = {}
        for end, (path, part) in self.parts.items():
            with open_tensors(path) as file:
                tensors[end] = file.get_tensor(part)
        try:
            return FORMS[self.form.method].widen(tensors, self.form)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"the {self.form.method} weight {self.name} cannot be read ({error}); download it again"
            ) from error

    def _read_shape(self, end: str) -> list[int]:
        path, part = self.parts[end]
        with open_tensors(path) as file:
            return file.get_slice(part).get_shape()


def _find_quantised(names: Iterable[str], form: Form) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (name, names of its parts by their ends) for every quantised weight among ``names``. Raises
    ValueError for one that lacks a part."""
    all_names = set(names)
    for name in all_names:
        base = name.removesuffix(form.main_end)
        parts = {
            end: base + end
            for end in (form.main_end, *form.required_ends, *form.optional_ends)
            if base + end in all_names
        }
        if not name.endswith(form.main_end) or (
            form.main_end == form.weight_end and not parts.keys() & {*form.required_ends}
        ):
            continue  # a plain weight has the same name
        if missing_ends := [end for end in form.required_ends if end not in parts]:
            raise ValueError(f"{name} has no {base}{missing_ends[0]} beside it; download the model again")
        yield base + form.weight_end, parts


def list_names(path: Path) -> list[str]:
    """Return the names of all tensors of a file. Raises ValueError as ``open_tensors`` does."""
    with open_tensors(path) as file:
        return list(file.keys())


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of tensors, safetensors or a pickle, until the context ends. Nothing is widened. Raises
    ValueError for a file that cannot be read."""
    if path.suffix == ".bin":
        try:
            tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
        except (UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
            raise ValueError(
                f"{path} is truncated or no pickle of tensors alone; download the model as safetensors"
            ) from error
        yield _PickleFile(tensors)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); download it again"
        ) from error


class _PickleFile:
    """Tensors by name, with the methods of a safetensors file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _TensorSlice:
        return _TensorSlice(self._tensors[name])


class _TensorSlice:
    """A tensor with the methods of a slice of a safetensors file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]
