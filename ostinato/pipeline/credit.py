"""Credit assignment: the graded groups of a step -> samples with advantages, weights, and waste by reason.

Pure. Every sampled token is counted exactly once: in a sample, or under a reason of ``wasted_tokens``.
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
    has_zero_variance,
    overlong_penalty,
)
from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import aggregation_weights
from ostinato.rollout.convert import make_samples
from ostinato.rollout.health import count_sampled_tokens
from ostinato.rollout.rollout import FAILED, Drop, find_drop_reason, list_verdicts
from ostinato.types import Group, Reward, Sample, Stop, Trajectory

NO_ADVANTAGE = 1e-9  # an advantage below this is the rounding error of a mean of equal rewards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """The samples to train on, and counts of groups and tokens that are not trained on."""

    advantages: list[np.ndarray]  # [G] for each group, one number an answer; NaN: not trained on
    samples: list[Sample]
    weights: list[np.ndarray]  # per token, of the whole step
    dropped_groups: Counter[str]
    wasted_tokens: Counter[str]  # sampled tokens by the reason why they are not trained on


def assign_credit(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    min_verdicts: int,
    answer_tokens: int,
    solved_at: float = 1.0,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
) -> Credit:
    """Shape rewards, drop groups without anything to learn, compute advantages and aggregation weights.

    ``answer_tokens`` is the longest answer allowed (all turns): the unit of the overlong penalty and of the
    constant aggregation. ``solved_at`` is the least reward of a solved answer. ``reward_weights`` by name
    are for ``rewards = "apart"``; the penalty is then a reward like the others, of weight 1. Without a KL or
    entropy term, samples whose advantage is 0 have no gradient: they count in the denominators of the
    weights, but are not computed. If ``algorithm.reward_coef`` is 0, every episode that did not fail counts,
    whatever its verdict.
    """
    if not algorithm.reward_coef:
        groups, min_verdicts = [_zero_rewards(group) for group in groups], 1
    drops = [find_drop_reason(group, min_verdicts) for group in groups]
    names = list(reward_weights) if algorithm.rewards is Rewards.APART else []
    rewards = [
        _shape_rewards(group, drop, algorithm, answer_tokens, solved_at, names)
        for group, drop in zip(groups, drops, strict=True)
    ]
    if names:
        group_advantages = advantages_apart(rewards, [*reward_weights.values(), 1.0])
    else:
        group_advantages = advantages(
            [reward[0] for reward in rewards],
            baseline=algorithm.baseline,
            scale=algorithm.scale,
            batch_pool=algorithm.batch_pool,
            drop_zero_variance=algorithm.drop_zero_variance,
        )
    values = [algorithm.reward_coef * value for value in group_advantages]
    waste: Counter[str] = Counter()
    trained, new_samples = list[np.ndarray](), list[Sample]()
    for index, (group, drop, reward, value) in enumerate(zip(groups, drops, rewards, values, strict=True)):
        if drop is None and has_zero_variance(reward):
            drop = drops[index] = Drop.ZERO_VARIANCE if algorithm.drop_zero_variance else None
        reasons = [_find_waste_reason(t, drop, algorithm) for t in group.trajectories]
        for trajectory, reason in zip(group.trajectories, reasons, strict=True):
            waste[reason] += count_sampled_tokens(trajectory) if reason else 0
        trained.append(np.where([not reason for reason in reasons], value, np.nan))
        new_samples += make_samples(group, index, trained[-1])
    new_samples = _select_routed(new_samples, waste)
    weights = aggregation_weights(new_samples, algorithm.aggregation, max_tokens=answer_tokens)
    pairs = _select_with_gradient(list(zip(new_samples, weights, strict=True)), algorithm, waste)
    return Credit(
        advantages=trained,
        samples=[sample for sample, _ in pairs],
        weights=[weight for _, weight in pairs],
        dropped_groups=Counter(str(drop) for drop in drops if drop),
        wasted_tokens=+waste,
    )


def _zero_rewards(group: Group) -> Group:
    """Give a reward of 0 to every trajectory that did not fail."""
    trajectories = (
        t if t.stop in FAILED else replace(t, reward=Reward(value=0.0)) for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def _shape_rewards(
    group: Group,
    drop: Drop | None,
    algorithm: Algorithm,
    answer_tokens: int,
    solved_at: float,
    names: Sequence[str],
) -> np.ndarray:
    """Return rewards [1, G] with the overlong penalty; with ``names`` [K + 1, G], those of the K functions
    and the penalty as a row of its own. Members are permuted if ``algorithm.shuffled``. All are NaN for a
    dropped group, so that it affects no statistic."""
    total = list_verdicts(group)
    rewards = np.array([total, *(_read_verdicts(group, name, total) for name in names)])
    if drop is not None:
        return np.full_like(rewards, np.nan)
    lengths = np.array([count_sampled_tokens(trajectory) for trajectory in group.trajectories])
    buffer = round(algorithm.overlong_buffer * answer_tokens)
    penalty = overlong_penalty(
        lengths, max_tokens=answer_tokens, buffer=buffer, factor=algorithm.overlong_factor
    )
    if algorithm.shuffled:
        address = [group.step, zlib.crc32(group.prompt.uid.encode())]
        rewards = np.random.default_rng(address).permutation(rewards, axis=1)
    is_spared = (rewards[0] < solved_at) & (algorithm.overlong_scope is Overlong.SOLVED)
    penalties = np.where(is_spared, 0.0, penalty)
    if not names:
        return rewards + penalties
    return np.array([*rewards[1:], np.where(np.isnan(rewards[0]), np.nan, penalties)])


def _read_verdicts(group: Group, name: str, total: np.ndarray) -> np.ndarray:
    """Return the rewards [G] of function ``name``; NaN where it gave none or there is no verdict at all."""
    parts = [t.reward.parts.get(name) if t.reward is not None else None for t in group.trajectories]
    values = np.array([np.nan if value is None else value for value in parts], np.float64)
    return np.where(np.isnan(total), np.nan, values)


def _find_waste_reason(trajectory: Trajectory, drop: Drop | None, algorithm: Algorithm) -> str:
    """Return why this member is not trained on; empty when it is."""
    if trajectory.stop in FAILED:
        return "failed"
    if drop is not None:
        return str(drop)
    if trajectory.reward is None or trajectory.reward.value is None:
        return "no_verdict"
    return "truncated" if algorithm.mask_truncated and trajectory.stop is Stop.LENGTH else ""


def _select_routed(new_samples: list[Sample], waste: Counter[str]) -> list[Sample]:
    """Return all samples; if only some have routes, return these, since replay takes routes of all or none,
    and add the tokens of the others to ``waste``."""
    with_routes = [sample for sample in new_samples if sample.experts is not None]
    if with_routes and len(with_routes) < len(new_samples):
        waste["no_routes"] += sum(
            int(sample.loss_mask.sum()) for sample in new_samples if sample.experts is None
        )
        return with_routes
    return new_samples


def _select_with_gradient(
    pairs: list[tuple[Sample, np.ndarray]], algorithm: Algorithm, waste: Counter[str]
) -> list[tuple[Sample, np.ndarray]]:
    """Return the pairs that have a gradient, and add the tokens of the others to ``waste``."""
    if algorithm.needs_reference or algorithm.needs_teacher or algorithm.needs_entropy:
        return pairs
    useful = [pair for pair in pairs if np.abs(pair[0].advantages).max() > NO_ADVANTAGE]
    total = sum(int(sample.loss_mask.sum()) for sample, _ in pairs)
    waste["zero_advantage"] += total - sum(int(sample.loss_mask.sum()) for sample, _ in useful)
    return useful
