"""The continual loop: nothing is promoted without its gates, and a journal leads where it led."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.loop import (
    ORDER,
    Decision,
    Finding,
    Position,
    Stage,
    Verdict,
    advance,
    replay_journal,
)
from ostinato.apps.serve.calls import choose_arm


def walk(verdicts: list[Verdict]) -> list[Decision]:
    """A loop whose candidates are named r1, r2, ..."""
    at, rows = Position(), []
    for number, verdict in enumerate(verdicts):
        if verdict is Verdict.ALARM and at.stage is not Stage.POLICY:
            verdict = Verdict.FAILED
        found = Finding(verdict=verdict, revision=f"r{number}", frozen=float(number))
        after, what = advance(at, found)
        rows.append(Decision(ts=float(number), before=at, finding=found, after=after, what=what))
        at = after
    return rows


verdicts = st.lists(st.sampled_from([*Verdict, Verdict.PASSED, Verdict.PASSED, Verdict.PASSED]), max_size=60)


@given(verdicts)
def test_nothing_is_promoted_without_its_gates_of_the_same_round(found: list[Verdict]) -> None:
    cleared: set[tuple[int, str, str]] = set()
    for row in walk(found):
        before, after, passed = row.before, row.after, row.finding.verdict is Verdict.PASSED
        if before.stage in (Stage.JUDGE_GATES, Stage.POLICY_GATES) and passed:
            cleared.add((before.round, before.stage, before.candidate))
        if after.judge != before.judge:
            assert (before.stage, row.what) == (Stage.JUDGE_GATES, "judge promoted")
            assert (before.round, Stage.JUDGE_GATES, after.judge) in cleared
        if after.policy != before.policy:
            assert (before.stage, row.what) == (Stage.CANARY, "policy promoted")
            assert (before.round, Stage.POLICY_GATES, after.policy) in cleared


@given(verdicts)
def test_what_fails_leaves_judge_and_policy_as_they_were(found: list[Verdict]) -> None:
    for row in walk(found):
        if row.finding.verdict is not Verdict.PASSED:
            assert (row.after.judge, row.after.policy) == (row.before.judge, row.before.policy)
            assert row.after.stage is Stage.COLLECT


@given(verdicts, st.integers(0, 60))
def test_a_journal_leads_where_it_led(found: list[Verdict], killed_after: int) -> None:
    rows = walk(found)[:killed_after]
    read = [json.loads(json.dumps(row.row())) for row in rows]
    assert replay_journal(read) == (rows[-1].after if rows else Position())


def test_a_judge_in_the_shadow_of_an_older_journal_has_its_gates_again() -> None:
    rows = [row.row() for row in walk([Verdict.PASSED] * 3)]
    rows[-1]["after"] |= {"stage": "shadow", "cleared": "r2"}
    assert replay_journal(rows).stage is Stage.JUDGE_GATES


def test_a_journal_with_a_row_missing_is_refused() -> None:
    rows = [row.row() for row in walk([Verdict.PASSED] * 5)]
    with pytest.raises(ValueError, match="row 2 of the journal"):
        replay_journal([rows[0], *rows[2:]])


def test_a_candidate_that_no_gate_has_cleared_cannot_be_promoted() -> None:
    with pytest.raises(ValueError, match="have not cleared"):
        advance(Position(round=1, stage=Stage.JUDGE_GATES), Finding())
    with pytest.raises(ValueError, match="have not cleared"):
        advance(Position(round=1, stage=Stage.CANARY, candidate="r2", cleared="r1"), Finding())


def test_an_alarm_refreshes_the_judge_before_the_next_policy() -> None:
    at = Position(round=3, stage=Stage.POLICY, judge="j1", policy="p1")
    after, what = advance(at, Finding(verdict=Verdict.ALARM, reasons=("flattery rose",)))
    assert what == "policy training stopped by an alarm"
    assert after == replace(at, stage=Stage.COLLECT, refresh=True)
    with pytest.raises(ValueError, match="an alarm at stage canary"):
        advance(replace(at, stage=Stage.CANARY), Finding(verdict=Verdict.ALARM))


def test_stages_come_in_their_order() -> None:
    rows = walk([Verdict.PASSED] * len(ORDER))
    assert [row.before.stage for row in rows] == list(ORDER)
    assert rows[-1].after == Position(round=1, judge="r2", policy="r4", frozen=1.0)
    assert asdict(rows[-1].after)["stage"] == "collect"


def test_the_canary_has_its_share_and_a_user_stays_in_one_arm() -> None:
    arms = [choose_arm(f"user{k}", 7, 0.1) for k in range(20_000)]
    share = sum(arm == "canary" for arm, _ in arms) / len(arms)
    assert abs(share - 0.1) < 0.01
    assert set(arms) == {("canary", 0.1), ("control", 0.9)}
    assert choose_arm("user3", 7, 0.1) == choose_arm("user3", 7, 0.1)
