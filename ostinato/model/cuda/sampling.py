"""From logits to tokens in Triton: the sampler of a decode step in one launch, two with filters.

The token is the inverse transform of the filtered distribution at an addressed uniform, as in
``engine.sampler``, whose ``sample_torch`` is the twin. A program reads a row twice: for its peak, and for its
mass by chunks of a fixed size, in float64 and in vocabulary order; then the one chunk that holds the token.
Rows depend on no other row.

The edge of top-k and top-p is found by bisection over the float32 values themselves (as integers of the same
order), so ties at the edge are kept and nothing is sorted.

B rows, V vocabulary.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no function of Python: its types are Triton's.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048


def cut_off(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B] float32: the smallest scaled logit that the filters keep, -inf where all are kept. Scaled is
    logits * (1 / temperature). ``top_k`` [B] int32, 0 or V: none; ``top_p``, ``min_p`` [B] float32, 1 and 0:
    none. Rows of temperature 0 keep all: their token is the best one."""
    cuts = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _cut_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, cuts, logits.stride(0), logits.shape[1], CHUNK=CHUNK
        )
    return cuts


def draw(
    logits: Tensor, temperature: Tensor, cuts: Tensor, u: Tensor, targets: Tensor | None = None
) -> Tensor:
    """[3, B] float64, to be read at once: tokens, and log-probabilities and edges of float32, as
    ``engine.sampler.Drawn`` has them, of logits [B, V] float32 or bfloat16 at ``u`` [B] float64 in (0, 1),
    over scaled logits of at least ``cuts`` [B]; or of the ``targets`` [B] int64 in place of a draw. Nothing
    is read back here."""
    count, size = logits.shape
    device = logits.device
    out = torch.empty(3, count, dtype=torch.float64, device=device)
    masses = torch.empty(count, triton.cdiv(size, CHUNK), dtype=torch.float64, device=device)
    given = torch.empty_like(u, dtype=torch.int64) if targets is None else targets
    if count:
        _draw_kernel[(count,)](
            logits, temperature, cuts, u, given, out, masses, targets is not None,
            logits.stride(0), masses.stride(0), count, size, CHUNK=CHUNK,
        )  # fmt: skip
    return out


def score(logits: Tensor, temperature: float, targets: Tensor) -> Tensor:
    """[n] float32: the log-probabilities that the sampler gives ``targets`` [n], by its own kernel, of logits
    [n, V] float32 that are -inf where its filters keep nothing (``Ops.score``)."""
    heat, cuts, u = (
        torch.full((len(logits),), value, dtype=dtype, device=logits.device)
        for value, dtype in ((temperature, torch.float32), (-torch.inf, torch.float32), (0.5, torch.float64))
    )
    return draw(logits, heat, cuts, u, targets)[1].float()


@triton.jit
def _scaled(row, column, size, inverse):
    """A chunk of scaled logits, -inf beyond the vocabulary."""
    z = tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32)
    return z * inverse


@triton.jit
def _peak(row, size, CHUNK: tl.constexpr):
    """(largest logit, its first place, how many are NaN) of a row."""
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
def _ordered(value):
    """float32 as int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _cut_kernel(logits, temperature, top_k, top_p, min_p, cuts, stride, size, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    heat, k = tl.load(temperature + index), tl.load(top_k + index)
    p, floor = tl.load(top_p + index), tl.load(min_p + index)
    cut = tl.full([], float("-inf"), tl.float32)
    greedy = heat == 0
    by_rank, by_mass, by_peak = (k > 0) & (k < size), p < 1, floor > 0
    if (by_rank | by_mass | by_peak) & (heat != 0):
        inverse = 1.0 / tl.where(greedy, 1.0, heat)
        peak = _peak(row, size, CHUNK)[0] * inverse
        if by_rank:
            low, high = tl.full([], -2147483648, tl.int64), _ordered(peak).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                kept = tl.full([], 0, tl.int32)
                for start in range(0, size, CHUNK):
                    column = start + tl.arange(0, CHUNK)
                    z = _scaled(row, column, size, inverse)
                    kept += tl.sum(((_ordered(z) >= middle) & (column < size)).to(tl.int32))
                enough = kept >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            bits = low.to(tl.int32)
            cut = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        if by_mass:
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, size, CHUNK):
                z = _scaled(row, start + tl.arange(0, CHUNK), size, inverse)
                total += tl.sum(tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64))
            low, high = tl.full([], -2147483648, tl.int64), _ordered(peak).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                mass = tl.full([], 0.0, tl.float64)
                for start in range(0, size, CHUNK):
                    z = _scaled(row, start + tl.arange(0, CHUNK), size, inverse)
                    kept = (z >= cut) & (_ordered(z) >= middle)
                    mass += tl.sum(tl.where(kept, tl.exp(z - peak), 0.0).to(tl.float64))
                enough = mass >= p.to(tl.float64) * total
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            bits = low.to(tl.int32)
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
    largest, best, nans = _peak(row, size, CHUNK)
    # also +inf and rows that are -inf throughout
    broken = (nans > 0) | (largest == float("inf")) | (largest == float("-inf"))
    greedy = heat == 0
    inverse = 1.0 / tl.where(greedy, 1.0, heat)  # times the inverse, as every sampler of ours: the same ties
    peak = tl.where(broken, 0.0, largest * inverse)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        z = _scaled(row, start + tl.arange(0, CHUNK), size, inverse)
        mass = tl.sum(tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64))
        tl.store(sums + start // CHUNK, mass)
        total += mass
    # the chunk in which the running mass exceeds the target; where rounding leaves none, the last with mass
    target = tl.load(u + index) * total
    running, before = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    chosen, done = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, size, CHUNK):
        mass = tl.load(sums + start // CHUNK)
        here = (done == 0) & (mass > 0)
        chosen = tl.where(here, start, chosen)
        before = tl.where(here, running, before)
        running += mass
        done = tl.where(here & (running > target), 1, done)
    given = tl.load(targets + index, mask=is_given != 0, other=-1).to(tl.int32)
    chosen = tl.where(given >= 0, given // CHUNK * CHUNK, chosen)
    column = chosen + tl.arange(0, CHUNK)
    z = _scaled(row, column, size, inverse)
    mass = tl.where(z >= cut, tl.exp(z - peak), 0.0).to(tl.float64)
    cumulative = before + tl.cumsum(mass, axis=0)
    token = chosen + tl.sum((cumulative <= target).to(tl.int32))
    token = tl.minimum(token, tl.max(tl.where(mass > 0, column, chosen)))
    token = tl.where(given >= 0, given, token)
    own = tl.sum(tl.where(column == token, mass, 0.0))
    logit = tl.sum(tl.where(column == token, z - peak, 0.0))
    edge = (tl.sum(tl.where(column == token, cumulative, 0.0)) - own) / total
    logprob = logit.to(tl.float64) - tl.log(total)
    nan = float("nan")
    token = tl.where(broken, -1, tl.where(greedy, best, token))
    logprob, edge = tl.where(greedy, 0.0, logprob).to(tl.float32), tl.where(greedy, 0.0, edge).to(tl.float32)
    tl.store(out + index, token.to(tl.float64))
    tl.store(out + count + index, tl.where(broken, nan, logprob).to(tl.float64))
    tl.store(out + 2 * count + index, tl.where(broken, nan, edge).to(tl.float64))
