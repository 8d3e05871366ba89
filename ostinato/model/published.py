"""Weights as they are published in few bits, read as plain tensors under the names that a model calls for.

A form is a row of a table: the names of its parts, and one pure function of them. ``config.json``'s
``quantization_config`` chooses the row; what lies in the files decides which maps are quantised. Weights are
widened one at a time, when they are read, to float32.

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
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AutoAWQ's kernels have the eight columns of a word
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


def unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [..., W] -> unsigned codes [..., W * 32 / b] int32, the lowest bits first. ``order``: the place
    of each column in its word."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> places) & ((1 << bits) - 1)
    return (codes if order is None else codes[..., list(order)]).flatten(-2)


def of_groups(codes: Tensor, zero: Tensor | int, scale: Tensor, group: Tensor | None = None) -> Tensor:
    """(codes [N, K] - zero [N, G]) * scale [N, G], fp32. ``group`` [K]: of each input; None: G equal runs."""
    runs = torch.arange(codes.shape[1], device=codes.device) // -(-codes.shape[1] // scale.shape[1])
    index = runs if group is None else group.long()
    return (codes - (zero if isinstance(zero, int) else zero[:, index])) * scale.float()[:, index]


def float8(parts: Parts, form: Quantisation) -> Tensor:
    """Codes [..., N, K] in float8, a scale per block (DeepSeek-V3, arXiv 2412.19437 section 3.3)."""
    codes, scale = parts[""], parts["_scale_inv"].float()
    (n, k), (rows, columns) = codes.shape[-2:], form.blocks
    if tuple(scale.shape) != (*codes.shape[:-2], -(-n // rows), -(-k // columns)):
        raise ValueError(
            f"scales have shape {list(scale.shape)}, which does not fit blocks of {rows} by {columns}"
        )
    spread = scale.repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(columns, -1)[..., :k]
    return codes.float() * spread


def float8_rows(parts: Parts, form: Quantisation) -> Tensor:
    """Codes [N, K] in float8, one scale or one for each output [N, 1] (compressed-tensors, ModelOpt)."""
    codes = parts[".weight"]
    scale = parts[".weight_scale"] if ".weight_scale" in parts else parts[".weight_scale_inv"]
    if scale.numel() not in (1, len(codes)):
        raise ValueError(f"scales have shape {list(scale.shape)}, which does not fit {len(codes)} outputs")
    return codes.float() * scale.float().reshape(-1, 1)


def nvfp4(parts: Parts, form: Quantisation) -> Tensor:
    """Codes [N, K / 2] as in ``fp4``, scales in float8 of 16 inputs each, [N, K / 16], and one for all: a
    factor in ModelOpt, a divisor in compressed-tensors."""
    halves = fp4(parts[".weight_packed"] if ".weight_packed" in parts else parts[".weight"])
    scale = parts[".weight_scale"].float()
    if ".weight_scale_2" in parts:
        scale = scale * parts[".weight_scale_2"].float()
    else:
        scale = scale / parts[".weight_global_scale"].float()
    return (halves.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)


def fp4(codes: Tensor) -> Tensor:
    """uint8 [..., B] -> fp32 [..., 2 B]: two E2M1 a byte, the lower half first."""
    table = torch.tensor(FP4, device=codes.device)
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)


def packed(parts: Parts, form: Quantisation) -> Tensor:
    """compressed-tensors, ``pack-quantized``: signed codes in words along K, zeros in words along N."""
    half = 1 << (form.bits - 1)
    codes = unpacked(parts[".weight_packed"], form.bits) - half
    zero: Tensor | int = 0
    if (words := parts.get(".weight_zero_point")) is not None:
        zero = unpacked(words.T, form.bits).T[: len(codes)] - half
    return of_groups(codes, zero, parts[".weight_scale"], parts.get(".weight_g_idx"))


def gptq(parts: Parts, form: Quantisation) -> Tensor:
    """GPTQ as AutoGPTQ and GPTQModel write it: words along K, [K b / 32, N]; zeros less 1 in their first
    format, [G, N b / 32]."""
    codes = unpacked(parts[".qweight"].T, form.bits)
    zero = unpacked(parts[".qzeros"], form.bits) + form.zero_shift
    return of_groups(codes, zero.T, parts[".scales"].T, parts.get(".g_idx"))


def awq(parts: Parts, form: Quantisation) -> Tensor:
    """AWQ as AutoAWQ writes it for its GEMM: words along N, [K, N / 8], columns in AWQ_ORDER."""
    codes = unpacked(parts[".qweight"], form.bits, AWQ_ORDER)
    zero = unpacked(parts[".qzeros"], form.bits, AWQ_ORDER)
    return of_groups(codes.T, zero.T, parts[".scales"].T)


def mxfp4(parts: Parts, form: Quantisation) -> Tensor:
    """OCP Microscaling (MX) v1.0 section 5.3.3, as gpt-oss has its experts: two E2M1 a byte, the lower half
    first, [E, N, G, 16], and exponents of 2 less 127, [E, N, G] -> [E, K, N], as transformers has them."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    return torch.ldexp(fp4(blocks), scales.int().unsqueeze(-1) - 127).flatten(-2).mT.contiguous()


class Form(NamedTuple):
    """Names of a weight and of its parts, ends of names each; its shape, from those of its parts."""

    plain: str  # end of the weight's name
    main: str  # end of the part that stands for it
    needs: tuple[str, ...]
    may: tuple[str, ...]
    shape: Callable[[Callable[[str], list[int]], Quantisation], tuple[int, ...]]
    widen: Callable[[Parts, Quantisation], Tensor]


def _along(rows: int, form: Quantisation) -> int:
    return rows * 32 // form.bits


# Of activations and of keys and values, in few bits where such a model is served; not computed here.
AT_ONCE = 32  # tensors of a file that is open
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
        lambda of, form: (of(".weight_packed")[0], _along(of(".weight_packed")[1], form)),
        packed,
    ),
    "gptq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (".g_idx",),
        lambda of, form: (of(".qweight")[1], _along(of(".qweight")[0], form)),
        gptq,
    ),
    "awq": Form(
        ".weight",
        ".qweight",
        (".qzeros", ".scales"),
        (),
        lambda of, form: (_along(of(".qweight")[1], form), of(".qweight")[0]),
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
    """The tensors of a Hugging Face folder, widened where they are quantised. ``files``: as ``weight_files``
    has them, by the names of whole weights. Raises ValueError for a quantised weight that lacks a part."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        listed, self._form = weight_files(folder), quantisation_of(config)
        self._paths: dict[str, Path] = {}  # of every tensor, where some are quantised
        self._parts: dict[
            str, dict[str, str]
        ] = {}  # names of parts by their ends, for every quantised weight
        if self._form is not None:
            for path, names in listed.items():
                self._paths |= dict.fromkeys(names or names_in(path), path)
            self._parts = dict(_quantised(self._paths, FORMS[self._form.method]))
        form = FORMS[self._form.method] if self._form is not None else None
        self._whole = {parts[form.main]: name for name, parts in self._parts.items()} if form else {}
        self._beside = {part for parts in self._parts.values() for part in parts.values()}
        if form is not None:  # of keys and values also beside a weight that is plain, or an attention
            self._beside |= {name for name in self._paths if name.endswith(form.may)}
        self._beside -= self._whole.keys()
        self.files = {path: list(self.whole(names)) for path, names in listed.items()}

    def whole(self, names: Iterable[str]) -> Iterator[str]:
        """Names of the weights that tensors of a file stand for."""
        return (self._whole.get(name, name) for name in names if name not in self._beside)

    @contextmanager
    def opened(self, path: Path) -> Iterator[Tensors]:
        """One of ``files``."""
        with opened(path) as file:
            yield Tensors(file, self)

    def each(self, path: Path) -> Iterator[tuple[str, Tensors]]:
        """The names in one of ``files``, each with the open file. It is opened anew every few of them: what
        was read of a mapped file counts as this process's memory until then."""
        with self.opened(path) as file:
            names = file.keys()
        step = max(1, len(names)) if path.suffix == ".bin" else AT_ONCE  # a pickle is read whole
        for start in range(0, len(names), step):
            with self.opened(path) as file:
                for name in names[start : start + step]:
                    yield name, file

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights by name, in ``dtype`` but for integers."""
        for path in self.files:
            for name, file in self.each(path):
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.element_size() < 2:
                    raise ValueError(f"{name} in {path} is {tensor.dtype} without scales")
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def quantised(self, name: str) -> Widened | None:
        """A weight of parts; None for a plain one."""
        if self._form is None or (parts := self._parts.get(name)) is None:
            return None
        return Widened(name, self._form, {end: (self._paths[part], part) for end, part in parts.items()})


class Tensors:
    """An open file, with the methods of a safetensors file."""

    def __init__(self, file: Any, weights: Weights) -> None:
        self._file, self._weights = file, weights

    def keys(self) -> list[str]:
        return list(self._weights.whole(self._file.keys()))

    def get_slice(self, name: str) -> Any:
        return self._weights.quantised(name) or self._file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        found = self._weights.quantised(name)
        return self._file.get_tensor(name) if found is None else found.tensor


@dataclass(frozen=True)
class Widened:
    """A quantised weight, with the methods of a slice of a safetensors file. ``parts``: (file, name)."""

    name: str
    form: Quantisation
    parts: Mapping[str, tuple[Path, str]]

    def get_shape(self) -> list[int]:
        return list(FORMS[self.form.method].shape(self._shape, self.form))

    def __getitem__(self, where: Any) -> Tensor:
        return self.tensor[where]

    @cached_property
    def tensor(self) -> Tensor:
        """fp32. Raises ValueError for parts that do not fit each other."""
        tensors = {}
        for end, (path, part) in self.parts.items():
            with opened(path) as file:
                tensors[end] = file.get_tensor(part)
        try:
            return FORMS[self.form.method].widen(tensors, self.form)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"the {self.form.method} weight {self.name} cannot be read ({error}); download it again"
            ) from error

    def _shape(self, end: str) -> list[int]:
        path, part = self.parts[end]
        with opened(path) as file:
            return file.get_slice(part).get_shape()


def _quantised(names: Iterable[str], form: Form) -> Iterator[tuple[str, dict[str, str]]]:
    """(weight, its parts) of every one that is quantised among all ``names``."""
    known = set(names)
    for name in known:
        base = name.removesuffix(form.main)
        there = {end: base + end for end in (form.main, *form.needs, *form.may) if base + end in known}
        if not name.endswith(form.main) or (form.main == form.plain and not there.keys() & {*form.needs}):
            continue  # a plain weight, which has the same name
        if lacking := [end for end in form.needs if end not in there]:
            raise ValueError(f"{name} has no {base}{lacking[0]} beside it; download the model again")
        yield base + form.plain, there


def names_in(path: Path) -> list[str]:
    """Of all tensors of a file."""
    with opened(path) as file:
        return list(file.keys())


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The tensors of a file as they lie in it."""
    if path.suffix == ".bin":
        try:
            tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
        except (UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
            raise ValueError(
                f"{path} is truncated or no pickle of tensors alone; download the model as safetensors"
            ) from error
        yield _Pickled(tensors)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); download it again"
        ) from error


class _Pickled:
    """Tensors by name, with the methods of a safetensors file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _Shaped:
        return _Shaped(self._tensors[name])


class _Shaped:
    """A tensor with the methods of a slice of a safetensors file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, where: Any) -> Tensor:
        return self._tensor[where]
