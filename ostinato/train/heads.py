"""The products of the head as the trainer multiplies them."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algo.logprobs import Matmul
from ostinato.model.decoder import Decoder
from ostinato.model.ops import TORCH_OPS, Ops


def head_products(decoder: Decoder, ops: Ops) -> tuple[Matmul, Matmul] | tuple[None, None]:
    """The two products of `linear_logprobs` for a frozen head, the logits as ``Decoder.logits`` has them.

    None twice means both in fp32, the weight widened once: what torch can do for an FP32 head over bf16
    weights. Native products multiply in bf16 and sum in fp32, which is as exact and several times faster.
    """
    head = decoder.head_weight
    if head.dtype.itemsize >= 4 or (decoder.fp32_head and ops.gemm is TORCH_OPS.gemm):
        return None, None
    out_dtype = torch.float32 if decoder.fp32_head else None

    def logits(hidden_nD: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nt(hidden_nD, head_VD, None, out_dtype)

    def slopes(logit_slopes_nV: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nn(logit_slopes_nV.to(decoder.dtype), head_VD)

    return logits, slopes


__all__ = ["head_products"]
