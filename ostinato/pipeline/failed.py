"""Failing reward functions: counted by step and function, and recorded with their last traceback. A run ends
when any of its reward functions has never worked.

A row of failed_rewards.jsonl is for a function in a step or evaluation. It gave no verdict to ``count`` of
``of`` answers; ``detail`` is a line, ``trace`` is empty where nothing was raised, and the row has the last
prompt and completion for which the function failed. ``stopped``: the run ended because of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ostinato.rollout.health import describe_failure
from ostinato.rollout.rollout import parse_fault_name
from ostinato.run import RunFolder
from ostinato.types import Group, Stop, Trajectory

TRAIN = "train"  # ``part`` of a training step; other values of ``part`` are names of evaluation sets
MAX_SHOWN = 1000  # characters of a completion
PATIENCE = 3  # steps of skipped answers alone
SKIPPED = "skipped"  # the reason of a reward without a value to which every function gave None

logger = logging.getLogger(__name__)


class RewardFails(ValueError):
    """A reward function gave no verdict to any answer of the first evaluation or step, or all episodes
    failed. ``note`` has the traceback, and the completion of an answer."""

    def __init__(self, sentence: str, note: str) -> None:
        super().__init__(sentence)
        self.add_note(note)
        self.note = note


def list_failures(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Make a row for each reward function that failed for an answer of these groups, sorted by its name."""
    by_function: dict[str, list[tuple[Group, Trajectory, str]]] = {}
    tasks = Counter(
        group.prompt.task for group in groups for trajectory in group.trajectories if trajectory.reward
    )
    for group in groups:
        for trajectory in group.trajectories:
            for name, report in trajectory.reward.failed.items() if trajectory.reward else ():
                by_function.setdefault(name, []).append((group, trajectory, report))
    rows = []
    for name, entries in sorted(by_function.items()):
        group, trajectory, report = entries[-1]
        detail, _, trace = report.partition("\n")
        row = {"function": name, "count": len(entries), "detail": detail, "trace": trace}
        # only tasks of these answers: other tasks may have other reward functions
        row["of"] = sum(tasks[task] for task in {group.prompt.task for group, *_ in entries})
        text = "".join(turn.completion.text for turn in trajectory.turns)
        rows.append({**row, "uid": group.prompt.uid, "completion": text[:MAX_SHOWN]})
    return rows


def refuse_failures(rows: Sequence[dict[str, Any]], where: str) -> None:
    """Raises RewardFails for the first function that failed for all the answers ``where``; else does
    nothing."""
    for row in rows:
        if row["count"] == row["of"]:
            note = f"{row['trace']}\nprompt {row['uid']}, completion {row['completion']!r}".lstrip()
            raise RewardFails(
                f"reward {row['function']} gave no verdict to any of the {row['of']} answers of {where} "
                f"({row['detail']}); fix it",
                note,
            )


class Failures:
    """Records the failures of a run in its folder, and logs each kind of fault of each function once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._logged = set[tuple[str, ...]]()
        self._num_ungraded_steps = 0  # steps of this session without any reward

    def see(self, step: int, groups: Sequence[Group], part: str = TRAIN, *, is_first: bool = False) -> None:
        """Record and log the failures in the answers of ``part`` at ``step``. Raises RewardFails, after
        recording, if they are the first answers (``is_first``) and a function, or every episode, failed for
        all of them."""
        rows = list_failures(groups)
        must_stop = is_first and any(row["count"] == row["of"] for row in rows)
        if rows:
            head = {"step": step, "part": part, "stopped": must_stop}
            self._folder.failed.append(*({**head, **row} for row in rows))
        place = f"the evaluation of the set {part}" if part != TRAIN else "training"
        if must_stop:
            refuse_failures(rows, f"{place} at step {step}")
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if is_first and trajectories and all(trajectory.stop is Stop.ERROR for trajectory in trajectories):
            ((reason, _),) = Counter(map(describe_failure, trajectories)).most_common(1)
            sentence = f"every episode of {place} at step {step} failed: {reason}; fix it"
            raise RewardFails(sentence, f"{len(trajectories)} episodes")
        self._log_failures(step, groups)

    def check_graded(self, groups: Sequence[Group], step: int, steps: int, reward_coef: float) -> None:
        """Count the steps without any reward. Raises RewardFails if none of the first PATIENCE steps, or of
        all ``steps`` if there are fewer, has a reward; never if ``reward_coef`` is 0, nor in a resumed run,
        which may have had rewards before."""
        reasons = Counter(
            describe_failure(trajectory) for group in groups for trajectory in group.trajectories
        )
        self._num_ungraded_steps += bool(reasons) and "" not in reasons
        if reward_coef and self._num_ungraded_steps == step == min(PATIENCE, steps):
            ((reason, _),) = reasons.most_common(1)
            sentence = "no reward function gave a number to any answer of training in"
            sentence += f" {self._num_ungraded_steps} steps: " + (
                "each returned None, a skip; return a number, or give the rows what it needs"
                if reason == SKIPPED
                else f"{reason}; fix it"
            )
            raise RewardFails(sentence, f"the last {reasons.total()} answers are in the run's samples")

    def _log_failures(self, step: int, groups: Sequence[Group]) -> None:
        """Log each kind of failure of each function once, in its own words; a skip is not logged. The rows
        of metrics count all of them."""
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            sentence, reports = (
                describe_failure(trajectory),
                trajectory.reward.failed if trajectory.reward else {},
            )
            kind = parse_fault_name(sentence)
            if kind != sentence and (key := (kind, *reports)) not in self._logged:
                self._logged.add(key)
                logger.warning(f"step {step}: {sentence} (reported once; faults/{kind} counts them)")
                for trace in (report.partition("\n")[2] for report in reports.values()):
                    if trace:
                        logger.warning(trace)
