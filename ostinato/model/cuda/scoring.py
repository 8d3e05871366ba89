"""Log-probability, entropy and slope of the trainer's head in Triton: two sweeps over a chunk of logits.

Twin: ``algo.logprobs``, the score of a chunk without a support.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


def score_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute [n, 2] float32: log p[target] and the entropy in nats of softmax(logits), for logits [n, V]
    float32 and targets [n]. Overwrites ``logits`` by d log p[target] / d logits = onehot - p.

    At the target the slope is computed as the mass of all other tokens over the total, not as 1 - p: for a
    near-certain token it is the whole gradient, and cancellation would lose it.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    scores = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    if len(logits):
        _score_kernel[(len(logits),)](
            logits, targets, scores, logits.stride(0), logits.shape[1], CHUNK=CHUNK, num_warps=8
        )
    return scores


@triton.jit
def _score_kernel(logits, targets, scores, stride, size, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row, target = logits + index * stride, tl.load(targets + index)
    target_logit = tl.load(row + target)
    peak = tl.full([], float("-inf"), tl.float32)
    total, other_mass, weighted_sum = (
        0.0,
        0.0,
        0.0,
    )  # sums of e^(z - peak), without the target's, and times z - peak
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        z = tl.load(row + column, mask=column < size, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(z))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = tl.exp(z - shift)
        peak_change = tl.where(peak == float("-inf"), 0.0, peak - shift)
        shrink = tl.exp(peak_change)
        depth = tl.where(mass > 0, z - shift, 0.0)
        weighted_sum = (weighted_sum + total * peak_change) * shrink + tl.sum(mass * depth)
        total = total * shrink + tl.sum(mass)
        other_mass = other_mass * shrink + tl.sum(tl.where(column == target, 0.0, mass))
        peak = higher
    tl.store(scores + 2 * index, target_logit - peak - tl.log(total))
    tl.store(scores + 2 * index + 1, tl.log(total) - weighted_sum / total)
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        z = tl.load(row + column, mask=column < size, other=float("-inf"))
        slope = tl.where(column == target, other_mass / total, -tl.exp(z - peak) / total)
        tl.store(row + column, slope, mask=column < size)
