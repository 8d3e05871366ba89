"""What the loop books: groups from the spool once, whoever played them; evaluation apart."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loop import TEN_A_ROW, Bench, IsRight, Killed

from ostinato.observe.ledger import read, spent, summary
from ostinato.pipeline.loop import LoopState
from ostinato.types import Group, Reward

SIZES: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "prompts_per_step": 2, "group_size": 4}
TOKENS = 4 * 2  # sampled in a group


class Dies(IsRight):
    """Killed at these prompts of a step; notes what was graded, and so was really sampled."""

    def __init__(self, step: int = 0, *uids: str) -> None:
        super().__init__()
        self.step, self.uids, self.graded = step, uids, 0

    async def grade(self, group: Group) -> list[Reward]:
        if group.step == self.step and group.prompt.uid in self.uids:
            raise Killed
        self.graded += group.prompt.uid.startswith("p")
        return await super().grade(group)


def lives(path: Path, graders: Sequence[Dies], stages: Sequence[str], **changes: Any) -> Bench:
    """One process after another, each from the last checkpoint."""
    state, logits = None, None
    for grader, stage in zip(graders, stages, strict=True):
        bench = Bench(path, **SIZES, **changes, flops=TEN_A_ROW, state=state, logits=logits, grader=grader)
        bench.loop.stage = replace(bench.loop.stage, identity=stage)
        with suppress(Killed):  # not where the groups to die at come from the spool
            bench.run()
        if bench.saved:
            saved, logits = bench.saved[-1]
            state = LoopState(**saved)
    return bench


def adds_up(bench: Bench, graders: Sequence[Dies], ahead: int = 0) -> None:
    """What the ledger says was sampled is what was graded, but for groups that a kill kept from any row."""
    found = summary(read(bench.folder))
    really = sum(grader.graded for grader in graders) * TOKENS
    assert found.tokens["sampled"] == found.tokens["trained"] + sum(found.dropped.values())
    assert found.useful is not None and found.useful + sum(found.wasted.values()) == sum(found.flops.values())
    assert really - 2 * (1 + ahead) * (len(graders) - 1) * TOKENS <= found.tokens["sampled"] <= really
    assert min(found.wasted.values()) >= 0 and min(found.dropped.values()) >= 0


def test_a_row_of_the_same_step_may_be_one_of_other_groups(tmp_path: Path) -> None:
    """Session 1 had a row of step 3. Session 2 went on with other rewards, played a group of step 3 anew and
    was killed. Session 3 took it from the spool, saw the row of step 3, and deducted its tokens and FLOPs,
    which no row had ever paid for."""
    graders = [Dies(4, "p7"), Dies(3, "p5"), Dies()]
    bench = lives(tmp_path, graders, ["", "others", "others"])
    third = [row for row in read(bench.folder) if row["event"] == "step" and row["session"] == 3]
    assert bench.rows[0]["rollout/from_spool"] == 1 and not any("reused" in row for row in third)
    adds_up(bench, graders)


def test_who_takes_up_unpaid_groups_has_paid_for_them(tmp_path: Path) -> None:
    """Session 1 is killed in step 3 with one of two groups in the spool. Session 2 finishes the step with it,
    so its row pays for both, and is killed in step 4. Session 3 owes nothing for step 3."""
    graders = [Dies(3, "p5"), Dies(4, "p6", "p7"), Dies()]
    bench = lives(tmp_path, graders, ["", "", ""])
    rows = {(row["session"], row["step"]): row for row in read(bench.folder) if row["event"] == "step"}
    assert "reused" not in rows[2, 3] and rows[3, 3]["reused"]["sampled"] == 2 * TOKENS
    found = summary(read(bench.folder))
    assert found.tokens["sampled"] == sum(grader.graded for grader in graders) * TOKENS == 8 * TOKENS
    adds_up(bench, graders)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3]),
)
def test_however_it_is_killed_and_changed(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int, bool]], staleness: int
) -> None:
    graders = [Dies(step, f"p{2 * step - 2 + place}", f"p{2 * step - 1}") for step, place, _ in kills]
    graders.append(Dies())
    stages = ["", *("others" if changed else "" for *_, changed in kills)]
    path = tmp_path_factory.mktemp("run") / "run"
    adds_up(lives(path, graders, stages, staleness=staleness), graders, staleness)


def test_sigterm_in_an_evaluation_is_no_compute_of_training(tmp_path: Path) -> None:
    """What a grace period ends is lost; where that was an evaluation, the hours of training had it all the
    same, and every forecast on them."""

    class Stuck(IsRight):
        async def grade(self, group: Group) -> list[Reward]:
            if group.prompt.uid == "e3":
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
                await asyncio.sleep(60)
            return await super().grade(group)

    bench = Bench(tmp_path, grader=Stuck(), grace_s=0.1)
    assert bench.run().why == "terminated"
    rows = read(bench.folder)
    assert [row["event"] for row in rows] == ["start", "lost", "end"]
    assert rows[1]["part"] == "eval" and rows[1]["seconds"] > 0.1
    assert summary(rows).evaluation.seconds == rows[1]["seconds"] == summary(rows).wall["lost"]
    wall = summary(rows).wall
    assert 3600 * summary(rows).compute["hours"] == pytest.approx(sum(wall.values()) - wall["lost"])
    assert spent(rows, "hours") == {0: 0}
