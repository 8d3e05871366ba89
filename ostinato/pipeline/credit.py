"""Credit assignment: the graded groups of a step -> samples with advantages, weights, and the waste by name.

Pure. Every sampled token ends in exactly one place: a sample, or a named entry of ``wasted_tokens``.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from ostinato.algo.advantages import (
    Overlong,
    Rewards,
    advantages,
    advantages_apart,
    overlong_penalty,
    zero_variance,
)
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import aggregation_weights
from ostinato.rollout.convert import samples
from ostinato.rollout.health import sampled_tokens
from ostinato.rollout.rollout import FAILED, Drop, drop_reason, verdicts
from ostinato.types import Group, Reward, Sample, Stop, Trajectory

NO_ADVANTAGE = 1e-9  # an advantage below this is the rounding error of a mean of equal rewards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What to train on, and what was sampled in vain."""

    samples: list[Sample]
    weights: list[np.ndarray]  # per token, of the whole step
    dropped_groups: Counter[str]
    wasted_tokens: Counter[str]  # sampled tokens by the reason why they are not trained on


def assign(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    min_verdicts: int,
    answer_tokens: int,
    solved_at: float = 1.0,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
) -> Credit:
    """Shape rewards, drop what cannot be learned from, compute advantages and aggregation weights.

    ``answer_tokens`` is the longest answer allowed (all turns): the unit of the overlong penalty and of the
    constant aggregation. ``solved_at`` is the least reward of a solved answer. ``reward_weights`` by name are
    for ``rewards = "apart"``; the penalty is then a reward like the others, of weight 1. A sample whose
    advantage is 0 contributes nothing to the gradient unless a KL or entropy term is on; it then still counts
    in the weights' denominators, but is not computed. Where ``algorithm.reward_coef`` is 0 every episode that
    was played counts, whatever its verdict.
    """
    if not algorithm.reward_coef:
        groups, min_verdicts = [_zero_rewards(group) for group in groups], 1
    drops = [drop_reason(group, min_verdicts) for group in groups]
    names = list(reward_weights) if algorithm.rewards is Rewards.APART else []
    rewards = [
        _shape_rewards(group, drop, algorithm, answer_tokens, solved_at, names)
        for group, drop in zip(groups, drops, strict=True)
    ]
    if names:
        by_rewards = advantages_apart(rewards, [*reward_weights.values(), 1.0])
    else:
        by_rewards = advantages(
            [reward[0] for reward in rewards],
            baseline=algorithm.baseline,
            scale=algorithm.scale,
            batch_pool=algorithm.batch_pool,
            drop_zero_variance=algorithm.drop_zero_variance,
        )
    values = [algorithm.reward_coef * value for value in by_rewards]
    wasted: Counter[str] = Counter()
    new_samples: list[Sample] = []
    for index, (group, drop, reward, value) in enumerate(zip(groups, drops, rewards, values, strict=True)):
        if drop is None and zero_variance(reward):
            drop = drops[index] = Drop.ZERO_VARIANCE if algorithm.drop_zero_variance else None
        reasons = [_waste_reason(t, drop, algorithm) for t in group.trajectories]
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            wasted[reason] += sampled_tokens(trajectory) if reason else 0
        kept = np.array([not reason for reason in reasons])
        new_samples += samples(group, index, np.where(kept, value, np.nan))
    new_samples = _keep_routed(new_samples, wasted)
    weights = aggregation_weights(new_samples, algorithm.aggregation, max_tokens=answer_tokens)
    pairs = _keep_with_gradient(list(zip(new_samples, weights, strict=True)), algorithm, wasted)
    return Credit(
        samples=[sample for sample, _ in pairs],
        weights=[weight for _, weight in pairs],
        dropped_groups=Counter(str(drop) for drop in drops if drop),
        wasted_tokens=+wasted,
    )


def _zero_rewards(group: Group) -> Group:
    """A reward of 0 for all that was played."""
    judged = (t if t.stop in FAILED else replace(t, reward=Reward(value=0.0)) for t in group.trajectories)
    return replace(group, trajectories=tuple(judged))


def _shape_rewards(
    group: Group,
    drop: Drop | None,
    algorithm: Algorithm,
    answer_tokens: int,
    solved_at: float,
    names: Sequence[str],
) -> np.ndarray:
    """Rewards [1, G] with the overlong penalty; [K + 1, G], those of the K functions ``names`` and the
    penalty apart, where there are names. All NaN for a dropped group: it affects no statistic."""
    total = verdicts(group)
    rewards = np.array([total, *(_verdicts_of(group, name, total) for name in names)])
    if drop is not None:
        return np.full_like(rewards, np.nan)
    lengths = np.array([sampled_tokens(trajectory) for trajectory in group.trajectories])
    buffer = round(algorithm.overlong_buffer * answer_tokens)
    penalty = overlong_penalty(
        lengths, max_tokens=answer_tokens, buffer=buffer, factor=algorithm.overlong_factor
    )
    if algorithm.shuffled:
        address = [group.step, zlib.crc32(group.prompt.uid.encode())]
        rewards = np.random.default_rng(address).permutation(rewards, axis=1)
    spared = (rewards[0] < solved_at) & (algorithm.overlong_scope is Overlong.SOLVED)
    paid = np.where(spared, 0.0, penalty)
    if not names:
        return rewards + paid
    return np.array([*rewards[1:], np.where(np.isnan(rewards[0]), np.nan, paid)])


def _verdicts_of(group: Group, name: str, total: np.ndarray) -> np.ndarray:
    """[G]: what one function gives; NaN where it has no opinion, and where there is no verdict in all."""
    parts = [t.reward.parts.get(name) if t.reward is not None else None for t in group.trajectories]
    values = np.array([np.nan if value is None else value for value in parts], np.float64)
    return np.where(np.isnan(total), np.nan, values)


def _waste_reason(trajectory: Trajectory, drop: Drop | None, algorithm: Algorithm) -> str:
    """Why this member is not trained on; empty when it is."""
    if trajectory.stop in FAILED:
        return "failed"
    if drop is not None:
        return str(drop)
    if trajectory.reward is None or trajectory.reward.value is None:
        return "no_verdict"
    return "truncated" if algorithm.mask_truncated and trajectory.stop is Stop.LENGTH else ""


def _keep_routed(new_samples: list[Sample], wasted: Counter[str]) -> list[Sample]:
    """All samples, unless only some carry routes: replay takes all or none, so the others are left out."""
    routed = [sample for sample in new_samples if sample.experts is not None]
    if routed and len(routed) < len(new_samples):
        wasted["no_routes"] += sum(
            int(sample.loss_mask.sum()) for sample in new_samples if sample.experts is None
        )
        return routed
    return new_samples


def _keep_with_gradient(
    pairs: list[tuple[Sample, np.ndarray]], algorithm: Algorithm, wasted: Counter[str]
) -> list[tuple[Sample, np.ndarray]]:
    if algorithm.needs_reference or algorithm.needs_teacher or algorithm.needs_entropy:
        return pairs
    kept = [pair for pair in pairs if np.abs(pair[0].advantages).max() > NO_ADVANTAGE]
    total = sum(int(sample.loss_mask.sum()) for sample, _ in pairs)
    wasted["zero_advantage"] += total - sum(int(sample.loss_mask.sum()) for sample, _ in kept)
    return kept
