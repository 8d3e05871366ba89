"""Which prompts are worth sampling now, by their measured pass rates.

A group whose answers are all right or all wrong teaches nothing, and the next group of its prompt most likely
teaches as little. So places of prompts with rates outside [low, high] are passed over, except for a share
``revisit`` of them, drawn by an addressed uniform, so that prompts forgotten or newly in reach are found.
(Difficulty pools are in prime-rl; ScaleRL, arXiv 2510.13786, removes at 0.9 for good: ``solved_for_good``.)

The rates are all the state there is, and a checkpoint has them. Pure functions of them and of the address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.algo.noise import key, uniform
from ostinato.rollout.rollout import verdicts
from ostinato.types import Group, Prompt

Rates = Mapping[str, tuple[float, float]]  # by prompt or task: solved answers, judged answers, both decayed
LANE = -1  # next to the run's seed in the key of a place's draw; steps count from 0
FADES = {"prompt": 0.5, "task": 0.95}  # factor on the counts so far, whenever a group is added


class Choice(StrEnum):
    """What the curriculum decides about a place in the stream."""

    TAKEN = "taken"
    REVISITED = "revisited"  # taken, though its rate is outside
    SOLVED = "solved"  # passed over: its rate is above
    HOPELESS = "hopeless"  # passed over: its rate is below


PASSED_OVER = (Choice.SOLVED, Choice.HOPELESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """``by`` "prompt" or "task"; ``seed`` of the run, ``solved_at`` the reward of a solved answer."""

    by: str
    low: float
    high: float
    revisit: float
    seed: int
    solved_at: float

    def choice(self, rates: Rates, prompt: Prompt, place: int) -> Choice:
        """Whether the prompt is sampled at this place of the stream, and why."""
        solved, judged = rates.get(self._name(prompt), (0.0, 0.0))
        if not judged or self.low <= solved / judged <= self.high:
            return Choice.TAKEN
        if uniform(key((self.seed, LANE)), place) < self.revisit:
            return Choice.REVISITED
        return Choice.SOLVED if solved / judged > self.high else Choice.HOPELESS

    def measured(self, rates: Rates, groups: Sequence[Group]) -> dict[str, tuple[float, float]]:
        """The rates updated by these groups, in their order. A group without verdicts changes none."""
        found, fade = dict(rates), FADES[self.by]
        for group in groups:
            values = verdicts(group)
            judged = values[np.isfinite(values)]
            if len(judged):
                solved, total = found.get(name := self._name(group.prompt), (0.0, 0.0))
                right = float((judged >= self.solved_at).sum())
                found[name] = (fade * solved + right, fade * total + len(judged))
        return found

    def _name(self, prompt: Prompt) -> str:
        return prompt.task if self.by == "task" else prompt.uid


def curriculum_figures(choices: Mapping[str, int], known: int) -> dict[str, float]:
    """Metrics of the places that were looked at for a step; ``known``: how many rates there are."""
    names = (*PASSED_OVER, Choice.REVISITED)
    return {f"curriculum/{name}": float(choices.get(name, 0)) for name in names} | {
        "curriculum/known": float(known)
    }
