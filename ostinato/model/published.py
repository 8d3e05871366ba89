"""Read weights that are published in few bits as plain tensors, under the names that a model calls for.

A form is a row of a table: the names of its parts, and one pure function of them. ``config.json``'s
``quantization_config`` chooses the row; the tensors in the files decide which maps are quantised. Weights are
widened to float32 one at a time, when they are read.

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

from ostinato.model.config_keys import Quantisation, quantisation_of
from ostinato.model.weight_files import weight_files

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
    the place of each column in its word."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> places) & ((1 << bits) - 1)
    return (codes if order is None else codes[..., list(order)]).flatten(-2)


def scale_groups(codes: Tensor, zero: Tensor | int, scale: Tensor, group: Tensor | None = None) -> Tensor:
    """(codes [N, K] - zero [N, G]) * scale [N, G], fp32. ``group`` [K]: the group of each input; None: G
    equal runs."""
    runs = torch.arange(codes.shape[1], device=codes.device) // -(-codes.shape[1] // scale.shape[1])
    index = runs if group is None else group.long()
    return (codes - (zero if isinstance(zero, int) else zero[:, index])) * scale.float()[:, index]


def float8(parts: Parts, form: Quantisation) -> Tensor:
    """Widen codes [..., N, K] in float8 with a scale per block (DeepSeek-V3, arXiv 2412.19437 section
    3.3)."""
    codes, scale = parts[""], parts["_scale_inv"].float()
    (outputs, inputs), (rows, columns) = codes.shape[-2:], form.blocks
    if tuple(scale.shape) != (*codes.shape[:-2], -(-outputs // rows), -(-inputs // columns)):
        raise ValueError(
            f"scales have shape {list(scale.shape)}, which does not fit blocks of {rows} by {columns}"
        )
    scales = scale.repeat_interleave(rows, -2)[..., :outputs, :].repeat_interleave(columns, -1)[..., :inputs]
    return codes.float() * scales


def float8_rows(parts: Parts, form: Quantisation) -> Tensor:
    """Widen codes [N, K] in float8 with a scale, or a scale per output [N, 1] (compressed-tensors,
    ModelOpt)."""
    codes = parts[".weight"]
    scale = parts[".weight_scale"] if ".weight_scale" in parts else parts[".weight_scale_inv"]
    if scale.numel() not in (1, len(codes)):
        raise ValueError(f"scales have shape {list(scale.shape)}, which does not fit {len(codes)} outputs")
    return codes.float() * scale.float().reshape(-1, 1)


def nvfp4(parts: Parts, form: Quantisation) -> Tensor:
    """Widen codes [N, K / 2] as in ``fp4`` with a float8 scale per 16 inputs, [N, K / 16], and a scale for
    the whole tensor: a factor in ModelOpt, a divisor in compressed-tensors."""
    values = fp4(parts[".weight_packed"] if ".weight_packed" in parts else parts[".weight"])
    scale = parts[".weight_scale"].float()
    if ".weight_scale_2" in parts:
        scale = scale * parts[".weight_scale_2"].float()
    else:
        scale = scale / parts[".weight_global_scale"].float()
    return (values.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)


def fp4(codes: Tensor) -> Tensor:
    """uint8 [..., B] -> fp32 [..., 2 B]: two E2M1 numbers per byte, the lower half first."""
    table = torch.tensor(FP4, device=codes.device)
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)


def widen_packed(parts: Parts, form: Quantisation) -> Tensor:
    """Widen ``pack-quantized`` of compressed-tensors: signed codes in words along K, zeros in words along
    N."""
    half = 1 << (form.bits - 1)
    codes = unpack_words(parts[".weight_packed"], form.bits) - half
    zero: Tensor | int = 0
    if (words := parts.get(".weight_zero_point")) is not None:
        zero = unpack_words(words.T, form.bits).T[: len(codes)] - half
    return scale_groups(codes, zero, parts[".weight_scale"], parts.get(".weight_g_idx"))


def gptq(parts: Parts, form: Quantisation) -> Tensor:
    """Widen GPTQ as AutoGPTQ and GPTQModel write it: words along K, [K b / 32, N]; zeros [G, N b / 32], less
    1 in their first format."""
    codes = unpack_words(parts[".qweight"].T, form.bits)
    zero = unpack_words(parts[".qzeros"], form.bits) + form.zero_shift
    return scale_groups(codes, zero.T, parts[".scales"].T, parts.get(".g_idx"))


def awq(parts: Parts, form: Quantisation) -> Tensor:
    """Widen AWQ as AutoAWQ writes it for its GEMM: words along N, [K, N / 8], columns in AWQ_ORDER."""
    codes = unpack_words(parts[".qweight"], form.bits, AWQ_ORDER)
    zero = unpack_words(parts[".qzeros"], form.bits, AWQ_ORDER)
    return scale_groups(codes.T, zero.T, parts[".scales"].T)


def mxfp4(parts: Parts, form: Quantisation) -> Tensor:
    """Widen OCP Microscaling (MX) v1.0 section 5.3.3, the form of gpt-oss's experts: two E2M1 numbers per
    byte, the lower half first, [E, N, G, 16], and exponents of 2 less 127, [E, N, G] -> [E, K, N], as
    transformers has them."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    return torch.ldexp(fp4(blocks), scales.int().unsqueeze(-1) - 127).flatten(-2).mT.contiguous()


class Form(NamedTuple):
    """The ends of the names of a weight and of its parts, and functions for its shape and its values."""

    plain: str  # end of the weight's name
    main: str  # end of the name of its main part
    needs: tuple[str, ...]
    may: tuple[str, ...]
    shape: Callable[[Callable[[str], list[int]], Quantisation], tuple[int, ...]]
    widen: Callable[[Parts, Quantisation], Tensor]


def _count_codes(rows: int, form: Quantisation) -> int:
    return rows * 32 // form.bits


AT_ONCE = 32  # tensors that are read while a file is open
# scales of activations and of keys and values, for serving them in few bits, which is not computed here
BESIDE = (".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
FORMS = {
    "fp8": Form("", "", ("_scale_inv",), (), lambda of, _: tuple(of("")), float8),
    "fp8-map": Form(
        ".weight", ".weight", (".weight_scale_inv",), BESIDE, lambda of, _: tuple(of(".weight")), float8_rows
    ),
    "fp8-rows": Form(
        ".weight", ".weight", (".weight_scale",), BESIDE, lambda of, _: tuple(of(".weight")), float8_rows
    ),
    "nvfp4": Form(
        ".weight",
        ".weight_packed",
        (".weight_scale", ".weight_global_scale"),
        BESIDE,
        lambda of, _: (of(".weight_packed")[0], of(".weight_packed")[1] * 2),
        nvfp4,
    ),
    "nvfp4-modelopt": Form(
        ".weight",
        ".weight",
        (".weight_scale", ".weight_scale_2"),
        BESIDE,
        lambda of, _: (of(".weight")[0], of(".weight")[1] * 2),
        nvfp4,
    ),
    "compressed-tensors": Form(
        ".weight",
        ".weight_packed",
        (".weight_scale",),
        (".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        lambda of, form: (of(".weight_packed")[0], _count_codes(of(".weight_packed")[1], form)),
        widen_packed,
    ),
    "gptq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (".g_idx",),
        lambda of, form: (of(".qweight")[1], _count_codes(of(".qweight")[0], form)),
        gptq,
    ),
    "awq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (),
        lambda of, form: (_count_codes(of(".qweight")[1], form), of(".qweight")[0]),
        awq,
    ),
    "mxfp4": Form(
        "",
        "_blocks",
        ("_scales",),
        (),
        lambda of, _: (of("_blocks")[0], of("_blocks")[2] * 32, of("_blocks")[1]),
        mxfp4,
    ),
}


class Weights:
    """The tensors of a Hugging Face folder, widened where they are quantised. ``files``: those of
    ``weight_files``, with the names of whole weights. Raises ValueError for a quantised weight that lacks a
    part."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        names_by_path, self._form = weight_files(folder), quantisation_of(config)
        self._paths: dict[str, Path] = {}  # of every tensor, where some are quantised
        # for every quantised weight, the names of its parts by their ends
        self._parts: dict[str, dict[str, str]] = {}
        if self._form is not None:
            for path, names in names_by_path.items():
                self._paths |= dict.fromkeys(names or names_in(path), path)
            self._parts = dict(_find_quantised(self._paths, FORMS[self._form.method]))
        form = FORMS[self._form.method] if self._form is not None else None
        self._weight_names = {parts[form.main]: name for name, parts in self._parts.items()} if form else {}
        self._part_names = {part for parts in self._parts.values() for part in parts.values()}
        if form is not None:  # scales of keys and values occur beside plain weights, too
            self._part_names |= {name for name in self._paths if name.endswith(form.may)}
        self._part_names -= self._weight_names.keys()
        self.files = {path: list(self.weight_names(names)) for path, names in names_by_path.items()}

    def weight_names(self, names: Iterable[str]) -> Iterator[str]:
        """Replace names of tensors in a file by the names of weights; leave out all parts but the main
        part."""
        return (self._weight_names.get(name, name) for name in names if name not in self._part_names)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[Tensors]:
        """Open one of ``files``."""
        with open_tensors(path) as file:
            yield Tensors(file, self)

    def iterate(self, path: Path) -> Iterator[tuple[str, Tensors]]:
        """The names in one of ``files``, each with the open file. The file is opened anew every AT_ONCE
        names, because the pages read of a mapped file count as memory of this process until it is closed."""
        with self.open_file(path) as file:
            names = file.keys()
        step = max(1, len(names)) if path.suffix == ".bin" else AT_ONCE  # a pickle is read as a whole
        for start in range(0, len(names), step):
            with self.open_file(path) as file:
                for name in names[start : start + step]:
                    yield name, file

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights with their names, cast to ``dtype``; integers stay integers."""
        for path in self.files:
            for name, file in self.iterate(path):
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.element_size() < 2:
                    raise ValueError(f"{name} in {path} is {tensor.dtype} without scales")
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def quantised(self, name: str) -> Widened | None:
        """The weight of this name if it is quantised; None for a plain weight."""
        if self._form is None or (parts := self._parts.get(name)) is None:
            return None
        return Widened(name, self._form, {end: (self._paths[part], part) for end, part in parts.items()})


class Tensors:
    """An open file, with the methods of a safetensors file."""

    def __init__(self, file: Any, weights: Weights) -> None:
        self._file, self._weights = file, weights

    def keys(self) -> list[str]:
        return list(self._weights.weight_names(self._file.keys()))

    def get_slice(self, name: str) -> Any:
        return self._weights.quantised(name) or self._file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        weight = self._weights.quantised(name)
        return self._file.get_tensor(name) if weight is None else weight.tensor


@dataclass(frozen=True)
class Widened:
    """A quantised weight, with the methods of a slice of a safetensors file. ``parts``: (file, name)."""

    name: str
    form: Quantisation
    parts: Mapping[str, tuple[Path, str]]

    def get_shape(self) -> list[int]:
        return list(FORMS[self.form.method].shape(self._read_shape, self.form))

    def __getitem__(self, where: Any) -> Tensor:
        return self.tensor[where]

    @cached_property
    def tensor(self) -> Tensor:
        """The weight in fp32. Raises ValueError for parts that do not fit each other."""
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
    """(name, names of its parts by their ends) of every quantised weight among ``names``."""
    all_names = set(names)
    for name in all_names:
        base = name.removesuffix(form.main)
        parts = {end: base + end for end in (form.main, *form.needs, *form.may) if base + end in all_names}
        if not name.endswith(form.main) or (form.main == form.plain and not parts.keys() & {*form.needs}):
            continue  # a plain weight has the same name
        if missing := [end for end in form.needs if end not in parts]:
            raise ValueError(f"{name} has no {base}{missing[0]} beside it; download the model again")
        yield base + form.plain, parts


def names_in(path: Path) -> list[str]:
    """The names of all tensors of a file."""
    with open_tensors(path) as file:
        return list(file.keys())


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of tensors, without widening them."""
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

    def __getitem__(self, where: Any) -> Tensor:
        return self._tensor[where]
