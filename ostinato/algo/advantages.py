"""Advantages from rewards, and the shaping of rewards by length: numpy, float64, a value per completion.

NaN means "not trained on" in input and output: a completion without a verdict enters as NaN, takes no part
in any mean or deviation and leaves as NaN; the caller drops and counts it. No failure becomes a 0.

Deviations are the sample's (ddof=1) and divide as ``a / (std + 1e-4)``: TRL's convention (torch.std).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

EPS = 1e-4
ZERO_SPREAD = 1e-6  # rewards are fp32 sums of parts of order 1: a smaller spread is their rounding


class Baseline(StrEnum):
    """The value that is subtracted from a reward."""

    NONE = "none"
    GROUP_MEAN = "group_mean"  # mean of the prompt's completions (GRPO, arXiv 2402.03300, section 4.1)
    LEAVE_ONE_OUT = "leave_one_out"  # mean of the prompt's other completions (RLOO, arXiv 2402.14740)
    BATCH_MEAN = "batch_mean"  # mean of the step's completions (REINFORCE++, arXiv 2501.03262)


class Scale(StrEnum):
    """The deviation by which, plus EPS, the difference to the baseline is divided."""

    NONE = "none"  # Dr.GRPO, arXiv 2503.20783
    GROUP = "group"  # deviation within the prompt
    BATCH = "batch"  # deviation of the step's differences (ScaleRL, arXiv 2510.13786; TRL takes raw rewards)


class Pool(StrEnum):
    """Groups over which a batch scale is measured: those without variance shrink it; ScaleRL does not say."""

    KEPT = "kept"  # groups with some variance only
    ALL = "all"


class Rewards(StrEnum):
    """The way in which rewards of several functions become one advantage."""

    SUM = "sum"  # their weighted sum is compared
    APART = "apart"  # each is compared by itself, and the advantages summed (GDPO, arXiv 2601.05242)


class Overlong(StrEnum):
    """The answers that have a reward which falls with length."""

    ALL = "all"  # DAPO, arXiv 2503.14476, section 3.4
    SOLVED = "solved"  # solved answers alone (ScaleRL, arXiv 2510.13786, eq. 9)


def advantages(
    rewards: Sequence[np.ndarray],
    *,
    baseline: Baseline,
    scale: Scale,
    batch_pool: Pool = Pool.KEPT,
    drop_zero_variance: bool = False,
) -> list[np.ndarray]:
    """Advantages of every completion of a step; ``rewards`` holds one array [G] per prompt, NaN = no verdict.

    A = (r - baseline) / (std + EPS). With ``drop_zero_variance`` a group whose verdicts are all equal leaves
    as NaN. A group with only one verdict has nothing to compare it with: NaN under a group baseline or scale.
    Raises ValueError for a group of fewer than 2 completions under these or with ``drop_zero_variance``, for
    choices that do not fit together (``check_choices``) and for an infinite reward.
    """
    check_choices(baseline, scale, batch_pool)
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    for group in groups:
        check_group_size(len(group), baseline, scale, drop_zero_variance)
        if np.isinf(group).any():
            raise ValueError(f"a reward is infinite: {group.tolist()}; return a finite number or None")
    is_flat_by_group = np.array([has_zero_variance(group) for group in groups], dtype=bool)
    centred = [_subtract_baseline(group, baseline) for group in groups]
    if baseline is Baseline.BATCH_MEAN and groups:
        mean = _average_known(np.concatenate(groups))
        centred = [group - mean for group in groups]
    match scale:
        case Scale.NONE:
            scaled = centred
        case Scale.GROUP:
            scaled = [group / (_measure_std(group) + EPS) for group in centred]
        case Scale.BATCH:
            pool = [
                group
                for group, is_flat in zip(centred, is_flat_by_group, strict=True)
                if batch_pool is Pool.ALL or not is_flat
            ]
            std = _measure_std(np.concatenate(pool)) if pool else 0.0  # no pool: every difference is 0
            scaled = [group / (std + EPS) for group in centred]
    return [
        np.full_like(group, np.nan) if drop_zero_variance and is_flat else group
        for group, is_flat in zip(scaled, is_flat_by_group, strict=True)
    ]


def advantages_apart(rewards: Sequence[np.ndarray], weights: Sequence[float]) -> list[np.ndarray]:
    """Advantages [G] of every completion of a step whose ``rewards``, [K, G] for each prompt, are those of K
    functions with ``weights`` [K] (GDPO, arXiv 2601.05242, section 3; TRL's "normalize_then_sum").

    Each reward is compared within its prompt, (r - mean) / (std + EPS), so that one of many values does not
    drown one of two; their weighted sum is divided by the step's deviation in the same way. NaN: the
    function has no opinion, which leaves its term out; a completion without any verdict leaves as NaN.
    """
    sums = []
    for group in rewards:
        terms = [
            weight * (np.where(np.isnan(row), np.nan, 0.0) if has_zero_variance(row) else _standardise(row))
            for row, weight in zip(group, weights, strict=True)
        ]
        has_no_verdict = np.isnan(group).all(axis=0)
        sums.append(np.where(has_no_verdict, np.nan, np.nansum(terms, axis=0)))
    step = np.concatenate([*sums, np.zeros(0)])
    return [(group - _average_known(step)) / (_measure_std(step) + EPS) for group in sums]


def _standardise(row: np.ndarray) -> np.ndarray:
    """(row - mean) / (std + EPS) over its verdicts."""
    return (row - _average_known(row)) / (_measure_std(row) + EPS)


def has_zero_variance(rewards: np.ndarray) -> bool:
    """Whether the verdicts of a group, [G] or of each of K functions [K, G], are all equal (also when there
    are fewer than two)."""
    rows = [row[~np.isnan(row)] for row in np.atleast_2d(rewards)]
    return all(len(row) < 2 or bool(np.ptp(row) <= ZERO_SPREAD) for row in rows)


def check_choices(baseline: Baseline, scale: Scale, batch_pool: Pool) -> None:
    """Raise ValueError for choices that would divide differences by the spread of something else.

    Equal rewards would then become advantages of 1 / EPS.
    """
    is_batch_mean = baseline is Baseline.BATCH_MEAN
    if baseline is Baseline.NONE and scale is not Scale.NONE:
        raise ValueError(
            f"algo.baseline is 'none' but scale is '{scale}'; use scale 'none' or another baseline"
        )
    if is_batch_mean and scale is Scale.GROUP:
        raise ValueError("algo.baseline is 'batch_mean' but scale is 'group'; use scale 'batch' or 'none'")
    if is_batch_mean and scale is Scale.BATCH and batch_pool is Pool.KEPT:
        raise ValueError(
            "algo.batch_pool is 'kept' but under baseline 'batch_mean' flat groups have advantages too; "
            "use batch_pool 'all'"
        )


def check_group_size(
    group_size: int, baseline: Baseline, scale: Scale, drop_zero_variance: bool = False
) -> None:
    """Raise ValueError for a group of one completion that is to be compared with its siblings, or that
    ``drop_zero_variance`` would drop."""
    if group_size >= 2:
        return
    if baseline in (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT) or scale is Scale.GROUP:
        raise ValueError(
            f"group size is {group_size} but baseline '{baseline}' with scale '{scale}' compares siblings; "
            "use at least 2, or baseline 'batch_mean' with scale 'batch'"
        )
    if drop_zero_variance:
        raise ValueError(
            f"group size is {group_size}, so drop_zero_variance drops all groups; use at least 2, or false"
        )


def overlong_penalty(lengths: np.ndarray, *, max_tokens: int, buffer: int, factor: float = 1.0) -> np.ndarray:
    """Soft overlong punishment [G], added to the reward (DAPO, arXiv 2503.14476, eq. 13; ScaleRL, 2510.13786,
    eq. 9: clip((L_max - length) / L_cache - 1, -1, 0) is the same).

    0 up to ``max_tokens - buffer`` tokens, falling linearly to ``-factor`` at ``max_tokens`` and beyond.
    ``buffer=0`` means off. Raises ValueError when the buffer is negative or longer than ``max_tokens``.
    """
    if not 0 <= buffer <= max_tokens:
        raise ValueError(f"overlong buffer is {buffer} tokens; use 0 (off) to max_tokens ({max_tokens})")
    if buffer == 0:
        return np.zeros(len(lengths))
    return factor * np.clip((max_tokens - buffer - np.asarray(lengths, dtype=np.float64)) / buffer, -1.0, 0.0)


def _subtract_baseline(group: np.ndarray, baseline: Baseline) -> np.ndarray:
    """Rewards [G] minus the baseline of the group, all NaN with fewer than two verdicts. Without a group
    baseline the rewards themselves."""
    if baseline not in (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT):
        return group
    num_verdicts = int((~np.isnan(group)).sum())
    if num_verdicts < 2:
        return np.full_like(group, np.nan)
    factor = num_verdicts / (num_verdicts - 1) if baseline is Baseline.LEAVE_ONE_OUT else 1.0
    return (group - _average_known(group)) * factor


def _average_known(values: np.ndarray) -> float:
    """Mean of the values that are not NaN; NaN without any."""
    verdicts = values[~np.isnan(values)]
    return float(verdicts.mean()) if len(verdicts) else np.nan


def _measure_std(values: np.ndarray) -> float:
    """Sample deviation (ddof=1) of the values that are not NaN; 0 for fewer than two."""
    verdicts = values[~np.isnan(values)]
    return float(verdicts.std(ddof=1)) if len(verdicts) > 1 else 0.0
