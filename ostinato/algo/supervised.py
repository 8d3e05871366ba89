"""Supervised and preference losses, as weights of log-probabilities.

Both are sums over tokens, -sum(w log p), once the weights are known:

    supervised    w = 1 / assistant tokens of the step
    preferences   w = -d loss / d log pi(answer), the same for all tokens of an answer: it is positive for the
                  chosen one, and comes from a pass without gradients

so neither depends on how rows are packed, and one trainer loss (``token_losses``) serves both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_weights(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Weights [L] float32 of each row: 1 / trained tokens of all rows where trained, else 0."""
    count = sum(int(mask.sum()) for mask in masks)
    return [(mask / max(1, count)).astype(np.float32) for mask in masks]


def dpo(logprobs: np.ndarray, reference: np.ndarray, beta: float) -> tuple[np.ndarray, ...]:
    """DPO with the sigmoid loss (arXiv 2305.18290, eq. 7). ``logprobs`` and ``reference``: [P, 2], log pi of
    the chosen and the rejected answer, summed over its tokens. Returns (loss [P], rewards beta log(pi /
    reference) [P, 2], slopes d loss / d log pi [P, 2])."""
    rewards = beta * (logprobs - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    slope = beta * np.exp(-np.logaddexp(0.0, margins))  # beta sigmoid(-margin)
    return np.logaddexp(0.0, -margins), rewards, np.stack([-slope, slope], axis=1)
