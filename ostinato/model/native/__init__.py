"""Native CPU kernels as a set of ``Ops``, with the paged attention and the sampler of the engine.

``load_kernels()`` returns ``Kernels`` or raises ``BuildError``; nothing is stored globally. The kernels take
CPU tensors of one type, float32 or bfloat16, whose last dimension is contiguous. They have no gradients. The
twins are ``model.ops.TORCH_OPS``, ``engine.paged.TorchPaged`` and ``engine.sampler.sample_torch``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.model.decoder import Decoder
from ostinato.model.exact import make_exact_ops
from ostinato.model.gemm import Gemm
from ostinato.model.lora import Prepared
from ostinato.model.moe import experts as torch_experts
from ostinato.model.native.blocks import BlockAttention
from ostinato.model.native.build import BuildError, load_library
from ostinato.model.native.experts import make_experts, make_route
from ostinato.model.native.fused import FusedStep, is_supported
from ostinato.model.native.matrix import make_matrix
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.ops import linear as torch_linear
from ostinato.model.packed import PackedAttention
from ostinato.model.weights import Quantised, Weight
from ostinato.types import Segment

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double

# Arguments by kernel: p pointer, l long, d double, f float.
_SIGNATURES = {
    "nt": "plpplplll",
    "nt_add": "ppplll" + "l",
    "nt_codes": "plpplplplll",
    "nn_codes": "plppplll" + "l",
    "rms_norm": "plpplld",
    "add_rms_norm": "ppppplld",
    "rope": "plppplll",
    "silu_mul": "ppll",
    "write_cache": "plplpppllll",
    "paged_attention": "plppplpppp" + "llllll" + "d",
}
_UNTYPED = {
    "sample": "plppppppppp" + "l",
    "score": "plfppl",
    "support_counts": "plpppl",
    "support_ids": "plpppppl",
    "route_rows": "ppppllll" + "d",
    "exp_f32": "ppl",
    "multiplies_bf16": "",
}
_MIXED_TYPES = {
    "nt_bf16_f32": "plpplplll",
    "nt_f32_bf16": "plpplplll",
    "nn_bf16": "plpplll" + "l",
    "nn_f32_bf16": "plpplll" + "l",
}
_WITH_WORKSPACE = {"experts": "pppppllp", "step": "pppl"}  # return the workspace that they need


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled functions: ``ops`` for the decoder, others for the engine and the trainer."""

    ops: Ops  # for inference
    training: Ops  # under autograd: torch's, with our matrix products
    exact: Ops  # under autograd: the forward of ``ops``, bit for bit (``model.exact``)
    write_cache: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    sample: Callable[..., None]
    support: Callable[..., tuple[np.ndarray, np.ndarray]]
    # returns None for a model that the step does not compute
    fused: Callable[[Decoder, Sequence[Prepared | None]], FusedStep | None]
    # whether products of codes are fast: those of int8, and those of fp8 with few rows
    fast_codes: bool


def load_kernels() -> Kernels:
    """Load the kernels, after building them if this machine has not built this version yet. Raises
    BuildError."""
    functions = _bind_kernels(load_library())
    linear = _make_linear(functions)
    gemm = Gemm(nt=_make_training_nt(linear), nn=_make_nn(functions))
    ops = Ops(
        linear=linear,
        rms_norm=_make_rms_norm(functions),
        add_rms_norm=_make_add_rms_norm(functions),
        rope=_make_rope(functions),
        silu_mul=_make_silu_mul(functions),
        add_lora=_make_add_lora(functions, linear),
        route=make_route(functions),
        experts=make_experts(functions),
        gemm=gemm,
        score=_make_score(functions),
    )
    training = replace(TORCH_OPS, gemm=gemm, experts=partial(torch_experts, gemm=gemm))
    write_cache, paged_attention = _make_write_cache(functions), _make_paged_attention(functions)

    def attention(segments: tuple[Segment, ...]) -> PackedAttention:
        return PackedAttention(segments, BlockAttention(segments, write_cache, paged_attention))

    return Kernels(
        ops=ops,
        training=training,
        exact=make_exact_ops(ops, training, _make_add_nt(functions), attention),
        write_cache=write_cache,
        paged_attention=paged_attention,
        sample=_make_sample(functions),
        support=_make_support(functions),
        fused=_make_fused(functions, linear),
        fast_codes=bool(functions["multiplies_bf16"]()),  # otherwise codes are widened one by one
    )


def _make_fused(
    functions: dict[str, Callable[..., Any]], linear: Callable[..., Tensor]
) -> Callable[[Decoder, Sequence[Prepared | None]], FusedStep | None]:
    def make_step(decoder: Decoder, policies: Sequence[Prepared | None]) -> FusedStep | None:
        return FusedStep(functions, linear, decoder, policies) if is_supported(decoder) else None

    return make_step


def _bind_kernels(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """Set the types of every kernel; return the kernels by name."""
    types = {"p": _POINTER, "l": _LONG, "d": _DOUBLE, "f": ctypes.c_float}
    typed = {**_SIGNATURES, **_WITH_WORKSPACE}
    typed_signatures = {
        f"{name}_{suffix}": signature for name, signature in typed.items() for suffix in _SUFFIX.values()
    }
    functions: dict[str, Callable[..., Any]] = {}
    for name, signature in {**typed_signatures, **_UNTYPED, **_MIXED_TYPES}.items():
        function = getattr(library, name)
        function.argtypes = [types[letter] for letter in signature]
        function.restype = _LONG if name.rpartition("_")[0] in _WITH_WORKSPACE or not signature else None
        functions[name] = function
    return functions


def _make_contiguous(x: Tensor) -> Tensor:
    """Return x, copied if its last dimension is not contiguous, as the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _make_linear(functions: dict[str, Callable[..., None]]) -> Callable[..., Tensor]:
    fp32, bf16 = torch.float32, torch.bfloat16
    kernels = {  # by the types of x, weight and y
        (fp32, fp32, fp32): functions["nt_f32"],
        (bf16, bf16, bf16): functions["nt_bf16"],
        (bf16, bf16, fp32): functions["nt_bf16_f32"],
        (fp32, bf16, fp32): functions["nt_f32_bf16"],
    }
    multiply_codes = _make_code_linear(functions)

    def linear(
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, Quantised):
            if out is not None or out_dtype not in (None, x.dtype):
                raise TypeError("a product of codes has its input's type and memory of its own")
            return multiply_codes(x, weight, bias)
        x, weight = _make_contiguous(x), weight if weight.is_contiguous() else weight.contiguous()
        rows, (columns, depth) = x.shape[0], weight.shape
        dtype = x.dtype if out_dtype is None else out_dtype
        function = kernels.get((x.dtype, weight.dtype, dtype))
        if function is None:
            raise TypeError(f"no native product of {x.dtype} with weights of {weight.dtype} to {dtype}")
        if bias is not None:
            if bias.dtype != x.dtype:
                raise TypeError(f"native linear has inputs of {x.dtype} and a bias of {bias.dtype}")
            bias = bias.contiguous()
        y = x.new_empty(rows, columns, dtype=dtype) if out is None else out
        function(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            columns,
            0 if bias is None else bias.data_ptr(),
            rows,
            columns,
            depth,
        )
        return y

    return linear


def _make_code_linear(functions: dict[str, Callable[..., None]]) -> Callable[..., Tensor]:
    kernels = {dtype: functions[f"nt_codes_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
        """Compute x [T, K] times w [N, K]^T plus bias [N] -> [T, N], all of x's type."""
        if bias is not None and bias.dtype != x.dtype:
            raise TypeError(f"native linear has inputs of {x.dtype} and a bias of {bias.dtype}")
        struct = make_matrix(weight, x.dtype)
        x, bias = _make_contiguous(x), None if bias is None else bias.contiguous()
        y = x.new_empty(x.shape[0], weight.shape[0])
        kernels[x.dtype](
            x.data_ptr(),
            x.stride(0),
            *(struct.data, struct.scale, struct.format),
            y.data_ptr(),
            y.shape[1],
            None if bias is None else bias.data_ptr(),
            *(x.shape[0], *weight.shape),
        )
        return y

    return linear


def _make_add_lora(
    functions: dict[str, Callable[..., None]], linear: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    add_nt = _make_add_nt(functions)

    def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = linear(x, a).mul_(scale)
        if y.dtype != low.dtype:  # the router's fp32 logits
            return y + linear(low, b)
        return add_nt(y, low, b)

    return add_lora


def _make_add_nt(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    kernels = {dtype: functions[f"nt_add_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def add_nt(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """Add x [T, r] w [N, r]^T to y [T, N] in place, and return y."""
        x, w = x.contiguous(), w.contiguous()
        kernels[y.dtype](x.data_ptr(), w.data_ptr(), y.data_ptr(), y.stride(0), *y.shape, x.shape[1])
        return y

    return add_nt


def _make_training_nt(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make ``Gemm.nt``. bf16 weights and codes are multiplied by our kernels, which are faster than torch's
    at every size measured, and fp32 by torch, which packs the weights for many rows."""

    def nt(
        x: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        is_native = isinstance(weight, Quantised) or weight.dtype == torch.bfloat16
        return (linear if is_native else torch_linear)(x, weight, bias, out_dtype)

    return nt


def _make_nn(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor, Weight], Tensor]:
    kernels = {torch.bfloat16: functions["nn_bf16"], torch.float32: functions["nn_f32_bf16"]}  # by x's type
    code_kernels = {dtype: functions[f"nn_codes_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def matmul_nn(x: Tensor, weight: Weight) -> Tensor:
        """Compute x [M, N] times weight [N, K] -> [M, K] in x's type."""
        if isinstance(weight, Quantised):
            x, y = _make_contiguous(x), x.new_empty(x.shape[0], weight.inputs)
            operands = x.data_ptr(), x.stride(0), weight.tiles.data_ptr(), weight.scale.data_ptr()
            code_kernels[x.dtype](*operands, y.data_ptr(), y.shape[1], x.shape[0], *weight.shape)
            return y
        if weight.dtype != torch.bfloat16:
            return x @ weight
        x, weight = _make_contiguous(x), weight.contiguous()
        y = x.new_empty(x.shape[0], weight.shape[1])
        kernels[x.dtype](
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            y.shape[1],
            x.shape[0],
            weight.shape[0],
            weight.shape[1],
        )
        return y

    return matmul_nn


def _make_rms_norm(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor, Tensor, float], Tensor]:
    kernels = {dtype: functions[f"rms_norm_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        y = x.new_empty(x.shape)
        if x.dim() == 2:
            x = _make_contiguous(x)
            kernels[x.dtype](
                x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), x.shape[0], width, eps
            )
        else:  # heads; a single head of several stays a view whose stride of rows exceeds its width
            flat = _make_contiguous(x.reshape(-1, width))
            kernels[x.dtype](
                flat.data_ptr(), flat.stride(0), weight.data_ptr(), y.data_ptr(), flat.shape[0], width, eps
            )
        return y

    return rms_norm


def _make_add_rms_norm(functions: dict[str, Callable[..., None]]) -> Callable[..., tuple[Tensor, Tensor]]:
    kernels = {dtype: functions[f"add_rms_norm_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        y, total = torch.empty_like(x), torch.empty_like(x)
        kernels[x.dtype](
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            total.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
        )
        return y, total

    return add_rms_norm


def _make_rope(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    kernels = {dtype: functions[f"rope_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, width = x.shape
        if x.stride(2) != 1 or x.stride(1) != width:
            x = x.contiguous()
        y = x.new_empty(rows, heads, width)
        kernels[x.dtype](
            x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads, width
        )
        return y

    return rope


def _make_silu_mul(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor], Tensor]:
    kernels = {dtype: functions[f"silu_mul_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def silu_mul(gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        kernels[y.dtype](gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y

    return silu_mul


def _make_write_cache(functions: dict[str, Callable[..., None]]) -> Callable[..., None]:
    kernels = {dtype: functions[f"write_cache_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def write_cache(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rows k [T, Hkv, Dk], v [T, Hkv, Dv] to ``slots`` [T] int64 (block * 16 + offset) of keys and
        values."""
        k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
        kernels[k.dtype](
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            slots.shape[0],
            k.shape[1],
            k.shape[2],
            v.shape[2],
        )

    return write_cache


def _make_paged_attention(functions: dict[str, Callable[..., None]]) -> Callable[..., Tensor]:
    kernels = {dtype: functions[f"paged_attention_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def paged_attention(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        sequence: Tensor,
        lengths: Tensor,
        scale: float,
        lse: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Compute attention [T, H, Dv] of q [T, H, Dk]. Row t sees the first lengths[t] positions of the
        blocks tables[sequence[t]]; with ``window`` it sees the last of these only. ``lse`` [T, H] fp32
        receives the log-sum-exp of the scores."""
        rows, heads, width = q.shape
        if q.stride(2) != 1 or q.stride(1) != width:
            q = q.contiguous()
        out = q.new_empty(rows, heads, values.shape[3])
        kernels[q.dtype](
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            sequence.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            rows,
            heads,
            values.shape[1],
            width,
            values.shape[3],
            window or 0,
            scale,
        )
        return out

    return paged_attention


def _make_sample(functions: dict[str, Callable[..., None]]) -> Callable[..., None]:
    sample_rows = functions["sample"]

    def sample(
        logits: Tensor,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        u: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        edges: np.ndarray,
        cuts: np.ndarray | None = None,
    ) -> None:
        """Fill ``tokens`` [B] int64, ``logprobs`` and ``edges`` [B] float32 from logits [B, V] float32; see
        engine.sampler. ``cuts`` [B] float32 receive the smallest scaled logit that each row's filters keep,
        NaN without filters."""
        arrays = (temperature, top_k, top_p, min_p, u, tokens, logprobs, edges)
        pointers = [array.ctypes.data for array in arrays]
        pointers.append(0 if cuts is None else cuts.ctypes.data)
        sample_rows(logits.data_ptr(), logits.shape[1], *pointers, logits.shape[0])

    return sample


def _make_score(functions: dict[str, Callable[..., None]]) -> Callable[[Tensor, float, Tensor], Tensor]:
    def score(logits: Tensor, temperature: float, targets: Tensor) -> Tensor:
        """Compute ``Ops.score``: the log-probabilities of ``sample`` for these tokens, bit for bit. A logit
        of -inf is a token that the filters exclude."""
        logits, targets = logits.contiguous(), targets.long().contiguous()
        logprobs = logits.new_empty(len(targets))
        pointers = targets.data_ptr(), logprobs.data_ptr()
        functions["score"](logits.data_ptr(), logits.shape[1], temperature, *pointers, len(targets))
        return logprobs

    return score


def _make_support(functions: dict[str, Callable[..., None]]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def support(logits: Tensor, temperature: np.ndarray, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (counts [B] int32, ids [sum of counts] int32): the tokens whose scaled logits are at least
        the ``cuts`` [B] float32 of ``sample``. A count of 0 means all tokens."""
        (rows, vocab), counts = logits.shape, np.empty(len(cuts), np.int32)
        inputs = (logits.data_ptr(), vocab, temperature.ctypes.data, cuts.ctypes.data, counts.ctypes.data)
        functions["support_counts"](*inputs, rows)
        ends = np.cumsum(counts, dtype=np.int64)
        ids = np.empty(int(ends[-1]), np.int32)
        functions["support_ids"](*inputs, ends.ctypes.data, ids.ctypes.data, rows)
        return counts, ids

    return support


__all__ = ["BuildError", "FusedStep", "Kernels", "load_kernels"]
