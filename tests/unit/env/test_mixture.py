"""Several tasks as one stream: a pure function of (seed, index), shares by weights, nothing left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.env.mixture import (
    SLACK,
    Mixture,
    compute_arcs,
    compute_shares,
    count_places,
    label_prompts,
    locate_place,
)
from ostinato.env.tasks import Rows
from ostinato.types import Prompt

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def stream(weights: dict[str, float], sizes: dict[str, int], seed: int = 0) -> Mixture:
    parts = {
        name: Rows(label_prompts([Prompt(uid=str(k), text="?") for k in range(size)], name), seed=seed)
        for name, size in sizes.items()
    }
    return Mixture(parts, weights, seed=seed)


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(-3, 9))
def test_a_place_in_the_tasks_own_stream_against_the_slow_twin(weights: list[float], seed: int) -> None:
    """The twin walks the mixture from its beginning and counts."""
    seen = [0] * len(weights)
    for index in range(200):
        task, place = locate_place(seed, compute_arcs(weights), index)
        assert place == seen[task]
        seen[task] += 1


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**12), length=st.integers(1, 400))
def test_every_stretch_has_the_tasks_by_their_weights(weights: list[float], start: int, length: int) -> None:
    found = [locate_place(1, compute_arcs(weights), index)[0] for index in range(start, start + length)]
    for task, weight in enumerate(weights):
        assert abs(found.count(task) - length * weight / sum(weights)) < SLACK


def test_the_order_is_what_it_was() -> None:
    """A change of it would change every run of a mixture that is repeated."""
    order = [locate_place(0, compute_arcs([2, 1]), index) for index in range(10)]
    assert "".join("ab"[task] for task, _ in order) == "aababaabaa"
    assert [place for _, place in order] == [0, 1, 0, 2, 1, 3, 4, 2, 5, 6]
    assert locate_place(7, compute_arcs([1, 3]), 10**15) == locate_place(7, compute_arcs([1.0, 3.0]), 10**15)


def test_two_epochs_in_a_row_have_every_prompt() -> None:
    tasks = stream({"a": 9.0, "b": 1.0}, {"a": 3, "b": 5})
    assert len(tasks) == 8
    for start in (0, 12345):
        met = {tasks.prompt(index).uid for index in range(start, start + 2 * tasks.epoch)}
        assert len(met) == 8
    prompt = tasks.prompt(0)
    assert prompt.uid.startswith(f"{prompt.task}/") and tasks.prompt(0) is tasks.prompt(0)


def test_a_split_by_weights_has_every_task() -> None:
    assert count_places({"a": 3.0, "b": 1.0}, 0, 40) == {"a": 30, "b": 10}
    assert count_places({"a": 1e6, "b": 1.0}, 0, 10) == {"a": 10, "b": 1}
    assert count_places({"": 1.0}, 5, 7) == {"": 7} and compute_shares({"a": 3.0, "b": 1.0}) == {
        "a": 0.75,
        "b": 0.25,
    }


def test_without_a_mixture_prompts_have_no_task() -> None:
    (prompt,) = label_prompts([Prompt(uid="x", text="?")], "")
    assert (prompt.uid, prompt.task) == ("x", "")


@pytest.mark.parametrize("count", [0, 1, 17])
def test_the_first_places_are_counted(count: int) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    found = [locate_place(3, compute_arcs([1, 2, 4]), index)[0] for index in range(count)]
    assert count_places(weights, 3, count) == {name: max(1, found.count(k)) for k, name in enumerate(weights)}
