"""What a run is to do, where it stands, and how it may end: the data types of the loop."""

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
    """A batch has tokens that are older than was allowed, or younger than the trainer: the feed is wrong."""


class Finish(StrEnum):
    """Why the loop came back."""

    DONE = "done"
    INTERRUPTED = "interrupted"  # Ctrl-C: the step was finished
    TERMINATED = "terminated"  # SIGTERM: the step was finished or abandoned
    COLLAPSED = "collapsed"  # by the stability watch, where the plan was to stop then
    FORGOT = "forgot"  # by the forgetting watch, where the plan was to stop then
    SOLVED = "solved"  # every prompt is solved for good: nothing is left to sample
    SPENT = "spent"  # the budget of training compute, by the last step
    ENOUGH = "enough"  # the rest is not worth its compute, and the plan was to stop then
    CALLBACK = "callback"  # the observer ended it after a step

    @classmethod
    def of(cls, received: Signals | None) -> Finish:
        """The ending for a received signal."""
        return cls.TERMINATED if received is SIGTERM else cls.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's recipe, and what its model makes of it."""

    recipe: Recipe
    answer_tokens: int  # longest answer allowed, all turns together
    solved_at: float = 1.0  # a reward from here on is a solution
    budget: Every = NEVER  # of training compute: the step that spends it is the last
    flops: FlopModel | None = None  # None: unknown, no FLOPs are reported
    peak_flops: float = 0.0  # FLOP/s of the trainer's device by its data sheet; 0: not known, as of a CPU
    max_empty_steps: int = 10  # in a row without anything to learn from
    grace_s: float = 20.0  # for a step, and what is on its way, to end after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a run stands; a checkpoint carries it as JSON (``asdict``, ``LoopState(**d)``).

    ``admitted`` = ``trained`` + the sum of ``dropped`` + the number of those ``ahead``, all in groups.
    """

    step: int = 0  # finished
    cursor: int = 0  # place in the stream from which the next groups are taken
    version: int = 0  # of the policy that the engine serves
    empty_in_a_row: int = 0
    retired: Sequence[str] = ()  # uids of prompts that have left the stream for good, as they left
    ahead: Sequence[Admission] = ()  # on their way; those that had ended are in the spool
    admitted: int = 0
    trained: int = 0  # part of a batch, and not dropped there by a rule
    dropped: Mapping[str, int] = field(default_factory=dict)  # by rule
    totals: Mapping[str, float] = field(default_factory=dict)  # sums over the whole run

    def __post_init__(self) -> None:
        if any(len(one) != len(Admission._fields) or isinstance(one, Mapping) for one in self.ahead):
            raise ValueError(
                "the checkpoint is of a version of ostinato that this one does not read: it names rounds "
                "that were played ahead, and not their groups; resume with that version, or begin a new run"
            )
        object.__setattr__(self, "ahead", tuple(Admission(*one) for one in self.ahead))  # lists in JSON
        object.__setattr__(self, "retired", tuple(self.retired))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def accounted(self) -> dict[str, float]:
        """Metrics of where all groups ever admitted are now, each counted exactly once."""
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

    def left(self, before: LoopState, prompts: int) -> dict[str, float]:
        """Metrics of the prompts that have left for good, of ``prompts``, since ``before`` and in all."""
        total = len(self.retired)
        return {
            "groups/retired": float(total - len(before.retired)),
            "groups/retired_total": float(total),
            "groups/left_share": 1 - total / prompts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    state: LoopState
    why: Finish


def nothing_to_learn(state: LoopState, metrics: Path, counted: Mapping[str, float]) -> NoTrainableSamples:
    """``counted``: by tools and graders, in all steps."""
    unread = describe_unreadable(counted)
    return NoTrainableSamples(
        f"{state.empty_in_a_row} steps in a row had nothing to learn from{unread and f': {unread}'}; see "
        f"groups/dropped and faults in {metrics.name}, then change the task's difficulty or fix the reward"
    )


def describe_unreadable(counted: Mapping[str, float]) -> str:
    """How many calls of tools could not be read, if any, in words."""
    names = [name for name in ("tools/unreadable", "agent/unreadable") if counted.get(name)]
    return ", ".join(
        f"{counted[name]:.0f} calls of tools could not be read ({name}), which is done within "
        "<tool_call></tool_call>"
        for name in names
    )


class Observer(Protocol):
    """Receives what a run reports, and may end it early."""

    def on_step(self, row: Mapping[str, float], /) -> bool | None:
        """A row of metrics.jsonl. True ends the run after this step."""

    def on_eval(self, row: Mapping[str, Any], /) -> None:
        """A row of eval.jsonl."""

    def should_stop(self, step: int, /) -> bool:
        """After a score of the main set at ``step``: is the rest of the run not worth its compute?"""
        return False


class Workers(Protocol):
    """The processes and threads that compute for a loop."""

    def progress(self) -> float:
        """Grows with every token sampled and every microbatch trained on."""
        return 0.0

    def extra_metrics(self) -> Mapping[str, float]:
        """More for each row of metrics: of workers, and of what was published."""
        return {}

    def trainer_consistent(self) -> bool:
        """Does the trainer still have its last state, to be saved, after a step that failed?"""
        return False


class Silent(Observer):
    """An observer that shows nothing and never ends a run."""


class InProcess(Workers):
    """The workers of a loop that computes everything itself."""
