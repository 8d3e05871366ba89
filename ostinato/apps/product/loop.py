"""The continual loop as a pure state machine: its position, and the position after the finding of a stage.

    collect -> freeze -> judge -> judge_gates -> policy -> policy_gates -> canary -> collect
                           |           |            |            |            |
                           +-----------+------------+------------+------------+-> collect

A stage that fails leads back to collect, and its candidate is dropped. An alarm of the policy's run also puts
exemplars into the hack bank, and the judge is refreshed first.

A judge or a policy is a revision: the hash of its adapter. It is promoted in one place each: a judge by its
gates, a policy behind those of the same round; a roll-back is the old revision, which was never changed.
``advance`` decides; the work of a stage, which may be killed and done again, is in ``runs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """The work that is next."""

    COLLECT = "collect"  # until enough pairs are decided
    FREEZE = "freeze"  # the window of feedback, written down
    JUDGE = "judge"  # a candidate is trained on it
    JUDGE_GATES = "judge_gates"  # beside the current judge, on the end of the window and on later pairs
    POLICY = "policy"  # RL with the judge of the round, watched
    POLICY_GATES = "policy_gates"
    CANARY = "canary"  # a share of traffic


class Verdict(StrEnum):
    """The outcome of a stage."""

    PASSED = "passed"
    FAILED = "failed"  # a gate, or a canary that did worse
    ALARM = "alarm"  # of a detector, while the policy was trained


ORDER = tuple(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The state of the loop. ``frozen``: the end of the last window, seconds since 1970."""

    round: int = 0
    stage: Stage = Stage.COLLECT
    judge: str = ""  # the current revision; "": none yet
    policy: str = ""  # "": the base
    candidate: str = ""  # of the judge up to its gates, of the policy from there on
    cleared: str = ""  # the policy that has passed its gates in this round
    frozen: float = 0.0
    refresh: bool = False  # after an alarm: the judge has to be trained on the exemplars first


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of the work of a stage. ``revision``: that of the candidate that it made."""

    verdict: Verdict = Verdict.PASSED
    revision: str = ""
    reasons: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    frozen: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A row of the journal: the position and the finding, and the position after them."""

    ts: float
    before: Position
    finding: Finding
    after: Position
    what: str  # "judge promoted", "policy rolled back", ...

    def row(self) -> dict[str, Any]:
        return asdict(self)


def advance(at: Position, finding: Finding) -> tuple[Position, str]:
    """Return (the next position, the decision in words).

    Raises ValueError for a finding that its stage cannot have: a candidate without a revision, an alarm
    outside the policy's training.
    """
    if finding.verdict is Verdict.ALARM and at.stage is not Stage.POLICY:
        raise ValueError(f"an alarm at stage {at.stage}; only the training of a policy has detectors")
    if at.stage in (Stage.JUDGE, Stage.POLICY) and finding.verdict is Verdict.PASSED and not finding.revision:
        raise ValueError(f"stage {at.stage} passed without a revision; give the hash of its adapter")
    if finding.verdict is not Verdict.PASSED:
        return _return_to_collect(at, finding)
    target = replace(at, stage=ORDER[(ORDER.index(at.stage) + 1) % len(ORDER)])
    match at.stage:
        case Stage.COLLECT:
            return replace(target, round=at.round + 1, candidate="", cleared=""), "window complete"
        case Stage.FREEZE:
            return replace(target, frozen=max(finding.frozen, at.frozen)), "window frozen"
        case Stage.JUDGE | Stage.POLICY:
            return replace(target, candidate=finding.revision, cleared=""), f"{at.stage} candidate trained"
        case Stage.POLICY_GATES:
            return replace(target, cleared=at.candidate), "candidate cleared by its gates"
    if not at.candidate or (at.stage is Stage.CANARY and at.cleared != at.candidate):
        raise ValueError(f"stage {at.stage} passed for a candidate that its gates have not cleared")
    after = replace(target, candidate="", cleared="")
    if at.stage is Stage.JUDGE_GATES:
        return replace(after, judge=at.candidate, refresh=False), "judge promoted"
    return replace(after, policy=at.candidate), "policy promoted"


def _return_to_collect(at: Position, finding: Finding) -> tuple[Position, str]:
    """Return to COLLECT, with judge and policy as they are."""
    is_alarm = finding.verdict is Verdict.ALARM
    decisions = {
        Stage.JUDGE: "judge training failed",
        Stage.JUDGE_GATES: "judge candidate dropped by its gates",
        Stage.POLICY: "policy training stopped by an alarm" if is_alarm else "policy training failed",
        Stage.POLICY_GATES: "policy candidate dropped by its gates",
        Stage.CANARY: "policy rolled back",
    }
    after = replace(at, stage=Stage.COLLECT, candidate="", cleared="", refresh=at.refresh or is_alarm)
    return after, decisions.get(at.stage, f"stage {at.stage} failed")


def position_of(rows: Sequence[Mapping[str, Any]]) -> Position:
    """The position that a journal of ``Decision`` rows leads to; the initial one for no rows.

    Raises ValueError for rows that do not follow from one another.
    """
    at: Mapping[str, Any] = asdict(Position())
    for number, row in enumerate(rows, 1):
        if row["before"] != at:
            raise ValueError(
                f"row {number} of the journal begins at {row['before']}, where row {number - 1} ended at {at}"
            )
        at = row["after"]
    stage = "judge_gates" if at["stage"] == "shadow" else at["stage"]  # "shadow" in older journals
    return Position(**{**at, "stage": Stage(stage)})
