"""Attention as an argument: the caller, not the decoder, decides which rows attend to which.

``forward`` passes the queries, keys and values of the flat rows [T] of every layer to an ``Attend``. This
file has the plain ones; the engine's paged cache and the trainer's packed rows are others.

T rows, H query heads, G key-value heads, Dk and Dv their widths, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.config import RopeConfig, RopeType

# (layer, q [T, H, Dk], k [T, G, Dk], v [T, G, Dv], scale) -> [T, H, Dv]; q, k, v may be strided views. For a
# layer with a window its size is a last argument: the number of positions that a row sees, itself included.
Attend = Callable[..., Tensor]


class ProjectedAttend:
    """An ``Attend`` that norms, rotates and stores the projection of a layer itself, in a single kernel. The
    decoder calls its ``project`` in place of ``__call__``, except for latent attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        raise NotImplementedError

    def project(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotations: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Compute attention [T, H, D] of qkv [T, H + 2G, D]. ``norms``: weights [D] of q and k,
        ``rotations``: cos and sin. No layer may have a window (``ModelConfig.windowless_config``)."""
        raise NotImplementedError


class CausalAttention:
    """All rows are one sequence; each row attends to itself and to the rows before it."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        if window is None:
            return compute_attention(q, k, v, scale, is_causal=True)
        mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return compute_attention(q, k, v, scale, mask=mask)


def compute_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Compute softmax attention [T, H, Dv] of q [T, H, Dk] over k [S, G, Dk] and v [S, G, Dv]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


def compute_rope_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Compute the angle per position of each rotary pair [dim / 2] fp32, and the factor of cos and sin.

    linear: arXiv 2306.15595; llama3: Llama 3.1; yarn: arXiv 2309.00071 sections 3.2 and 3.4.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.rope_type == RopeType.LINEAR:
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == RopeType.LLAMA3:
        return _scale_llama3(rope, inv_freq), 1.0
    if rope.rope_type == RopeType.YARN:
        return _scale_yarn(rope, inv_freq, dim), compute_yarn_factor(rope)
    return inv_freq, 1.0


def _scale_llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long wavelengths by ``factor``, and interpolate for those in the
    middle."""
    wavelength = 2 * math.pi / inv_freq
    low_factor, high_factor = rope.low_freq_factor, rope.high_freq_factor
    keep_weight = (
        (rope.original_max_positions / wavelength - low_factor) / (high_factor - low_factor)
    ).clamp(0, 1)
    return (1 - keep_weight) * inv_freq / rope.factor + keep_weight * inv_freq


def _scale_yarn(rope: RopeConfig, inv_freq: Tensor, dim: int) -> Tensor:
    def find_dim(rotations: float) -> float:
        """The dimension that rotates ``rotations`` times over the original context."""
        period = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(rope.theta))

    low_dim, high_dim = find_dim(rope.beta_fast), find_dim(rope.beta_slow)
    if rope.truncate:
        low_dim, high_dim = math.floor(low_dim), math.ceil(high_dim)
    low_dim, high_dim = max(low_dim, 0), min(high_dim, dim - 1)
    if low_dim == high_dim:
        high_dim += 0.001  # against a division by 0
    stretch_weight = ((torch.arange(dim // 2, dtype=torch.float32) - low_dim) / (high_dim - low_dim)).clamp(
        0, 1
    )
    return inv_freq / rope.factor * stretch_weight + inv_freq * (1 - stretch_weight)


def _compute_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def compute_yarn_factor(rope: RopeConfig) -> float:
    """Compute the factor of cos and sin in yarn (arXiv 2309.00071 section 3.4; DeepSeek splits it in two)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _compute_mscale(rope.factor, rope.mscale) / _compute_mscale(rope.factor, rope.mscale_all_dim)
    return _compute_mscale(rope.factor, 1.0)


def compute_mla_scale(rope: RopeConfig, head_dim: int) -> float:
    """Compute the softmax scale of latent attention. For a stretched context DeepSeek multiplies it by mscale
    squared."""
    scale = head_dim**-0.5
    if rope.rope_type != RopeType.DEFAULT and rope.mscale_all_dim:
        scale *= _compute_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale
