"""Metrics of graded groups, from the first step on: is there anything to learn from?

Names are TRL's where TRL has one. A figure without data is NaN (null in the run folder), never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ostinato.rollout.rollout import FAILED, fault_name, verdicts
from ostinato.types import Group, Reward, Stop, Trajectory


def health(groups: Sequence[Group], *, solved_at: float = 1.0) -> dict[str, float]:
    """All figures of one step's groups, dropped ones included: rewards, solved shares, lengths, counters.

    A trajectory is solved when its reward is at least ``solved_at``.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        **reward_figures(groups),
        **solved_figures(groups, solved_at),
        **length_figures(trajectories),
        **logged_figures(groups),
        **counters(groups),
    }


def reward_figures(groups: Sequence[Group]) -> dict[str, float]:
    """``reward``, ``reward_std`` and ``rewards/{function}/mean|std`` over trajectories with a verdict, as TRL
    reports them (deviations with n - 1); ``reward_group_std`` is the mean of the deviations inside groups."""
    rewards = [values[np.isfinite(values)] for values in map(verdicts, groups)]
    judged = np.concatenate(rewards) if rewards else np.empty(0)
    pairs = [values for values in rewards if len(values) > 1]
    figures = {
        "reward": _mean(judged),
        "reward_std": _std(judged),
        "reward_group_std": _mean([_std(values) for values in pairs]),
        "frac_reward_zero_std": _mean([zero_variance(values) for values in pairs]),
    }
    for name, values in _values_by_name(reward.parts for reward in _rewards(groups)).items():
        figures |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    return figures


def logged_figures(groups: Sequence[Group]) -> dict[str, float]:
    """``logged/{name}``: the mean over trajectories of what reward functions gave to ``log_metric``."""
    logged = _values_by_name(reward.metrics for reward in _rewards(groups))
    return {f"logged/{name}": _mean(values) for name, values in logged.items()}


def _rewards(groups: Sequence[Group]) -> list[Reward]:
    return [t.reward for group in groups for t in group.trajectories if t.reward is not None]


def _values_by_name(rows: Iterable[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """The values of each name, in its order; None is no value."""
    values: dict[str, list[float]] = {}
    for name, value in (item for row in rows for item in row.items()):
        values.setdefault(name, []).extend([] if value is None else [value])
    return dict(sorted(values.items()))


def solved_figures(groups: Sequence[Group], solved_at: float) -> dict[str, float]:
    """Shares of prompts solved by none, some and all of their samples; pass@1, pass@k and their difference,
    the headroom that RL can turn into pass@1. k is the size of the smallest judged group."""
    judged = [values[np.isfinite(values)] for values in map(verdicts, groups)]
    outcomes = [(len(values), int((values >= solved_at).sum())) for values in judged if len(values)]
    k = min((n for n, _ in outcomes), default=0)
    first = _mean([c / n for n, c in outcomes])
    best = _mean([pass_at_k(n, c, k) for n, c in outcomes])
    return {
        "solved_none": _mean([c == 0 for _, c in outcomes]),
        "solved_some": _mean([0 < c < n for n, c in outcomes]),
        "solved_all": _mean([c == n for n, c in outcomes]),
        "pass@1": first,
        "pass@k": best,
        "k": float(k),
        "headroom": best - first,
    }


def groups_by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each task of a mixture, by name; empty without one."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        if group.prompt.task:
            tasks.setdefault(group.prompt.task, []).append(group)
    return dict(sorted(tasks.items()))


def task_figures(groups: Sequence[Group], solved_at: float) -> dict[str, float]:
    """``tasks/{name}/share`` of the groups, and of these ``reward``, ``pass@1`` and ``frac_reward_zero_std``,
    for each task of a mixture that has some."""
    figures: dict[str, float] = {}
    for name, own in groups_by_task(groups).items():
        measured = reward_figures(own) | solved_figures(own, solved_at)
        figures[f"tasks/{name}/share"] = len(own) / len(groups)
        for key in ("reward", "pass@1", "frac_reward_zero_std"):
            figures[f"tasks/{name}/{key}"] = measured[key]
    return figures


def length_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Sampled tokens per trajectory, over all turns, without failed ones; "terminated" ones ended by
    themselves. Also the figures of interrupted answers."""
    played = [trajectory for trajectory in trajectories if trajectory.stop not in FAILED]
    lengths = [sampled_tokens(trajectory) for trajectory in played]
    ended = [n for n, trajectory in zip(lengths, played, strict=True) if trajectory.stop is not Stop.LENGTH]
    return {
        **{f"completions/{name}_length": value for name, value in _spread(lengths).items()},
        **{f"completions/{name}_terminated_length": value for name, value in _spread(ended).items()},
        "completions/clipped_ratio": _mean([trajectory.stop is Stop.LENGTH for trajectory in played]),
        "turns/mean": _mean([len(trajectory.turns) for trajectory in played]),
        **interruption_figures(played),
    }


def interruption_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``interrupt/rate``: share of answers (turns) that were interrupted. Where there are some:
    ``answered``, the share of them that then ended by themselves, and ``answer_length``, the mean number of
    tokens sampled after the phrase."""
    answers = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
    interrupted = [answer for answer in answers if answer.injected is not None]
    figures = {"interrupt/rate": _mean([answer.injected is not None for answer in answers])}
    if interrupted:
        phrases = [answer.injected for answer in answers if answer.injected is not None]
        behind = [int(np.argmax(injected[::-1])) for injected in phrases]
        figures["interrupt/answered"] = _mean([answer.stop is not Stop.LENGTH for answer in interrupted])
        figures["interrupt/answer_length"] = _mean(behind)
    return figures


def counters(groups: Sequence[Group]) -> dict[str, float]:
    """What was played, what it cost and what went wrong; ``faults/{kind}`` appears when it happened."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counted = {
        "rollout/groups": len(groups),
        "rollout/trajectories": len(trajectories),
        "rollout/failed": sum(trajectory.stop in FAILED for trajectory in trajectories),
        "rollout/no_verdict": sum(map(_lacks_verdict, trajectories)),
        "tokens/context": sum(len(turn.context) for trajectory in trajectories for turn in trajectory.turns),
        "tokens/prefilled": sum(map(prefilled_tokens, trajectories)),
        "tokens/sampled": sum(map(sampled_tokens, trajectories)),
        "tokens/injected": sum(map(injected_tokens, trajectories)),
        **{f"faults/{name}": count for name, count in sorted(faults(trajectories).items())},
    }
    return {name: float(count) for name, count in counted.items()}


def faults(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """How many trajectories failed or have no verdict, by kind (the first word of their sentence)."""
    return Counter(fault_name(sentence) for t in trajectories if (sentence := failure(t)))


def failure(trajectory: Trajectory) -> str:
    """The sentence that says why an episode failed or has no verdict; empty when it has one."""
    if trajectory.stop is Stop.ABORT:
        return "aborted"
    if trajectory.stop is Stop.ERROR:
        return trajectory.error or "no_reason"
    if _lacks_verdict(trajectory):
        return (trajectory.reward.reason if trajectory.reward else "") or "no_reason"
    return ""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples is right, from c right ones among n: 1 - C(n-c, k) / C(n, k).

    Unbiased for every k <= n (Chen et al. 2021, arXiv 2107.03374, section 2.1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def zero_variance(rewards: np.ndarray) -> bool:
    """No member of the group differs from another, but for the rounding of fp32 sums: nothing to compare."""
    return bool(np.ptp(rewards) <= 1e-6)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens of all its answers, without injected ones."""
    return sum(len(turn.completion.tokens) - turn.completion.num_injected for turn in trajectory.turns)


def injected_tokens(trajectory: Trajectory) -> int:
    """Tokens that were put into its answers and not sampled."""
    return sum(turn.completion.num_injected for turn in trajectory.turns)


def prefilled_tokens(trajectory: Trajectory) -> int:
    """Tokens that the engine computed and did not sample: the uncached part of each turn's whole context,
    and tokens injected into the answer."""
    computed, history = 0, 0
    for turn in trajectory.turns:
        history += len(turn.context)
        computed += history - turn.completion.cached_tokens + turn.completion.num_injected
        history += len(turn.completion.tokens)
    return computed


def _lacks_verdict(trajectory: Trajectory) -> bool:
    return trajectory.stop not in FAILED and (trajectory.reward is None or trajectory.reward.value is None)


def _mean(values: Sequence[float] | Sequence[bool] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _std(values: Sequence[float] | np.ndarray) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _spread(values: Sequence[int]) -> dict[str, float]:
    least, most = (float(min(values)), float(max(values))) if values else (math.nan, math.nan)
    return {"mean": _mean(values), "min": least, "max": most}
