"""Prompts by their pass rate: chosen by a pure rule, counted, saved, and never lost for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, group_of
from small_loop import Bench, as_saved, deterministic

from ostinato.algo.noise import key, uniform
from ostinato.env.mixture import Mixture, named
from ostinato.env.tasks import Rows
from ostinato.pipeline.curriculum import PASSED_OVER, Choice, Curriculum, Rates
from ostinato.pipeline.rounds import Rounds
from ostinato.pipeline.state import LoopState
from ostinato.types import Group, Prompt

RULE = Curriculum(by="prompt", low=0.2, high=0.8, revisit=0.25, seed=4, solved_at=1.0)
NAMES = [f"p{n}" for n in range(5)]


def places_slow(tasks: Rows, rates: Rates, cursor: int, count: int) -> list[int]:
    """The twin: go from place to place and put every question of the rule in words."""
    found = []
    while len(found) < count:
        uid = tasks.prompt(cursor).uid
        known = uid in rates
        rate = rates[uid][0] / rates[uid][1] if known else None
        worth = rate is None or 0.2 <= rate <= 0.8
        drawn = uniform(key((4, -1)), cursor) < 0.25
        if worth or drawn:
            found.append(cursor)
        cursor += 1
    return found


measured = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.integers(0, 8), st.just(8)).map(lambda pair: (*map(float, pair),))
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 5), cursor=st.integers(0, 40), count=st.integers(1, 6), rates=measured)
def test_places_and_what_was_passed_over_against_the_slow_twin(
    seed: int, cursor: int, count: int, rates: dict[str, tuple[float, float]]
) -> None:
    nothing: Any = None
    tasks = Rows([Prompt(uid=name, text="?") for name in NAMES], seed=seed)
    rounds = Rounds(
        tasks=tasks, stage=nothing, spool=nothing, prompts=2, group_size=4, seed=4, curriculum=RULE
    )
    found = rounds.places(cursor, (), count, rates)
    assert found == places_slow(tasks, rates, cursor, count)
    choices = rounds.choices(cursor, found[-1] + 1, (), rates)
    passed = sum(choices[name] for name in PASSED_OVER)
    assert passed == found[-1] + 1 - cursor - count and choices.total() == passed + count
    assert rounds.places(cursor, (), count) == list(range(cursor, cursor + count))  # rates are not needed


def test_nobody_is_lost_for_ever() -> None:
    """Of a prompt that is never solved a quarter of the places is taken."""
    prompt, rates = Prompt(uid="a", text="?"), {"a": (0.0, 8.0)}
    choices = Counter(RULE.choice(rates, prompt, place) for place in range(4000))
    assert choices.keys() == {Choice.REVISITED, Choice.HOPELESS} and 900 < choices[Choice.REVISITED] < 1100


def group(rewards: Sequence[float | None], uid: str = "a", task: str = "") -> Group:
    made = group_of(*(episode(completion(1), reward=value) for value in rewards), uid=uid)
    return replace(made, prompt=replace(made.prompt, task=task))


def test_rates_fade() -> None:
    rates = RULE.measured({}, [group([1.0, 0.0, 0.0, 0.0])])
    assert rates == {"a": (1.0, 4.0)}
    assert RULE.measured(rates, [group([1.0, 1.0, None])]) == {"a": (2.5, 4.0)}
    assert RULE.measured(rates, [group([None, None]), group([], "b")]) == rates  # no verdict, no news


def test_a_task_has_one_rate() -> None:
    rule = replace(RULE, by="task")
    rates = rule.measured({}, [group([1.0, 1.0], "a", "sums"), group([1.0, 1.0], "b", "sums")])
    assert rates == {"sums": (2 * 1.95, 2 * 1.95)}
    there = Prompt(uid="c", text="?", task="sums")
    assert {rule.choice(rates, there, place) for place in range(99)} == {Choice.SOLVED, Choice.REVISITED}
    assert rule.choice(rates, replace(there, task="guess"), 0) is Choice.TAKEN


@pytest.mark.parametrize("changes", [{}, {"staleness": 2}], ids=["now", "stale"])
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Rates are part of the checkpoint: without them a resumed run would sample what was passed over."""
    rule = replace(RULE, low=0.4, high=0.6, revisit=0.1)
    usual: dict[str, Any] = {"epoch": 12, "curriculum": rule, "checkpoint_every": 3, "steps": 8, **changes}
    whole = Bench(tmp_path / "whole", keep=9, **usual)
    whole.run()
    assert whole.saved[0][0]["rates"] and whole.saved[0][0]["step"] == 3
    part = Bench(tmp_path / "whole", keep=9, **usual, **as_saved(whole, 0))
    part.run()
    assert [deterministic(row) for row in part.rows] == [deterministic(row) for row in whole.rows[3:]]
    assert part.trainer.logits.tolist() == whole.trainer.logits.tolist()
    passed = sum(row[f"curriculum/{name}"] for row in whole.rows for name in PASSED_OVER)
    assert passed > 0 and whole.rows[-1]["curriculum/known"] <= 12
    last = LoopState(**whole.saved[-1][0])
    assert last.cursor == last.admitted + passed


def mixed(path: Path, **options: Any) -> Bench:
    """A run of two tasks, of which places are taken by the tasks' rates."""
    bench = Bench(path, keep=9, checkpoint_every=3, steps=8, **options)
    parts = {
        name: Rows(named([Prompt(uid=str(k), text="?") for k in range(5)], name), seed=1) for name in "ab"
    }
    bench.loop.tasks = Mixture(parts, {"a": 3.0, "b": 1.0}, seed=1)
    return bench


def test_a_resumed_mixture_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rule = replace(RULE, by="task", low=0.3, high=0.7, revisit=0.2)
    whole = mixed(tmp_path / "whole", curriculum=rule)
    whole.run()
    part = mixed(tmp_path / "whole", curriculum=rule, **as_saved(whole, 0))
    part.run()
    assert [deterministic(row) for row in part.rows] == [deterministic(row) for row in whole.rows[3:]]
    assert set(whole.saved[-1][0]["rates"]) == {"a", "b"}
    plain = mixed(tmp_path / "plain")
    plain.run()
    shares = [row.get("tasks/a/share", 0.0) for row in plain.rows]
    assert sum(shares) / 8 == pytest.approx(0.75, abs=0.05)


def test_without_one_there_is_nothing_to_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    assert not bench.loop.state.rates and not any("curriculum" in name for name in bench.rows[-1])
