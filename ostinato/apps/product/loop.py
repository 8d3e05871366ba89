"""The continual loop as a pure state machine: its positions, and the step from one to the next by a finding.

    collect -> freeze -> judge -> judge_gates -> policy -> policy_gates -> canary -> collect
                           |           |            |            |            |
                           +-----------+------------+------------+------------+-> collect

A stage that fails leads back to collect, and its candidate is dropped. An alarm of the policy's run also puts
exemplars into the hack bank, and the judge is refreshed first.

A judge or a policy is a revision, the hash of its adapter. A judge is promoted by its gates, a policy by its
canary after its gates in the same round. A roll-back returns to the old revision, which was never changed.
``advance`` decides. The work of a stage is in ``runs``; it may be killed and done again.
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


def advance(position: Position, finding: Finding) -> tuple[Position, str]:
    """Return (the next position, the decision in words).

    Raises ValueError for a finding that its stage cannot have: a candidate without a revision, an alarm
    outside the policy's training, a promotion of a candidate that is missing or that its gates have not
    cleared.
    """
    if finding.verdict is Verdict.ALARM and position.stage is not Stage.POLICY:
        raise ValueError(f"an alarm at stage {position.stage}; only the training of a policy has detectors")
    if (
        position.stage in (Stage.JUDGE, Stage.POLICY)
        and finding.verdict is Verdict.PASSED
        and not finding.revision
    ):
        raise ValueError(f"stage {position.stage} passed without a revision; give the hash of its adapter")
    if finding.verdict is not Verdict.PASSED:
        return _return_to_collect(position, finding)
    target = replace(position, stage=ORDER[(ORDER.index(position.stage) + 1) % len(ORDER)])
    match position.stage:
        case Stage.COLLECT:
            return replace(target, round=position.round + 1, candidate="", cleared=""), "window complete"
        case Stage.FREEZE:
            return replace(target, frozen=max(finding.frozen, position.frozen)), "window frozen"
        case Stage.JUDGE | Stage.POLICY:
            return replace(
                target, candidate=finding.revision, cleared=""
            ), f"{position.stage} candidate trained"
        case Stage.POLICY_GATES:
            return replace(target, cleared=position.candidate), "candidate cleared by its gates"
    if not position.candidate or (position.stage is Stage.CANARY and position.cleared != position.candidate):
        raise ValueError(f"stage {position.stage} passed for a candidate that its gates have not cleared")
    after = replace(target, candidate="", cleared="")
    if position.stage is Stage.JUDGE_GATES:
        return replace(after, judge=position.candidate, refresh=False), "judge promoted"
    return replace(after, policy=position.candidate), "policy promoted"


def _return_to_collect(position: Position, finding: Finding) -> tuple[Position, str]:
    """Return to COLLECT, with judge and policy as they are and without a candidate. After an alarm the judge
    has to be refreshed first."""
    is_alarm = finding.verdict is Verdict.ALARM
    decisions = {
        Stage.JUDGE: "judge training failed",
        Stage.JUDGE_GATES: "judge candidate dropped by its gates",
        Stage.POLICY: "policy training stopped by an alarm" if is_alarm else "policy training failed",
        Stage.POLICY_GATES: "policy candidate dropped by its gates",
        Stage.CANARY: "policy rolled back",
    }
    after = replace(
        position, stage=Stage.COLLECT, candidate="", cleared="", refresh=position.refresh or is_alarm
    )
    return after, decisions.get(position.stage, f"stage {position.stage} failed")


def replay_journal(rows: Sequence[Mapping[str, Any]]) -> Position:
    """Return the position after a journal of ``Decision`` rows; the initial one for no rows.

    Raises ValueError for rows that do not follow from one another.
    """
    position: Mapping[str, Any] = asdict(Position())
    for number, row in enumerate(rows, 1):
        if row["before"] != position:
            raise ValueError(
                f"row {number} of the journal begins at {row['before']}, where row {number - 1} ended at "
                f"{position}"
            )
        position = row["after"]
    stage = (
        "judge_gates" if position["stage"] == "shadow" else position["stage"]
    )  # "shadow" in older journals
    return Position(**{**position, "stage": Stage(stage)})
