"""Frozen weights of fewer bits, for the sampler alone (``engine.weights``) or the base (``model.storage``).

Weights alone are rounded to the nearest value, symmetrically: there is no calibration, and activations stay
as they are. The linear maps of attention, MLPs and experts are quantised: most of the bytes that decoding
reads. Norms, biases, embedding, head and router are not (the usual ignore list), nor are adapters, which are
added on top.

    int8   whole numbers up to 127, one scale per output channel (of every expert)
    fp8    e4m3fn (arXiv 2209.05433), one scale per output channel
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from ostinato.model.decoder import Decoder
from ostinato.model.weights import Quantised, compute_fingerprint_stride, is_quantised


class Weights(StrEnum):
    """How a sampler stores the base: the trainer's own tensors, a bf16 copy, or codes of fewer bits."""

    MODEL = "model"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"


def quantise(decoder: Decoder, kind: Weights, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Make the decoder over weights of ``kind``: matrices that are not quantised are in bf16, all else in
    ``dtype``.

    For MODEL, and for BF16 of a bf16 model, this is ``decoder`` itself. Otherwise it has weights of its own,
    except for those that are neither quantised nor cast: these are the decoder's. Raises ValueError for a
    weight that is to be quantised and is not finite.
    """
    if kind is Weights.MODEL or (kind is Weights.BF16 and decoder.dtype == torch.bfloat16):
        return decoder

    def convert(name: str, weight: nn.Parameter) -> nn.Parameter | Quantised:
        if kind is not Weights.BF16 and is_quantised(name, weight.shape):
            return encode_weight(weight.detach(), kind)
        own_dtype = torch.bfloat16 if weight.dim() > 1 else dtype
        return weight if name.endswith("correction_bias") else _freeze(weight.detach().to(own_dtype))

    stored = {name: convert(name, weight) for name, weight in decoder.named_parameters()}
    return Decoder(
        decoder.config,
        dtype=dtype,
        device=decoder.device,
        fp32_head=decoder.fp32_head,
        stored=stored,
    )


def count_own_bytes(decoder: Decoder, other: Decoder | None = None) -> int:
    """Count the bytes of the decoder's weights, without those that it shares with ``other``."""
    shared_pointers = {weight.data_ptr() for weight in other.parameters()} if other is not None else set()
    num_bytes = sum(
        weight.nbytes for weight in decoder.parameters() if weight.data_ptr() not in shared_pointers
    )
    return num_bytes + sum(weight.nbytes for weight in decoder.quantised.values())


def encode_weight(weight: Tensor, kind: Weights) -> Quantised:
    """Encode ``weight`` [..., N, K] as int8 or fp8 codes with a scale per row. Raises ValueError if a value
    is not finite."""
    samples = weight.flatten()[:: compute_fingerprint_stride(weight.numel())].bfloat16()
    if weight.dim() > 2:  # an expert at a time, so that the widened copy is small
        experts = [encode_weight(expert, kind) for expert in weight]
        tiles, scales = (
            torch.stack([getattr(expert, name) for expert in experts]) for name in ("tiles", "scale")
        )
        return Quantised(tiles, scales, weight.shape[-1], samples)
    weight = weight.float()
    if not torch.isfinite(weight).all():  # in int8 a NaN would be a plain 0
        raise ValueError("a weight is not finite and has no 8-bit code; fix the checkpoint")
    scale = _compute_scale(weight, 127.0 if kind is Weights.INT8 else torch.finfo(torch.float8_e4m3fn).max)
    ratio = weight / scale
    if kind is Weights.INT8:
        return Quantised.of(ratio.round_().clamp_(-127, 127).to(torch.int8), scale.squeeze(-1), samples)
    return Quantised.of(ratio.to(torch.float8_e4m3fn), scale.squeeze(-1), samples)


def _compute_scale(weight: Tensor, max_code: float) -> Tensor:
    """Compute the scales [..., N, 1] that map the largest magnitude of each row to ``max_code``. A row of
    zeros has the scale 1."""
    scale = weight.abs().amax(dim=-1, keepdim=True) / max_code
    return torch.where(scale > 0, scale, 1.0)


def _freeze(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
