"""From logits to tokens: temperature, top-k, top-p, min-p, and one addressed uniform per token.

The token is the inverse transform of the kept distribution at u: the first index, in vocabulary order, whose
cumulative mass exceeds u times the total. That costs one exponential per logit, which the normaliser of the
log-probability needs anyway; a Gumbel draw would add a logarithm and a random number per logit.

Filters apply to softmax(logits / temperature): top-k first, top-p over what is left, min-p relative to the
peak. Ties at an edge are kept. At temperature 0 the first of the best tokens is taken, with log-probability
0.

The ids that the filters kept can be reported with the token: a trainer that normalises over the same ids
scores the distribution that was sampled from, not another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.engine.paged import move_to_device
from ostinato.engine.sequences import Settings
from ostinato.model.native import Kernels
from ostinato.types import Support

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels


class Drawn(NamedTuple):
    """B drawn tokens. A row whose logits are not finite has token -1 and NaN; the caller has to report it."""

    tokens: np.ndarray  # [B] int64
    logprobs: np.ndarray  # [B] float32, under the filtered, renormalised distribution that was sampled from
    edges: np.ndarray  # [B] float32: its mass before the token, so that u was in [edge, edge + exp(logprob))
    support: Support | None = None  # of B tokens, where it was requested
    top: tuple[np.ndarray, np.ndarray] | None = None  # the likeliest [B, n]: ids, log-probabilities

    @classmethod
    def concatenate(cls, parts: Sequence[Drawn]) -> Drawn:
        tokens, logprobs, edges, supports, tops = zip(*parts, strict=True)
        return cls(
            np.concatenate(tokens),
            np.concatenate(logprobs),
            np.concatenate(edges),
            None if supports[0] is None else Support.concatenate(supports),
            None
            if tops[0] is None
            else (np.concatenate([t[0] for t in tops]), np.concatenate([t[1] for t in tops])),
        )


def sample(
    logits: Tensor,
    settings: Settings,
    u: np.ndarray,
    kernels: Kernels | CudaKernels | None = None,
    *,
    want_support: bool = False,
) -> Drawn:
    """Draw tokens from logits [B, V] with uniforms u [B] float64 in (0, 1): by ``kernels``, or in torch if
    there are none.

    ``want_support``: return the ids that each was drawn from too, by two more passes over rows with filters.
    """
    if kernels is None:
        return sample_torch(logits, settings, u, want_support=want_support)
    if not isinstance(kernels, Kernels):
        return _sample_triton(logits, settings, u, want_support=want_support)
    logits = logits.float().contiguous()
    drawn = Drawn(np.empty(len(u), np.int64), np.empty(len(u), np.float32), np.empty(len(u), np.float32))
    temperature, *others = (
        np.ascontiguousarray(a)
        for a in (settings.temperature, settings.top_k, settings.top_p, settings.min_p, u)
    )
    cuts = np.empty(len(u), np.float32) if want_support else None
    kernels.sample(logits, temperature, *others, *drawn[:3], cuts)
    if cuts is None:
        return drawn
    counts, ids = kernels.support(logits, temperature, cuts)
    return drawn._replace(support=Support(counts=counts, ids=ids))


def find_likeliest(logits: Tensor, settings: Settings, drawn: Drawn, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, log-probabilities) [B, n] of the likeliest tokens of the sampled distribution, best first.

    The scale is that of ``drawn.logprobs``: tokens removed by filters have -inf. At temperature 0 it is
    softmax(logits), the probabilities by which the token was chosen.
    """
    with torch.inference_mode():
        temperature = torch.from_numpy(np.where(settings.temperature > 0, settings.temperature, 1.0))
        z = logits.float() / temperature.to(logits.device, torch.float32).unsqueeze(1)
        if z.is_cuda:
            z = z - z.logsumexp(dim=-1, keepdim=True)
        else:  # row by row: with several threads torch adds up a lone row in another order
            z = z - torch.stack([row.logsumexp(dim=-1) for row in z]).unsqueeze(1)
        logprobs, ids = z.topk(min(n, z.shape[1]), dim=-1)
        token_logprobs = z.gather(
            1, torch.from_numpy(drawn.tokens).to(z.device).clamp_min(0).unsqueeze(1)
        ).squeeze(1)
    logprobs, token_logprobs = logprobs.cpu().numpy(), token_logprobs.cpu().numpy()
    is_filtered = settings.find_filtered(logits.shape[1])
    logprobs = logprobs + np.where(is_filtered, drawn.logprobs - token_logprobs, 0)[:, None]
    if drawn.support is not None:  # filters keep the likeliest
        num_kept = np.where(is_filtered & (drawn.support.counts > 0), drawn.support.counts, logprobs.shape[1])
        logprobs = np.where(np.arange(logprobs.shape[1]) < num_kept[:, None], logprobs, -np.inf)
    return ids.cpu().numpy(), logprobs.astype(np.float32)


def sample_torch(logits: Tensor, settings: Settings, u: np.ndarray, *, want_support: bool = False) -> Drawn:
    """Draw tokens as the native sampler does, in torch on the device of the logits. ``want_support``: see
    ``sample``."""
    device, V = logits.device, logits.shape[1]
    z = logits.float()
    temperature = torch.from_numpy(settings.temperature).to(device)
    is_greedy, best_tokens = temperature == 0, z.argmax(dim=-1)
    is_broken = ~torch.isfinite(z.amax(dim=-1)) | torch.isnan(z).any(dim=-1)
    # times the inverse, not divided: the same roundings as the native sampler, so the same ties
    scaled = z * temperature.where(~is_greedy, torch.ones_like(temperature)).reciprocal().unsqueeze(1)
    peak = scaled.amax(dim=-1, keepdim=True)
    is_kept = torch.ones_like(scaled, dtype=torch.bool)
    if ((settings.top_k > 0) & (settings.top_k < V)).any() or (settings.top_p < 1).any():
        is_kept &= scaled >= _compute_cuts(scaled, settings)
    if (settings.min_p > 0).any():
        is_kept &= scaled >= peak + torch.from_numpy(settings.min_p).to(device).log().unsqueeze(1)
    mass = (scaled - peak).exp().double().masked_fill(~is_kept, 0.0)
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    tokens = (cumulative <= torch.from_numpy(u).to(device).unsqueeze(1) * total).sum(dim=-1)
    # u times the total may round up to the total: then the last token with mass is taken
    last_tokens = V - 1 - (mass > 0).flip(-1).int().argmax(dim=-1)
    tokens = torch.minimum(tokens, last_tokens)
    index, zeros = tokens.unsqueeze(1), torch.zeros(len(u), dtype=torch.float64, device=device)
    logprobs = (scaled - peak).double().gather(1, index).squeeze(1) - total.squeeze(1).log()
    edges = (cumulative.gather(1, index) - mass.gather(1, index)).squeeze(1) / total.squeeze(1)
    tokens = tokens.where(~is_greedy, best_tokens).masked_fill(is_broken, -1)
    logprobs = logprobs.where(~is_greedy, zeros).masked_fill(is_broken, torch.nan)
    edges = edges.where(~is_greedy, zeros).masked_fill(is_broken, torch.nan)
    drawn = Drawn(tokens.cpu().numpy(), logprobs.float().cpu().numpy(), edges.float().cpu().numpy())
    if not want_support:
        return drawn
    is_filtered = torch.from_numpy(settings.find_filtered(V)).to(device) & ~is_broken
    return drawn._replace(support=_make_support(is_kept & (scaled > -torch.inf), is_filtered))


def _sample_triton(logits: Tensor, settings: Settings, u: np.ndarray, *, want_support: bool) -> Drawn:
    """Draw tokens by the kernels of ``model.cuda``, with one read from the GPU at the end."""
    from ostinato.model.cuda import sampling

    device = logits.device
    values = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    temperature, *filters = (move_to_device(np.ascontiguousarray(a), device) for a in values)
    is_filtered = settings.find_filtered(logits.shape[1])
    cuts = torch.full((len(u),), -torch.inf, device=device)
    if is_filtered.any():
        cuts = sampling.compute_cuts(logits, temperature, *filters)
    drawn = (
        sampling.draw_tokens(logits, temperature, cuts, move_to_device(np.ascontiguousarray(u), device))
        .cpu()
        .numpy()
    )
    result = Drawn(drawn[0].astype(np.int64), *drawn[1:].astype(np.float32))
    if not want_support:
        return result
    inverse = temperature.where(temperature > 0, torch.ones_like(temperature)).reciprocal().unsqueeze(1)
    scaled = logits.float() * inverse
    has_support = torch.from_numpy(is_filtered & (result.tokens >= 0)).to(device)
    return result._replace(
        support=_make_support((scaled >= cuts.unsqueeze(1)) & (scaled > -torch.inf), has_support)
    )


def _make_support(is_kept: Tensor, is_filtered: Tensor) -> Support:
    """Return the ids where ``is_kept`` [B, V], in ``is_filtered`` [B] rows; a row with all has count 0."""
    counts = is_kept.sum(dim=-1).masked_fill(~is_filtered, 0)
    counts = counts.masked_fill(counts == is_kept.shape[1], 0)
    ids = is_kept[counts > 0].nonzero()[:, 1]
    return Support(counts=counts.int().cpu().numpy(), ids=ids.int().cpu().numpy())


def _compute_cuts(scaled: Tensor, settings: Settings) -> Tensor:
    """Return [B, 1], the smallest scaled logit that top-k and top-p keep."""
    V, device = scaled.shape[1], scaled.device
    sorted_logits = scaled.sort(dim=-1, descending=True).values
    top_k = torch.from_numpy(settings.top_k).to(device).long()
    ranks = torch.where((top_k > 0) & (top_k < V), top_k, V)
    cut = sorted_logits.gather(1, ranks.unsqueeze(1) - 1)
    mass = (sorted_logits - sorted_logits[:, :1]).exp().double().masked_fill(sorted_logits < cut, 0.0)
    top_p = torch.from_numpy(settings.top_p).to(device).double().unsqueeze(1)
    is_enough = mass.cumsum(dim=-1) >= top_p * mass.sum(dim=-1, keepdim=True)
    edge = is_enough.int().argmax(dim=-1, keepdim=True)  # the first rank whose cumulative mass is enough
    return torch.where(top_p < 1, torch.maximum(cut, sorted_logits.gather(1, edge)), cut)
