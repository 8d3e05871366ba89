"""Do neighbouring epochs rhyme? The two observations of RhymeRL (arXiv 2508.18588), on one's own run.

Both figures are of the kind that third-party notes give for the paper: 75-95 % of the tokens reusable, and
2-4 % of the responses with a much changed length rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

START = -1  # stands for the tokens before a response


def token_reuse(past: Sequence[np.ndarray], new: Sequence[np.ndarray], context: int = 3) -> float:
    """Share of the tokens of ``new`` that some response of ``past``, to the same prompt, has after the same
    ``context`` tokens (or fewer where it begins); nan without new tokens.

    This is coverage: what could be drafted by somebody who knew which of the stored continuations to take.
    The share of drafts that a verifier accepts is another number, and so is the share that one draft can
    save.
    """
    seen, queried = _windows(past, context + 1), _windows(new, context + 1)
    if not len(queried):
        return float("nan")
    codes = _codes(np.concatenate([seen, queried]))
    return float(np.isin(codes[len(seen) :], codes[: len(seen)]).mean())


def length_rank_correlation(old: Mapping[str, float], new: Mapping[str, float]) -> float:
    """Spearman's rank correlation, over the prompts in both, of mean response lengths in two epochs; nan for
    fewer than two prompts or where all lengths of an epoch are equal."""
    before, after = _common_ranks(old, new)
    if len(before) < 2 or not before.std() or not after.std():
        return float("nan")
    return float(np.corrcoef(before, after)[0, 1])


def rank_shift(old: Mapping[str, float], new: Mapping[str, float], points: float = 10.0) -> float:
    """Share of what is in both (prompts, or responses named by prompt and sample) whose length rank differs
    by more than ``points`` percentile points; nan when nothing is in both."""
    before, after = _common_ranks(old, new)
    if not len(before):
        return float("nan")
    return float((100 * abs(before - after) > points * len(before)).mean())


def _windows(responses: Sequence[np.ndarray], width: int) -> np.ndarray:
    """[tokens, width] int64: every token with those before it."""
    start = np.full(width - 1, START)
    views = [
        np.lib.stride_tricks.sliding_window_view(np.concatenate([start, response]).astype(np.int64), width)
        for response in responses
        if len(response)
    ]
    return np.concatenate([np.zeros((0, width), np.int64), *views])


def _codes(windows: np.ndarray) -> np.ndarray:
    """[n] a number for each row, the same for equal rows only. Column by column, so that it always fits."""
    codes = np.zeros(len(windows), np.int64)
    for column in windows.T:
        codes = np.unique(codes * (windows.max() + 2) + column - START, return_inverse=True)[1]
    return codes


def _common_ranks(old: Mapping[str, float], new: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the names in both, among themselves."""
    names = [name for name in old if name in new]
    return _ranks([old[name] for name in names]), _ranks([new[name] for name in names])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """[n] float64 from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
