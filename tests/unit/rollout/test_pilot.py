"""Pilot answers: unbiased by enumeration of all that can happen, refused where they would not be, counted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, group_of
from reference.fake_engine import FakeEngine, scripted
from small_loop import RIGHT, SAMPLING, Bench, IsRight, Once

from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.config import Recipe
from ostinato.launch.checks import check
from ostinato.pipeline.credit import assign
from ostinato.rollout.pilot import Pilot
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play
from ostinato.types import Prompt

Answers = tuple[bool, ...]
ALGORITHMS = [
    algorithm("grpo"),
    algorithm("dr_grpo"),
    algorithm("rloo"),
    algorithm("grpo", aggregation="prompt", overlong_buffer=0.2),
    algorithm("grpo", baseline="none", scale="none", kl_coef=0.1),
]


def drawn(size: int, right: float) -> Iterator[tuple[float, Answers]]:
    """(probability, which are right) of ``size`` answers."""
    for answers in itertools.product((True, False), repeat=size):
        yield float(np.prod([right if one else 1 - right for one in answers])), answers


def played(size: int, right: float, pilot: Pilot) -> Iterator[tuple[float, Answers]]:
    """The same of a group, in the words of the module: the pilot, then perhaps the others."""
    for chance, first in drawn(pilot.answers, right):
        alike = all(first) or not any(first)
        if alike and pilot.share < 1:
            yield chance * (1 - pilot.share), first
        for other, rest in drawn(size - pilot.answers, right):
            yield chance * other * (pilot.share if alike else 1), first + rest


def pushes(groups: Sequence[Answers], chosen: Algorithm, pilot: Pilot | None) -> np.ndarray:
    """[groups, right or wrong] sums of weights times advantages; of weights where no advantage is needed."""
    made = assign(
        [group_of(*(episode(completion(9 if y else 10), reward=y) for y in each)) for each in groups],
        chosen,
        min_verdicts=2,
        answer_tokens=10,
        pilot=pilot,
    )
    found = np.zeros((len(groups), 2))
    for sample, weights in zip(made.samples, made.weights, strict=True):
        by = 1.0 if chosen.needs_reference else sample.advantages
        found[sample.group, int(sample.loss_mask.sum() == 9)] += (weights * by).sum()
    return found


def expected(size: int, rights: Sequence[float], chosen: Algorithm, pilot: Pilot | None) -> np.ndarray:
    total = np.zeros(1)
    for outcome in itertools.product(
        *(played(size, right, pilot) if pilot else drawn(size, right) for right in rights)
    ):
        chances, groups = zip(*outcome, strict=True)
        total = total + np.prod(chances) * pushes(groups, chosen, pilot)
    return total


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(ALGORITHMS), st.lists(st.floats(0.02, 0.98), min_size=1, max_size=2), st.floats(0.05, 1)
)
def test_groups_push_as_they_would_without_pilots(
    chosen: Algorithm, rights: list[float], share: float
) -> None:
    """One group of 4 or two of 3, whatever their odds."""
    size = 5 - len(rights)
    for answers in range(2, size):
        found = expected(size, rights, chosen, Pilot(answers=answers, share=share))
        np.testing.assert_allclose(found, expected(size, rights, chosen, None), rtol=1e-4, atol=1e-7)


def test_a_group_goes_on_when_its_pilot_differs_and_else_at_the_share() -> None:
    """Groups of 6, of which the first has a right answer in its pilot and all others none anywhere."""
    engine = FakeEngine(scripted(lambda ask: [RIGHT if ask.seed == (0, 1, 0, 1) else 5, 4], 10))
    stage = RolloutContext(engine=engine, env=Once, grader=IsRight(), sampling=SAMPLING, context_limit=16)
    ask = RolloutRequest(
        prompt=Prompt(uid="p", text=""), seed=(), group_size=6, step=1, pilot=Pilot(answers=2, share=0.5)
    )
    played = asyncio.run(play(stage, [replace(ask, seed=(0, 1, k)) for k in range(40)]))
    groups = [one.group.trajectories for one in played]
    sizes = [len(group) for group in groups]
    assert sizes[0] == 6 and set(sizes[1:]) == {2, 6} and 10 <= sizes.count(2) <= 30
    assert [one.seed for one in groups[0]] == [(0, 1, 0, k) for k in range(6)]


def test_an_answer_without_a_verdict_is_no_reason_to_stop() -> None:
    pilot = Pilot(answers=2, share=0.01)
    assert pilot.goes_on(np.array([0.0, np.nan]), (0, 1, 0)) and pilot.weight(np.array([0, np.nan, 0])) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_not_sampled_is_counted(tmp_path: Path, overlap: bool) -> None:
    pilot = Pilot(answers=3, share=0.5)
    bench = Bench(tmp_path, steps=5, algorithm=algorithm("grpo"), pilot=pilot, overlap=overlap)
    bench.run()
    for row in bench.rows:
        assert row["tokens/sampled"] + 2 * row["pilot/answers_spared"] == 4 * 8 * 2
        assert row["tokens/sampled"] == row["tokens/trained"] + row["tokens/wasted"]
        assert row["groups/dropped"] == row["pilot/cut_short"] <= row["pilot/alike"] <= 4
    last, cut = bench.rows[-1], sum(row["pilot/cut_short"] for row in bench.rows)
    assert cut and last["groups/dropped_total/cut_short"] == cut == 20 - last["groups/trained_total"]


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"algo": {"name": "dapo"}}, "aggregation 'token'"),
        ({"algo": {"name": "cispo"}}, "scale 'batch'"),
        ({"algo": {"name": "grpo", "drop_zero_variance": True}}, "drop_zero_variance"),
        ({"algo": {"name": "grpo", "mask_truncated": True}}, "mask_truncated"),
        ({"reward": {"functions": ["judge:x"]}}, "a judge"),
        ({"rollout": {"pilot": 4, "solved_for_good": 0.9}}, "solved_for_good"),
        ({"rollout": {"pilot": 16}}, "fewer than the group has"),
        ({"rollout": {"pilot": 1}}, "use 2 or more"),
    ],
)
def test_what_pilots_do_not_go_with_is_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check(Recipe.parse({"rollout": {"pilot": 4}} | keys))
