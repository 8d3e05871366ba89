"""The data types of the loop: its plan, its state, and the ways in which it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any, Protocol

from ostinato.config import Recipe
from ostinato.every import NEVER, Every
from ostinato.failure import NamedFailure
from ostinato.model.flops import FlopModel
from ostinato.pipeline.buffer import Admission


class NoTrainableSamples(NamedFailure):
    """Too many steps in a row had nothing to learn from."""


class StalenessViolation(NamedFailure):
    """A batch has tokens that are older than allowed, or newer than the trainer: a bug of the buffer."""


class Finish(StrEnum):
    """The reasons why a loop ends."""

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C: the step was finished
    TERMINATED = "terminated"  # SIGTERM: the step was finished or abandoned
    COLLAPSED = "collapsed"  # seen by the stability watch, where the plan stops then
    FORGOT = "forgot"  # seen by the forgetting watch, where the plan stops then
    SOLVED = "solved"  # every prompt is solved for good: nothing is left to sample
    SPENT = "spent"  # the last step has spent the budget of training compute
    ENOUGH = "enough"  # the remaining steps are not worth their compute, and the plan stops then
    CALLBACK = "callback"  # the observer ended it after a step

    @classmethod
    def of(cls, received: Signals | None) -> Finish:
        """Return the reason for a received signal."""
        return cls.TERMINATED if received is SIGTERM else cls.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's recipe, and the values that follow from its model and device."""

    recipe: Recipe
    answer_tokens: int  # longest answer allowed, all turns together
    solved_at: float = 1.0  # the least reward of a solution
    budget: Every = NEVER  # of training compute: the step that spends it is the last
    flops: FlopModel | None = None  # None: unknown, no FLOPs are reported
    peak_flops: float = 0.0  # FLOP/s of the trainer's device by its data sheet; 0: not known, as of a CPU
    max_empty_steps: int = 10  # in a row without anything to learn from
    grace_s: float = 20.0  # seconds for a step and groups in flight to end after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of a run; a checkpoint has it as JSON (``asdict``, ``LoopState(**d)``). Raises ValueError
    for ``ahead`` as older versions wrote it.

    ``admitted`` = ``trained`` + the sum of ``dropped`` + the number of those ``ahead``, all in groups.
    """

    step: int = 0  # finished
    cursor: int = 0  # place in the stream from which the next groups are taken
    version: int = 0  # of the policy that the engine serves
    empty_in_a_row: int = 0
    retired: Sequence[str] = ()  # uids of prompts that have left the stream for good, in that order
    ahead: Sequence[Admission] = ()  # in flight; those that had ended are in the spool
    admitted: int = 0
    trained: int = 0  # groups in a batch that no rule dropped there
    dropped: Mapping[str, int] = field(default_factory=dict)  # by rule
    totals: Mapping[str, float] = field(default_factory=dict)  # sums over the whole run

    def __post_init__(self) -> None:
        if any(len(row) != len(Admission._fields) or isinstance(row, Mapping) for row in self.ahead):
            raise ValueError(
                "the checkpoint is of a version of ostinato that this one does not read: it names rounds "
                "that were played ahead, and not their groups; resume with that version, or begin a new run"
            )
        object.__setattr__(self, "ahead", tuple(Admission(*row) for row in self.ahead))  # lists in JSON
        object.__setattr__(self, "retired", tuple(self.retired))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def account_groups(self) -> dict[str, float]:
        """Return metrics of all admitted groups, each counted once: trained on, dropped, or in flight.
        Raises AssertionError if these do not add up."""
        dropped = sum(self.dropped.values())
        assert self.admitted == self.trained + dropped + len(self.ahead), (
            f"step {self.step}: of {self.admitted} groups {self.trained} were trained on, {dropped} "
            f"dropped and {len(self.ahead)} are on their way"
        )
        return {
            "groups/admitted_total": float(self.admitted),
            "groups/trained_total": float(self.trained),
            **{f"groups/dropped_total/{rule}": float(n) for rule, n in self.dropped.items()},
            "groups/outstanding": float(len(self.ahead)),
        }

    def count_retired(self, old_state: LoopState, num_prompts: int) -> dict[str, float]:
        """Return metrics of prompts that have left for good, since ``old_state`` and in all, and the share
        of all ``num_prompts`` that is left."""
        total = len(self.retired)
        return {
            "groups/retired": float(total - len(old_state.retired)),
            "groups/retired_total": float(total),
            "groups/left_share": 1 - total / num_prompts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    state: LoopState
    why: Finish


def make_untrainable_error(
    state: LoopState, metrics: Path, counted: Mapping[str, float]
) -> NoTrainableSamples:
    """Make the error of a run without trainable samples; ``counted``: by tools and graders, in all steps."""
    note = describe_unreadable(counted)
    return NoTrainableSamples(
        f"{state.empty_in_a_row} steps in a row had nothing to learn from{note and f': {note}'}; see "
        f"groups/dropped and faults in {metrics.name}, then change the task's difficulty or fix the reward"
    )


def describe_unreadable(counted: Mapping[str, float]) -> str:
    """Say in words how many calls of tools could not be read; "" for none."""
    names = [name for name in ("tools/unreadable", "agent/unreadable") if counted.get(name)]
    return ", ".join(
        f"{counted[name]:.0f} calls of tools could not be read ({name}), which is done within "
        "<tool_call></tool_call>"
        for name in names
    )


class Observer(Protocol):
    """Receives the reports of a run, and may end it early."""

    def on_step(self, row: Mapping[str, float], /) -> bool | None:
        """Receive a row of metrics.jsonl. True ends the run after this step."""

    def on_eval(self, row: Mapping[str, Any], /) -> None:
        """Receive a row of eval.jsonl."""

    def should_stop(self, step: int, /) -> bool:
        """Return whether, by the main set's score at ``step``, the rest of the run is not worth its
        compute."""
        return False


class Workers(Protocol):
    """The processes and threads that compute for a loop."""

    def progress(self) -> float:
        """Return a number that grows with every sampled token and every trained microbatch."""
        return 0.0

    def extra_metrics(self) -> Mapping[str, float]:
        """Return more metrics for each row: of workers and publications."""
        return {}

    def trainer_consistent(self) -> bool:
        """Return whether the trainer still has its last state, to be saved, after a step that failed."""
        return False


class Silent(Observer):
    """An observer that shows nothing and never ends a run."""


class InProcess(Workers):
    """The workers of a loop that computes everything itself."""
