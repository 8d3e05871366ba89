"""Draw tokens from logits in Triton: the sampler of a decode step in a single launch, two with filters.

The token is the inverse transform of the filtered distribution at an addressed uniform, as in
``engine.sampler``, whose ``sample_torch`` is the twin. A program reads a row twice, for its peak and for its
mass by chunks of a fixed size, in float64 and in vocabulary order; then only the chunk that holds the token.
The result of a row depends on no other row.

The edge of top-k and top-p is found by bisection over the float32 values themselves (as integers of the same
order), so ties at the edge are kept and nothing is sorted.

B rows, V vocabulary.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048


def compute_cuts(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Compute [B] float32: the smallest logit, scaled by 1 / temperature, that the filters keep, or -inf if
    they keep all. ``top_k`` [B] int32, 0 or V: off. ``top_p``, ``min_p`` [B] float32, 1 and 0: off. A row of
    temperature 0 keeps all, since its token is the one with the largest logit."""
    cuts = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _cut_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, cuts, logits.stride(0), logits.shape[1], CHUNK=CHUNK
        )
    return cuts


def draw_tokens(
    logits: Tensor, temperature: Tensor, cuts: Tensor, u: Tensor, targets: Tensor | None = None
) -> Tensor:
    """Draw tokens from logits [B, V] float32 or bfloat16 at ``u`` [B] float64 in (0, 1), among scaled logits
    of at least ``cuts`` [B]. With ``targets`` [B] int64, score these instead. Returns [3, B] float64, so that
    it can be read in a single copy: tokens, and log-probabilities and edges of float32 as in
    ``engine.sampler.Drawn``. The token of a row with NaN, +inf or nothing but -inf is -1, and its other
    values are NaN. Nothing is read back here."""
    count, size = logits.shape
    device = logits.device
    out = torch.empty(3, count, dtype=torch.float64, device=device)
    masses = torch.empty(count, triton.cdiv(size, CHUNK), dtype=torch.float64, device=device)
    target_ids = torch.empty_like(u, dtype=torch.int64) if targets is None else targets
    if count:
        _draw_kernel[(count,)](
            logits, temperature, cuts, u, target_ids, out, masses, targets is not None,
            logits.stride(0), masses.stride(0), count, size, CHUNK=CHUNK,
        )  # fmt: skip
    return out


def score_targets(logits: Tensor, temperature: float, targets: Tensor) -> Tensor:
    """Compute [n] float32: the sampler's log-probabilities of ``targets`` [n], by its own kernel, from logits
    [n, V] float32 that are -inf for tokens that its filters exclude (``Ops.score``)."""
    temperatures, cuts, u = (
        torch.full((len(logits),), value, dtype=dtype, device=logits.device)
        for value, dtype in ((temperature, torch.float32), (-torch.inf, torch.float32), (0.5, torch.float64))
    )
    return draw_tokens(logits, temperatures, cuts, u, targets)[1].float()


@triton.jit
def _load_scaled(row, column, size, inverse):
    """Load a chunk of scaled logits, -inf beyond the vocabulary."""
    z = tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32)
    return z * inverse


@triton.jit
def _find_peak(row, size, CHUNK: tl.constexpr):
    """Return (largest logit, its first place, number of NaNs) of a row."""
    peak = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    nans = tl.full([], 0, tl.int32)
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        z = tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32)
        nans += tl.sum((z != z).to(tl.int32))
        z = tl.where(z == z, z, float("-inf"))
        top = tl.max(z)
        place = tl.min(tl.where(z == top, column, size))
        best = tl.where(top > peak, place, best)
        peak = tl.maximum(peak, top)
    return peak, best, nans


@triton.jit
def _map_to_ordered_int(value):
    """Map float32 to int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _cut_kernel(logits, temperature, top_k, top_p, min_p, cuts, stride, size, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    heat, k = tl.load(temperature + index), tl.load(top_k + index)
    p, floor = tl.load(top_p + index), tl.load(min_p + index)
    cut = tl.full([], float("-inf"), tl.float32)
    is_greedy = heat == 0
    by_rank, by_mass, by_peak = (k > 0) & (k < size), p < 1, floor > 0
    if (by_rank | by_mass | by_peak) & (heat != 0):
        inverse = 1.0 / tl.where(is_greedy, 1.0, heat)
        peak = _find_peak(row, size, CHUNK)[0] * inverse
        if by_rank:
            low, high = tl.full([], -2147483648, tl.int64), _map_to_ordered_int(peak).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                survivors = tl.full([], 0, tl.int32)
                for start in range(0, size, CHUNK):
                    column = start + tl.arange(0, CHUNK)
                    z = _load_scaled(row, column, size, inverse)
                    survivors += tl.sum(((_map_to_ordered_int(z) >= middle) & (column < size)).to(tl.int32))
                is_enough = survivors >= k
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            bits = low.to(tl.int32)  # back from the ordered integer
            cut = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        if by_mass:
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, size, CHUNK):
                z = _load_scaled(row, start + tl.arange(0, CHUNK), size, inverse)
                total += tl.sum(tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64))
            low, high = tl.full([], -2147483648, tl.int64), _map_to_ordered_int(peak).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                mass = tl.full([], 0.0, tl.float64)
                for start in range(0, size, CHUNK):
                    z = _load_scaled(row, start + tl.arange(0, CHUNK), size, inverse)
                    survivors = (z >= cut) & (_map_to_ordered_int(z) >= middle)
                    mass += tl.sum(tl.where(survivors, tl.exp(z - peak), 0.0).to(tl.float64))
                is_enough = mass >= p.to(tl.float64) * total
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle - 1)
            bits = low.to(tl.int32)  # back from the ordered integer
            edge = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
            cut = tl.maximum(cut, edge)
        if by_peak:
            cut = tl.maximum(cut, peak + tl.log(floor))
    tl.store(cuts + index, cut)


@triton.jit(do_not_specialize=["is_given", "count"])
def _draw_kernel(
    logits, temperature, cuts, u, targets, out, masses, is_given, stride, mass_stride, count, size,
    CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row, sums = logits + index * stride, masses + index * mass_stride
    heat, cut = tl.load(temperature + index), tl.load(cuts + index)
    largest, best, nans = _find_peak(row, size, CHUNK)
    # NaN, +inf, or a row that is -inf throughout
    is_broken = (nans > 0) | (largest == float("inf")) | (largest == float("-inf"))
    is_greedy = heat == 0
    inverse = 1.0 / tl.where(is_greedy, 1.0, heat)  # multiplied, as in our other samplers: the same ties
    peak = tl.where(is_broken, 0.0, largest * inverse)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        z = _load_scaled(row, start + tl.arange(0, CHUNK), size, inverse)
        mass = tl.sum(tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64))
        tl.store(sums + start // CHUNK, mass)
        total += mass
    # the chunk in which the running mass exceeds the target; where rounding leaves none, the last with mass
    target = tl.load(u + index) * total
    running, earlier_mass = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    chunk, is_done = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, size, CHUNK):
        mass = tl.load(sums + start // CHUNK)
        has_mass = (is_done == 0) & (mass > 0)
        chunk = tl.where(has_mass, start, chunk)
        earlier_mass = tl.where(has_mass, running, earlier_mass)
        running += mass
        is_done = tl.where(has_mass & (running > target), 1, is_done)
    target_id = tl.load(targets + index, mask=is_given != 0, other=-1).to(tl.int32)
    chunk = tl.where(target_id >= 0, target_id // CHUNK * CHUNK, chunk)
    column = chunk + tl.arange(0, CHUNK)
    z = _load_scaled(row, column, size, inverse)
    mass = tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64)
    cumulative = earlier_mass + tl.cumsum(mass, axis=0)
    token = chunk + tl.sum((cumulative <= target).to(tl.int32))
    token = tl.minimum(token, tl.max(tl.where(mass > 0, column, chunk)))
    token = tl.where(target_id >= 0, target_id, token)
    token_mass = tl.sum(tl.where(column == token, mass, 0.0))
    logit = tl.sum(tl.where(column == token, z - peak, 0.0))
    edge = (tl.sum(tl.where(column == token, cumulative, 0.0)) - token_mass) / total
    logprob = logit.to(tl.float64) - tl.log(total)
    nan = float("nan")
    token = tl.where(is_broken, -1, tl.where(is_greedy, best, token))
    logprob, edge = (
        tl.where(is_greedy, 0.0, logprob).to(tl.float32),
        tl.where(is_greedy, 0.0, edge).to(tl.float32),
    )
    tl.store(out + index, token.to(tl.float64))
    tl.store(out + count + index, tl.where(is_broken, nan, logprob).to(tl.float64))
    tl.store(out + 2 * count + index, tl.where(is_broken, nan, edge).to(tl.float64))
