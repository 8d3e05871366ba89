"""What the audit of a killed product finds: each law is broken once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lab.product.audit import events, journal, revisions
from lab.product.clients import Crowd, reactions
from ostinato.launch.product.loop import digest
from ostinato.product.events import parse_event
from ostinato.product.loop import Decision, Finding, Position, Stage, Verdict, advance

OF_TWO = ("shown", "dwell", "comment", "accept", "reject")


def sent(*names: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The log of a client, and the store."""
    rows = [{"event_id": one, "response_id": "r", "kind": "accept", "ts": 1e9} for one in names]
    log = [{"event": one} for one in rows]
    log += [{"id": one, "outcome": "accepted", "late": 0.0} for one in names]
    return log, [parse_event(one) for one in rows]


def test_events_of_a_whole_product_are_found_whole() -> None:
    broken: list[str] = []
    log, stored = sent("a", "b")
    found = events([*log, {"id": "b", "outcome": "repeated"}], stored, broken)
    assert not broken and found["events_acknowledged"] == found["events_stored"] == 2


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("acknowledged and not stored", lambda log, stored: stored.pop()),
        ("stored twice", lambda log, stored: stored.append(stored[0])),
        ("accepted twice", lambda log, stored: log.append({"id": "a", "outcome": "accepted"})),
        ("never sent", lambda log, stored: log.pop(0)),
        ("another content", lambda log, stored: log[0]["event"].update(user="other")),
        ("were refused", lambda log, stored: log.append({"id": "a", "outcome": "expired"})),
    ],
)
def test_what_is_wrong_with_events_is_named(words: str, change: Any) -> None:
    broken: list[str] = []
    log, stored = sent("a", "b")
    change(log, stored)
    events(log, stored, broken)
    assert len(broken) == 1 and words in broken[0]


def decisions(*verdicts: Verdict) -> list[dict[str, Any]]:
    """The journal of one round."""
    at, rows = Position(), []
    for stage, verdict in zip(Stage, verdicts, strict=False):
        revision = f"{stage}-1" if stage in (Stage.JUDGE, Stage.POLICY) else ""
        found = Finding(verdict=verdict, revision=revision)
        after, what = advance(at, found)
        rows.append(Decision(ts=0.0, before=at, finding=found, after=after, what=what).row())
        at = after
    return rows


def test_a_promotion_without_its_gates_and_a_stage_twice_are_named() -> None:
    broken: list[str] = []
    rows = decisions(*[Verdict.PASSED] * 8)
    assert journal(rows, broken)["decisions"]["policy promoted"] == 1 and not broken
    rows[3]["finding"]["verdict"] = "failed"
    journal(rows, broken)
    assert broken == ["judge promoted in round 1 without judge_gates"]
    broken.clear()
    journal([*rows[:3], rows[2], *rows[4:]], broken)
    assert any("judge of round 1 is in the journal twice" in one for one in broken)


def test_a_revision_of_other_bytes_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "revisions" / "new"
    kept.mkdir(parents=True)
    (kept / "adapter").write_text("bytes")
    folder = kept.rename(kept.with_name(digest(kept)))
    serving = {"round": 1, "policy": {"revision": folder.name, "adapter": str(folder)}}
    (tmp_path / "serving.json").write_text(json.dumps(serving))
    rows = [{"what": "policy promoted", "after": {"policy": folder.name}, "finding": {"revision": ""}}]
    broken: list[str] = []
    revisions(tmp_path, rows, broken)
    assert not broken
    (folder / "adapter").write_text("other")
    revisions(tmp_path, rows, broken)
    assert "1 revisions have other bytes" in broken[0]


def test_users_say_what_they_did_and_dislike_every_second_revision() -> None:
    shown = [("r0", "5+7=12 #### 12", "product@0"), ("r1", "#### 13", "product@0")]
    made = [reactions("5 + 7 = ?", "u", shown, 0.5, random.Random(k)) for k in range(40)]
    assert {one["kind"] for events in made for one in events} == {*OF_TWO}
    crowd = Crowd(port=0, model="product", file=Path("none"), seed=0)
    assert [crowd._like(by) for by in ("product@0", "a", "b", "a", "c")] == [0.7, 0.95, 0.05, 0.95, 0.95]
