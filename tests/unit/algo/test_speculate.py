"""Verification: the arrays against the walk, the law of what is emitted, and rules that look right."""

from __future__ import annotations

import numpy as np
import pytest
from five_tokens import (
    chi_square,
    counted,
    exact,
    policy,
    sample_then_match,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.algo.speculate import accepted_chains, accepted_path, depths, leaves


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chains_are_what_the_walk_accepts(data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    drafts, drawn = rng.integers(0, 2, counts.sum()), rng.integers(0, 2, counts.sum() + len(counts))
    expected, node, row = [], 0, 0
    for count in counts.tolist():
        chain = np.arange(count) - 1
        expected.append(len(accepted_path(drafts[node : node + count], chain, drawn[row : row + count + 1])))
        node, row = node + count, row + count + 1
    assert accepted_chains(counts, drafts, drawn).tolist() == expected


def test_a_tree_is_walked_to_where_the_drawn_token_is_no_child() -> None:
    #        7 - 8 - 9
    # last <
    #        5 - 6
    tokens, parents = np.array([7, 8, 9, 5, 6]), np.array([-1, 0, 1, -1, 3])
    drawn_after = {-1: 5, 0: 8, 1: 9, 2: 1, 3: 6, 4: 2}  # what the row of each node draws
    drawn = np.array([drawn_after[node] for node in range(-1, 5)])
    assert accepted_path(tokens, parents, drawn) == [3, 4]
    drawn[0] = 7
    assert accepted_path(tokens, parents, drawn) == [0, 1, 2]
    drawn[0] = 4
    assert accepted_path(tokens, parents, drawn) == []
    assert depths(parents).tolist() == [0, 1, 2, 0, 1]
    assert leaves(parents) == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match="does not stand before it"):
        depths(np.array([1, -1]))


# ---- the law, on a world of which everything is known


@pytest.mark.parametrize("kind", ["wrong", "likely", "coupled"])
def test_what_is_emitted_follows_the_policy_whatever_is_drafted(kind: str) -> None:
    p, rng = policy(0), np.random.default_rng(1)
    counts = counted([sample_then_match(p, kind, rng) for _ in range(3000)])
    statistic, point = chi_square(counts, exact(p))
    assert statistic < point


def test_an_answer_that_was_trained_on_is_not_repeated_with_certainty() -> None:
    """Freshness. After a step that raised the probability of y from 0.2 to 0.3, y has to come with 0.3. The
    ratio rule, which takes y for a draw from the old policy, emits it with min(1, 0.3 / 0.2): every time."""
    old, new, y = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.4, 0.3]), 0
    rng, n = np.random.default_rng(3), 20000
    u = rng.random(n)
    drawn = np.searchsorted(new.cumsum(), u, side="right")
    for draft in (y, 1):  # with the answer itself as the draft, or another one
        accepted = accepted_chains(np.ones(n, np.int64), np.full(n, draft), np.repeat(drawn, 2))
        emitted_y = np.where(accepted == 1, draft, drawn) == y
        assert abs(emitted_y.mean() - new[y]) < 4 * (0.21 / n) ** 0.5
    assert (rng.random(n) < min(1.0, new[y] / old[y])).mean() == 1.0
