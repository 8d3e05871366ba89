"""Which sets a recipe is scored on, and what is wrong with them, known before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.axis import Axis
from ostinato.config import Recipe
from ostinato.every import Every
from ostinato.launch.evaluations import downstream_prompts, evaluations, rules
from ostinato.pipeline.evaluate import held_out
from ostinato.types import Prompt


def rows_file(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in questions))
    return str(path)


def recipe_of(task: str = "arithmetic", downstream: Any = None, **changes: Any) -> Recipe:
    tree = {"task": {"source": task}, "eval": {"k": 2, "every": "1e6 tokens", "downstream": downstream or {}}}
    return Recipe.parse(tree | changes)


def test_sets_come_in_order_with_their_own_terms(tmp_path: Path) -> None:
    file = rows_file(tmp_path / "rows.jsonl", "1+1", "2+2", "3+3")
    sets = {"file": {"source": file, "every": 5, "k": 3}, "hard": {"source": "arithmetic", "n": 4}}
    recipe = recipe_of(downstream=sets)
    prompts = downstream_prompts(recipe, [])
    assert {name: len(each) for name, each in prompts.items()} == {"file": 3, "hard": 4}
    main = [Prompt(uid="a", text="1")]
    found = evaluations(recipe, main, prompts, stop_tokens=(7,), solved_at=1.0, weights="model")
    assert [(one.name, one.k, one.samples, len(one.prompts)) for one in found] == [
        ("eval", 2, 2, 1),
        ("greedy", 1, 1, 1),
        ("file", 3, 3, 3),
        ("hard", 1, 1, 4),
    ]
    assert [one.every for one in found] == [
        Every(amount=1e6, unit=Axis.TOKENS),
        Every(amount=0),
        Every(amount=5),
        Every(amount=0),
    ]
    assert len({held_out(one) for one in found}) == 4
    assert [one.sampling.temperature for one in found] == [1.0, 0.0, 1.0, 1.0]
    greedy = recipe_of().model_copy(update={"eval": recipe_of().eval.model_copy(update={"temperature": 0.0})})
    (only,) = evaluations(greedy, main, {}, stop_tokens=(7,), solved_at=1.0, weights="model")
    assert only.name == "eval", "what is greedy already is not answered twice"


def test_a_set_of_the_training_source_must_not_be_trained_on(tmp_path: Path) -> None:
    file = rows_file(tmp_path / "rows.jsonl", "1+1", "2+2")
    recipe = recipe_of(task=file, downstream={"again": {"source": file}})
    trained_on = downstream_prompts(recipe, [])["again"]
    with pytest.raises(
        ValueError, match=r"^eval\.downstream\.again: 2 of 2 evaluation prompts are also in the"
    ):
        downstream_prompts(recipe, trained_on)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"functions": ["exact", "exact"]}},
        {"task": {"max_turns": 2, "tools": ["calculator"]}},
        {"rollout": {"interrupt_after": [8, 12], "answer_tokens": 4}},
    ],
    ids=str,
)
def test_rules_are_part_of_what_is_measured(change: dict[str, Any]) -> None:
    assert rules(Recipe.parse(change)) != rules(Recipe.parse({}))
    again = {"rollout": {"think_end": "</end>", "interrupt_phrase": "Stop."}}
    assert rules(Recipe.parse(again)) == rules(Recipe.parse({})), "nothing is interrupted"
    others = {"trainer": {"lr": 1.0}, "model": {"path": "other"}, "engine": {"max_batch": 8}, "seed": 3}
    assert rules(Recipe.parse(others)) == rules(Recipe.parse({}))


def test_values_that_nobody_reads_do_not_tell_sets_apart() -> None:
    """rollout.max_tokens beside an interruption, and the phrase of one that is off, made other held-out sets
    of the same scores, and `scale compare` refused them."""

    def name(**rollout: Any) -> str:
        recipe = recipe_of(rollout=rollout)
        sets = evaluations(
            recipe, [Prompt(uid="a", text="1")], {}, stop_tokens=(7,), solved_at=1.0, weights="model"
        )
        return held_out(sets[0])

    interrupted = {"interrupt_after": [8, 12], "answer_tokens": 4}
    assert name(**interrupted, max_tokens=48) == name(**interrupted, max_tokens=64)
    assert name(think_end="</end>") == name() != name(max_tokens=65)
    assert len({name(**interrupted), name(**{**interrupted, "answer_tokens": 5}), name()}) == 3
    assert name(**interrupted, think_end="</end>") != name(**interrupted)
