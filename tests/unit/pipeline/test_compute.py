"""The compute axis C of a run in FLOPs: what its recipe asks for, whatever the engine made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion
from small_loop import TEN_A_ROW, Bench, FakeMemory

from ostinato.model.flops import Work
from ostinato.pipeline.work import needed_work, rollout_work
from ostinato.types import Completion, Group, Prompt, Stop, Trajectory, Turn

COUNTS = st.integers(0, 3)
TURN = st.tuples(st.lists(COUNTS, min_size=1, max_size=4), st.lists(st.booleans(), max_size=4))
GROUP = st.lists(st.lists(TURN, max_size=3), max_size=4)


def said(injected: Sequence[bool], **of_the_engine: Any) -> Completion:
    return completion(len(injected), injected=np.array(injected, bool), **of_the_engine)


def group_of(episodes: Sequence[Sequence[tuple[Sequence[int], Sequence[bool]]]]) -> Group:
    trajectories = tuple(
        Trajectory(
            turns=tuple(
                Turn(context=np.array(text, np.int32), completion=said(marks)) for text, marks in turns
            ),
            stop=Stop.EOS,
            seed=(),
        )
        for turns in episodes
    )
    return Group(prompt=Prompt(uid="p", text="p"), trajectories=trajectories, step=1)


def row_by_row(group: Group) -> Work:
    """The slow twin. An episode runs each of its positions once, up to the one before its last token; a
    sibling finds what it has in common with the first context of the first, but for its own last token."""
    work, begun = Work(), None
    for trajectory in group.trajectories:
        position = 0  # of the next row
        end = 0  # of the text so far
        for turn in trajectory.turns:
            if end == 0:
                text = turn.context.tolist()
                if begun is not None:
                    while position < min(len(begun), len(text) - 1) and begun[position] == text[position]:
                        position += 1
                begun = begun or text
            end += len(turn.context) + len(turn.completion.tokens)
            last = end - 1 if len(turn.completion.tokens) else end
            while position < last:
                work += Work(1, position + 1, 0)
                position += 1
            work += Work(0, 0, len(turn.completion.tokens) - turn.completion.num_injected)
    return work


@settings(max_examples=50, deadline=None)
@given(st.lists(GROUP, max_size=3))
def test_nothing_is_run_twice(episodes: list[Any]) -> None:
    groups = [group_of(one) for one in episodes]
    assert needed_work(groups) == sum(map(row_by_row, groups), Work())


@settings(max_examples=30, deadline=None)
@given(GROUP, st.data())
def test_it_is_a_function_of_the_tokens(episodes: list[Any], data: st.DataObject) -> None:
    """Of two runs of one recipe, with the same losses to the last bit, one had spent 3.60e10 FLOPs after five
    steps and the other 3.26e10: C had the refused drafts in it, whose number is a matter of measured time,
    and what a cold prefix cache did again. So a resumed run was scored, and ended itself, at other steps."""

    def otherwise(turn: Turn) -> Turn:
        counts = {name: data.draw(COUNTS) for name in ("cached_tokens", "drafted", "accepted", "passes")}
        spans = np.array([[0, data.draw(COUNTS)]], np.int32)
        return replace(turn, completion=replace(turn.completion, recomputed=spans, **counts))

    group = group_of(episodes)
    again = replace(
        group,
        trajectories=tuple(
            replace(one, turns=tuple(map(otherwise, one.turns))) for one in group.trajectories
        ),
    )
    assert needed_work([again]) == needed_work([group])


def test_an_engine_with_a_perfect_cache_and_no_drafts_runs_just_that() -> None:
    """It says of a sibling that the prompt but its last token was there, of a second turn that all was which
    had been a row."""
    marks = [False] * 5
    whole = group_of([[([1] * 10, marks), ([2] * 4, marks)], [([1] * 10, marks)]])
    (first, second), (sibling,) = (one.turns for one in whole.trajectories)
    second, sibling = (
        replace(turn, completion=said(marks, cached_tokens=cached))
        for turn, cached in ((second, 14), (sibling, 9))
    )
    trajectories = tuple(
        replace(one, turns=turns)
        for one, turns in zip(whole.trajectories, ((first, second), (sibling,)), strict=True)
    )
    ran = rollout_work([replace(whole, trajectories=trajectories)])
    assert ran.total == needed_work([whole]) and ran.total.tokens == 10 + 4 + 5 + 4 + 1 + 4


def test_drafts_move_no_evaluation(tmp_path: Path) -> None:
    """Two runs of one recipe, of which one drafts and fails, reach the same C, by which they are scored; the
    ledger has what was paid."""
    plain = Bench(tmp_path / "plain", steps=4, flops=TEN_A_ROW, eval_every="3e3 flops")
    drafts = Bench(
        tmp_path / "drafts", steps=4, flops=TEN_A_ROW, eval_every="3e3 flops", drafting=FakeMemory()
    )
    for bench in (plain, drafts):
        bench.run()
    ours, theirs = ([row["total/compute_flops"] for row in bench.rows] for bench in (plain, drafts))
    assert ours == theirs
    paid = [
        bench.rows[-1]["total/useful_flops"] + bench.rows[-1]["total/wasted_flops"]
        for bench in (plain, drafts)
    ]
    assert ours[-1] < paid[0] < paid[1]  # the fake engine caches no prompt
    spent = [
        [(row["step"], row["spent"]["flops"]) for row in bench.folder.eval.rows()]
        for bench in (plain, drafts)
    ]
    assert spent[0] == spent[1] and [flops for _, flops in spent[0]][-1] == ours[-1]
