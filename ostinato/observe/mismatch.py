"""Statistics of the mismatch of sampler and trainer: log ratios (an arm), and router disagreement.

``algo.offpolicy`` corrects a loss and measures every step; here a whole batch is described once in a while,
with intervals and curves, as rows for a report. Everything is numpy and pure, and is returned as plain
Python numbers for JSON.

log ratio = trainer - sampler, of tokens that the sampler drew; both sides score with the same weights, so
what remains is kernels, precision and, in a mixture of experts, routing (R3, arXiv 2510.11370 section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ostinato.algo.offpolicy import LOG_RATIO_BOUND
from ostinato.algo.routing import find_lowest_overlap, overlap_ratio, shared_ids, sum_parts

DIRECTION = "KL(sampler || trainer)"  # tokens come from the sampler; the paper prints it the other way round
TAUS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0)
_CDF_AT = np.logspace(-7, 1, 33)  # four points per decade, the same for all arms
_LEAST_CLUSTERS = 5  # with fewer a bootstrap is meaningless: with one, its interval has no width

# Usual settings of the corrections in use.
_TRUNCATE_AT = 2.0  # TIS, Yao et al. 2025
_MASK_OUTSIDE = (0.5, 5.0)  # IcePop, arXiv 2510.18855
_SEQUENCE_MASK_AT = 3.0  # TRL's vllm_importance_sampling_cap


def arm(
    log_ratio: np.ndarray,
    sample_idx: np.ndarray,
    *,
    clusters: np.ndarray | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """All reported statistics of the tokens' log ratios [R]; ``sample_idx`` [R]: the sequence of each token;
    ``clusters`` [R]: equal for dependent sequences, such as answers to one prompt (default: ``sample_idx``).

    k3 estimates KL(sampler || trainer) in nats per token (Schulman 2020), with a 95 % interval by bootstrap
    over clusters, as their tokens are not independent; NaN for fewer than 5. ``tails`` is F(tau): the
    share of tokens with max(r, 1/r) > tau. ``ess``: (sum r)^2 / (R sum r^2). ``masked``: shares of tokens
    that truncation, IcePop and the mask of whole sequences would touch. Raises ValueError for no tokens.
    """
    if len(log_ratio) == 0:
        raise ValueError("log_ratio is empty; measure at least one token")
    log_ratio = np.asarray(log_ratio, np.float64)
    _, owner = np.unique(sample_idx, return_inverse=True)
    lengths = np.bincount(owner)
    sums = np.bincount(owner, weights=log_ratio)
    bounded = log_ratio.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    gap, ratio = np.abs(log_ratio), np.exp(bounded)
    k3 = np.expm1(bounded) - bounded  # expm1: r - 1 would cancel where the two almost agree
    low, high = _bootstrap_mean(k3, owner if clusters is None else clusters, bootstrap, seed)
    squares = float(np.square(ratio).mean())
    return {
        "tokens": len(log_ratio),
        "sequences": len(lengths),
        "k3": float(k3.mean()),
        "k3_low": low,
        "k3_high": high,
        "abs_mean": float(gap.mean()),
        "abs_max": float(gap.max()),
        "ess": min(1.0, float(ratio.mean()) ** 2 / squares),  # <= 1 by Cauchy-Schwarz, but for rounding
        "tails": [[tau, float((gap > math.log(tau)).mean())] for tau in TAUS],
        "cdf": _tabulate_cdf(gap),
        "masked": {
            "token_truncate": float((ratio > _TRUNCATE_AT).mean()),
            "token_mask": float(((ratio < _MASK_OUTSIDE[0]) | (ratio > _MASK_OUTSIDE[1])).mean()),
            "sequence_mask": float((sums > math.log(_SEQUENCE_MASK_AT))[owner].mean()),
        },
    }


def pearson(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of two policies' log-probabilities [R] of the same tokens; NaN if one is constant."""
    a, b = (np.asarray(values, np.float64) - np.mean(values, dtype=np.float64) for values in (one, other))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def routers(
    native: np.ndarray,
    recorded: np.ndarray,
    margins: np.ndarray,
    *,
    spans: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Statistics of routers in which the trainer chooses other experts than the sampler did.

    native, recorded: [T, L, K] expert ids, recorded NO_EXPERT where unknown. margins: [T, L], by how much
    the last expert chosen beat the first left out (``model.moe.compute_routing_margins``). A router is one
    (token, layer); two differ when their *sets* do. ``spans`` [S, 4] are the rows of each sequence
    (``algo.routing.sequence_spans``); without it ``lowest_sequence`` (the lowest overlap of an answer or
    a prompt of at least 32 routers) is NaN. ``layers``: the decoder's numbers of the L layers. A statistic
    without known routers is NaN.
    """
    share = shared_ids(native, recorded)
    is_known = ~np.isnan(share)
    differ = is_known & (share < 1)
    tokens = is_known.any(axis=1)
    numbers = range(share.shape[1]) if layers is None else layers
    return {
        "differ": _share(differ.sum(), is_known.sum()),
        "tokens_differ": _share(differ.any(axis=1).sum(), tokens.sum()),
        "overlap": _mean(share),
        "lowest_sequence": math.nan if spans is None else _find_lowest(share, spans),
        "layers": [
            {
                "layer": int(number),
                "differ": _share(differ[:, i].sum(), is_known[:, i].sum()),
                "overlap": _mean(share[:, i]),
                "margin": _take_quantile(margins[:, i][is_known[:, i]], 0.5),
                "margin_flip": _take_quantile(margins[:, i][differ[:, i]], 0.5),
            }
            for i, number in enumerate(numbers)
        ],
        "margin_median": _take_quantile(margins[is_known], 0.5),
        "margin_flip_median": _take_quantile(margins[differ], 0.5),
    }


def _bootstrap_mean(
    values: np.ndarray, clusters: np.ndarray, bootstrap: int, seed: int
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of ``values`` [R], resampling whole clusters."""
    _, owner = np.unique(clusters, return_inverse=True)
    sums, lengths = np.bincount(owner, weights=values), np.bincount(owner)
    if (count := len(lengths)) < _LEAST_CLUSTERS:
        return math.nan, math.nan
    rng, means = np.random.default_rng(seed), np.empty(bootstrap)
    block = max(1, (1 << 20) // count)  # a million draws at a time: memory stays small
    for first in range(0, bootstrap, block):
        picks = rng.integers(count, size=(min(block, bootstrap - first), count))
        means[first : first + block] = sums[picks].sum(axis=1) / lengths[picks].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _tabulate_cdf(gap: np.ndarray) -> list[list[float]]:
    """Rows [abs log ratio, share of tokens at or below] at the fixed points _CDF_AT."""
    below = np.searchsorted(np.sort(gap), _CDF_AT, side="right") / len(gap)
    return [[float(point), float(share)] for point, share in zip(_CDF_AT, below, strict=True)]


def _find_lowest(share: np.ndarray, spans: np.ndarray) -> float:
    """The lowest overlap of a sequence's answer or prompt, of those that are long enough."""
    is_known = ~np.isnan(share)
    common, routers = sum_parts(
        np.stack((np.where(is_known, share, 0).sum(axis=1), is_known.sum(axis=1))), spans
    )
    return find_lowest_overlap(overlap_ratio(common, routers), routers)


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else math.nan


def _take_quantile(values: np.ndarray, q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if known.size else math.nan
