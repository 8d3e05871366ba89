"""Evaluation: play without training, on the same prompts with the same noise every time.

Common random numbers: two evaluations of one run differ by the policy alone, so their difference is known
better than each of them. Standard errors are those of a mean over prompts, which are the independent draws;
samples of one prompt are not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostinato.rollout.health import counters, length_figures, pass_at_k
from ostinato.rollout.play import Ask, Played, Stage, play, verdicts
from ostinato.types import Prompt, Sampling

EVAL_STEP = 0  # training steps count from 1, so no training token shares its noise with an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A held-out measurement: ``samples`` answers to each prompt, scored as pass@1 and pass@k."""

    split: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples: int = 1
    k: int = 1
    solved_at: float = 1.0  # a reward from here on is a solution
    seed: int = 0
    weights: str = "model"  # those of the base that the engine samples with (engine.weights)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError(f"eval.n is 0 for split {self.split}; use at least 1 prompt")
        if not 1 <= self.k <= self.samples:
            raise ValueError(
                f"eval.k is {self.k}; use 1 to the number of samples per prompt ({self.samples})"
            )


async def evaluate(stage: Stage, evaluation: Evaluation, step: int) -> dict[str, Any]:
    """One row of eval.jsonl for the policy that the engine serves now, after ``step`` training steps.

    ``n`` prompts count; those with fewer than k verdicts do not and are reported as ``excluded``.
    """
    started = time.perf_counter()
    asks = [
        Ask(prompt=prompt, seed=(evaluation.seed, EVAL_STEP, i), group_size=evaluation.samples, step=step)
        for i, prompt in enumerate(evaluation.prompts)
    ]
    played = await play(replace(stage, sampling=evaluation.sampling), asks)
    seconds = time.perf_counter() - started
    about = {"step": step, "split": evaluation.split, "weights": evaluation.weights}
    return {**about, **score(played, evaluation), "seconds": seconds}


def score(played: Sequence[Played], evaluation: Evaluation) -> dict[str, Any]:
    """pass@1, pass@k and mean reward with their standard errors over prompts, lengths and counters."""
    groups = [item.group for item in played]
    judged = [values[np.isfinite(values)] for values in map(verdicts, groups)]
    counted = [values for values in judged if len(values) >= evaluation.k]
    solved = [(len(values), int((values >= evaluation.solved_at).sum())) for values in counted]
    first, first_error = mean_and_error([c / n for n, c in solved])
    best, best_error = mean_and_error([pass_at_k(n, c, evaluation.k) for n, c in solved])
    reward, reward_error = mean_and_error([float(values.mean()) for values in counted])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        "n": len(counted),
        "samples": evaluation.samples,
        "excluded": len(groups) - len(counted),
        "pass@1": first,
        "stderr": first_error,
        "pass@k": best,
        "k": evaluation.k,
        "pass@k_stderr": best_error,
        "reward": reward,
        "reward_stderr": reward_error,
        **length_figures(trajectories),
        **counters(groups),
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error); NaN where there is too little data."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))
