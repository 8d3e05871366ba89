"""Groups of different sizes: as many answers as are worth it, and what is learned is what it was."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pushes import drawn, pushes
from small_loop import Bench, as_saved, deterministic

from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.config import Recipe
from ostinato.launch.checks import check
from ostinato.pipeline.curriculum import Curriculum
from ostinato.types import Prompt

RULE = Curriculum(by="prompt", low=0, high=1, revisit=0.1, seed=4, solved_at=1.0, sizes=True)
ALGORITHMS = [
    algorithm("dr_grpo"),
    algorithm("rloo"),
    algorithm("grpo", scale="none", overlong_buffer=0.2),
    algorithm("grpo", baseline="none", scale="none", kl_coef=0.1),
]


def expected(
    sizes: tuple[int, int], rights: tuple[float, float], chosen: Algorithm, usual: int
) -> np.ndarray:
    total = np.zeros((2, 2))
    for outcome in itertools.product(*map(drawn, sizes, rights)):
        chances, groups = zip(*outcome, strict=True)
        total += np.prod(chances) * pushes(groups, chosen, group_size=usual)
    return total


@settings(max_examples=12, deadline=None)
@given(
    chosen=st.sampled_from(ALGORITHMS),
    sizes=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    rights=st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98)),
)
def test_groups_add_what_they_would_with_equal_sizes(
    chosen: Algorithm, sizes: tuple[int, int], rights: tuple[float, float]
) -> None:
    np.testing.assert_allclose(
        expected(sizes, rights, chosen, 3), expected((3, 3), rights, chosen, 0), rtol=1e-4, atol=1e-7
    )


def test_sizes_go_by_the_expected_deviation_and_keep_their_mean() -> None:
    """By hand: of 14 answers 0, 7 and 14 were right, so deviations are those of 1/16, 1/2 and 15/16."""
    rates = {"hopeless": (0.0, 14.0), "open": (7.0, 14.0), "solved": (14.0, 14.0)}
    low, high = np.sqrt(15) / 16, 0.5
    mean = (2 * low + high) / 3
    found = [RULE.group_size(rates, Prompt(uid=uid, text="?"), 30) for uid in (*rates, "new")]
    assert found == [round(30 * low / mean), round(30 * high / mean), round(30 * low / mean), 30]
    assert sum(found[:3]) == pytest.approx(90, abs=2)
    many = rates | {f"h{n}": (0.0, 98.0) for n in range(99)}  # one worth most of all has twice as many
    assert RULE.group_size(many, Prompt(uid="open", text="?"), 30) == 60
    assert RULE.group_size(rates, Prompt(uid="hopeless", text="?"), 2) == 2
    inside = replace(RULE, low=0.2, high=0.8)  # the mean is over what is sampled
    assert inside.group_size(rates, Prompt(uid="open", text="?"), 30) == 30
    assert replace(RULE, sizes=False).group_size(rates, Prompt(uid="open", text="?"), 30) == 30


@pytest.mark.parametrize("changes", [{}, {"staleness": 2}], ids=["now", "stale"])
def test_a_resumed_run_has_the_same_sizes_to_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A group on its way has the size that it was admitted with, whatever is known of its prompt since."""
    usual: dict[str, Any] = {"epoch": 12, "curriculum": RULE, "checkpoint_every": 3, "steps": 8, **changes}
    whole = Bench(tmp_path, keep=9, **usual)
    whole.run()
    part = Bench(tmp_path, keep=9, **usual, **as_saved(whole, 0))
    part.run()
    assert [deterministic(row) for row in part.rows] == [deterministic(row) for row in whole.rows[3:]]
    assert part.trainer.logits.tolist() == whole.trainer.logits.tolist()
    sizes = [row["curriculum/size_max"] - row["curriculum/size_min"] for row in whole.rows]
    assert sizes[0] == 0 and max(sizes) > 0
    assert all(row["tokens/sampled"] == row["tokens/trained"] + row["tokens/wasted"] for row in whole.rows)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"curriculum": {"by": "off", "sizes": True}}, "measures no rates"),
        ({"algo": {"name": "grpo"}}, "scale 'group'"),
        ({"algo": {"name": "dr_grpo", "aggregation": "token"}}, "aggregation 'token'"),
        ({"algo": {"name": "dr_grpo", "aggregation": "prompt"}}, "aggregation 'prompt'"),
        ({"rollout": {"pilot": 4}}, "rollout.pilot 4"),
        ({"rollout": {"solved_for_good": 0.9}}, "solved_for_good"),
    ],
)
def test_what_sizes_do_not_go_with_is_refused(keys: dict[str, Any], word: str) -> None:
    usual = {"algo": {"name": "dr_grpo"}, "curriculum": {"by": "prompt", "sizes": True}}
    with pytest.raises(ValueError, match=word):
        check(Recipe.parse(usual | keys))
