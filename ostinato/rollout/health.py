"""Metrics of graded groups, from the first step on: whether there is anything to learn from.

Names are TRL's where TRL has the metric. A metric without data is NaN (null in the run folder), never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ostinato.rollout.rollout import FAILED, list_verdicts, parse_fault_name
from ostinato.types import Group, Reward, Stop, Trajectory


def compute_health(groups: Sequence[Group], *, solved_at: float = 1.0) -> dict[str, float]:
    """Compute all metrics of a step's groups, dropped groups included: rewards, solved shares, lengths,
    counters.

    A trajectory is solved when its reward is at least ``solved_at``.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        **compute_reward_metrics(groups),
        **compute_solved_metrics(groups, solved_at),
        **compute_length_metrics(trajectories),
        **compute_logged_metrics(groups),
        **count_rollouts(groups),
    }


def compute_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute ``reward``, ``reward_std`` and ``rewards/{function}/mean|std`` over trajectories with a
    verdict, as TRL reports them (deviations with n - 1). ``reward_group_std`` is the mean of the deviations
    inside groups, and ``frac_reward_zero_std`` the share of groups whose rewards are equal, of those with
    two verdicts or more."""
    rewards = [values[np.isfinite(values)] for values in map(list_verdicts, groups)]
    all_rewards = np.concatenate(rewards) if rewards else np.empty(0)
    comparable = [values for values in rewards if len(values) > 1]
    figures = {
        "reward": _compute_mean(all_rewards),
        "reward_std": _compute_std(all_rewards),
        "reward_group_std": _compute_mean([_compute_std(values) for values in comparable]),
        "frac_reward_zero_std": _compute_mean([has_equal_rewards(values) for values in comparable]),
    }
    for name, values in _collect_values(reward.parts for reward in _collect_rewards(groups)).items():
        figures |= {
            f"rewards/{name}/mean": _compute_mean(values),
            f"rewards/{name}/std": _compute_std(values),
        }
    return figures


def compute_logged_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute ``logged/{name}``: the mean over trajectories of the values given to ``log_metric``."""
    values_by_name = _collect_values(reward.metrics for reward in _collect_rewards(groups))
    return {f"logged/{name}": _compute_mean(values) for name, values in values_by_name.items()}


def _collect_rewards(groups: Sequence[Group]) -> list[Reward]:
    """Return the rewards of all trajectories that have one, also without a value."""
    return [t.reward for group in groups for t in group.trajectories if t.reward is not None]


def _collect_values(rows: Iterable[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the values of each name, sorted by name; None is left out."""
    values: dict[str, list[float]] = {}
    for name, value in (item for row in rows for item in row.items()):
        values.setdefault(name, []).extend([] if value is None else [value])
    return dict(sorted(values.items()))


def compute_solved_metrics(groups: Sequence[Group], solved_at: float) -> dict[str, float]:
    """Compute shares of prompts solved by none, some and all of their samples; pass@1, pass@k and their
    difference, the headroom that RL can turn into pass@1. k is the size of the smallest judged group."""
    rewards = [values[np.isfinite(values)] for values in map(list_verdicts, groups)]
    outcomes = [(len(values), int((values >= solved_at).sum())) for values in rewards if len(values)]
    k = min((n for n, _ in outcomes), default=0)
    at_1 = _compute_mean([c / n for n, c in outcomes])
    at_k = _compute_mean([compute_pass_at_k(n, c, k) for n, c in outcomes])
    return {
        "solved_none": _compute_mean([c == 0 for _, c in outcomes]),
        "solved_some": _compute_mean([0 < c < n for n, c in outcomes]),
        "solved_all": _compute_mean([c == n for n, c in outcomes]),
        "pass@1": at_1,
        "pass@k": at_k,
        "k": float(k),
        "headroom": at_k - at_1,
    }


def sort_by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups of each task of a mixture, by name; empty without a mixture."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        if group.prompt.task:
            tasks.setdefault(group.prompt.task, []).append(group)
    return dict(sorted(tasks.items()))


def compute_task_metrics(groups: Sequence[Group], solved_at: float) -> dict[str, float]:
    """Compute ``tasks/{name}/share`` of the groups and, over these, ``reward``, ``pass@1`` and
    ``frac_reward_zero_std``, for each task of a mixture that has groups."""
    figures: dict[str, float] = {}
    for name, members in sort_by_task(groups).items():
        values = compute_reward_metrics(members) | compute_solved_metrics(members, solved_at)
        figures[f"tasks/{name}/share"] = len(members) / len(groups)
        for key in ("reward", "pass@1", "frac_reward_zero_std"):
            figures[f"tasks/{name}/{key}"] = values[key]
    return figures


def compute_length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute metrics of sampled tokens per trajectory, over all turns, without failed trajectories.
    "terminated" trajectories were not truncated. The metrics of turns and interruptions are added."""
    played = [trajectory for trajectory in trajectories if trajectory.stop not in FAILED]
    lengths = [count_sampled_tokens(trajectory) for trajectory in played]
    terminated = [
        n for n, trajectory in zip(lengths, played, strict=True) if trajectory.stop is not Stop.LENGTH
    ]
    return {
        **{f"completions/{name}_length": value for name, value in _compute_spread(lengths).items()},
        **{
            f"completions/{name}_terminated_length": value
            for name, value in _compute_spread(terminated).items()
        },
        "completions/clipped_ratio": _compute_mean([trajectory.stop is Stop.LENGTH for trajectory in played]),
        "turns/mean": _compute_mean([len(trajectory.turns) for trajectory in played]),
        **compute_interruption_metrics(played),
    }


def compute_interruption_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute ``interrupt/rate``, the share of answers (turns) that were interrupted. If there are some,
    compute ``answered``, the share of them that were not truncated, and ``answer_length``, the mean number
    of tokens sampled after the phrase."""
    answers = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
    interrupted_answers = [answer for answer in answers if answer.injected is not None]
    figures = {"interrupt/rate": _compute_mean([answer.injected is not None for answer in answers])}
    if interrupted_answers:
        phrases = [answer.injected for answer in answers if answer.injected is not None]
        answer_lengths = [int(np.argmax(injected[::-1])) for injected in phrases]
        figures["interrupt/answered"] = _compute_mean(
            [answer.stop is not Stop.LENGTH for answer in interrupted_answers]
        )
        figures["interrupt/answer_length"] = _compute_mean(answer_lengths)
    return figures


def count_rollouts(groups: Sequence[Group]) -> dict[str, float]:
    """Count groups, trajectories, tokens and failures; ``faults/{kind}`` is there for kinds that happened."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counts = {
        "rollout/groups": len(groups),
        "rollout/trajectories": len(trajectories),
        "rollout/failed": sum(trajectory.stop in FAILED for trajectory in trajectories),
        "rollout/no_verdict": sum(map(_lacks_verdict, trajectories)),
        "tokens/context": sum(len(turn.context) for trajectory in trajectories for turn in trajectory.turns),
        "tokens/prefilled": sum(map(count_prefilled_tokens, trajectories)),
        "tokens/sampled": sum(map(count_sampled_tokens, trajectories)),
        "tokens/injected": sum(map(count_injected_tokens, trajectories)),
        **{f"faults/{name}": count for name, count in sorted(count_faults(trajectories).items())},
    }
    return {name: float(count) for name, count in counts.items()}


def count_faults(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """Count trajectories that failed or have no verdict, by kind: the words before the colon of their
    sentence."""
    return Counter(parse_fault_name(sentence) for t in trajectories if (sentence := describe_failure(t)))


def describe_failure(trajectory: Trajectory) -> str:
    """Return why an episode failed or has no verdict: a sentence, or "aborted" or "no_reason"; "" if it has
    a verdict."""
    if trajectory.stop is Stop.ABORT:
        return "aborted"
    if trajectory.stop is Stop.ERROR:
        return trajectory.error or "no_reason"
    if _lacks_verdict(trajectory):
        return (trajectory.reward.reason if trajectory.reward else "") or "no_reason"
    return ""


def compute_pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that any of k samples is right, from c right among n: 1 - C(n-c, k) / C(n, k). It is
    unbiased for every k <= n (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def has_equal_rewards(rewards: np.ndarray) -> bool:
    """Return whether the rewards of a group are equal, up to rounding in fp32: nothing to compare."""
    return bool(np.ptp(rewards) <= 1e-6)


def count_sampled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens of all answers, without injected ones."""
    return sum(len(turn.completion.tokens) - turn.completion.num_injected for turn in trajectory.turns)


def count_injected_tokens(trajectory: Trajectory) -> int:
    """Count the tokens that were put into answers and not sampled."""
    return sum(turn.completion.num_injected for turn in trajectory.turns)


def count_prefilled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens that the engine computed and did not sample: the uncached part of each turn's whole
    context, and tokens injected into the answer."""
    computed, history = 0, 0
    for turn in trajectory.turns:
        history += len(turn.context)
        computed += history - turn.completion.cached_tokens + turn.completion.num_injected
        history += len(turn.completion.tokens)
    return computed


def _lacks_verdict(trajectory: Trajectory) -> bool:
    return trajectory.stop not in FAILED and (trajectory.reward is None or trajectory.reward.value is None)


def _compute_mean(values: Sequence[float] | Sequence[bool] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _compute_std(values: Sequence[float] | np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _compute_spread(values: Sequence[int]) -> dict[str, float]:
    low, high = (float(min(values)), float(max(values))) if values else (math.nan, math.nan)
    return {"mean": _compute_mean(values), "min": low, "max": high}
