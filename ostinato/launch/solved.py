"""From which reward an answer is solved, and whether any answer can reach it."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.config.sections import RewardSection
from ostinato.reward.verify import BUILT_IN

ROUNDING = 1e-6  # of sums of weighted rewards


def solved_at(reward: RewardSection) -> float:
    """The reward from which an answer is solved, less ROUNDING: the recipe's own, or a 1 from every function
    with a positive weight."""
    return (reward.full_marks if reward.solved_at == "full" else reward.solved_at) - ROUNDING


def check_solvable(reward: RewardSection) -> None:
    """Raises ValueError where no answer can ever be solved. That is known of built-in functions alone, which
    give 0 to 1; a user's own function may give more than 1."""
    most = reward.full_marks
    if solved_at(reward) > most and all(name in BUILT_IN for name in reward.positive):
        raise ValueError(
            f"reward.solved_at is {reward.solved_at:g}, but reward.functions {list(reward.functions)} give "
            f'at most {most:g}, so no answer could be solved; set it to {most:g} or less, or to "full"'
        )


def several_full_marks(reward: RewardSection) -> Iterator[str]:
    """What "full" asks for where several functions count, one of them a user's own."""
    weights = reward.positive
    if reward.solved_at == "full" and len(weights) > 1 and not all(name in BUILT_IN for name in weights):
        yield (
            'reward.solved_at = "full" counts an answer as solved from a reward of '
            f"{reward.full_marks:g} on, a 1 from each of {', '.join(weights)}; where one of them never "
            "gives 1, pass@1 stays 0: set reward.solved_at to the reward that you call solved"
        )
