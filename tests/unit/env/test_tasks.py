"""Task sources by name, and the addressed stream of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.env.tasks import Rows, check_disjoint, load_tasks
from ostinato.types import Prompt


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(uid=str(k), text=f"question {k}") for k in range(first, first + count)]


def write_rows(path: Path, count: int) -> str:
    rows = [{"prompt": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(st.integers(1, 40), st.integers(-5, 2**40), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_epoch_is_a_permutation_and_an_address_says_it_all(count: int, seed: int, epoch: int) -> None:
    """Read backwards by a second stream, as a resumed run would, each index is the same prompt."""
    rows, again = Rows(prompts(count), seed=seed), Rows(prompts(count), seed=seed)
    indices = range(epoch * count, (epoch + 1) * count)
    seen = {index: rows.prompt(index).uid for index in indices}
    assert sorted(seen.values()) == sorted(prompt.uid for prompt in prompts(count))
    assert {index: again.prompt(index).uid for index in reversed(indices)} == seen


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order() -> None:
    def stream(start: int, **options: Any) -> list[str]:
        return [Rows(prompts(50), **options).prompt(start + k).uid for k in range(50)]

    assert stream(0, seed=0) != stream(50, seed=0)
    assert stream(0, seed=0) != stream(0, seed=1)
    assert stream(50, seed=0, shuffle=False) == [str(k) for k in range(50)]


def test_the_order_of_a_seed_is_fixed_for_good() -> None:
    """A change here changes every resumed run: numpy's permutation() may change, raw Philox words may not."""
    assert [Rows(prompts(8), seed=0).prompt(k).uid for k in range(8)] == list("02154367")


@pytest.mark.parametrize("source", ["arithmetic", "gym:chain_sum", "gym:number_sorting"])
def test_procedural_splits_are_disjoint_distinct_and_grow_in_place(source: str) -> None:
    if source.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    train = load_tasks(source, "train", 0, 60)
    evaluation = load_tasks(source, "eval", 0, 20) + load_tasks(source, "eval", 1, 20)
    check_disjoint(train, evaluation)
    assert len({prompt.uid for prompt in train}) == 60
    assert [prompt.uid for prompt in load_tasks(source, "train", 0, 30)] == [
        prompt.uid for prompt in train[:30]
    ]
    assert [prompt.uid for prompt in load_tasks(source, "train", 1, 60)] != [prompt.uid for prompt in train]


def test_a_small_space_shared_by_both_splits_stays_disjoint() -> None:
    """Sums of two digits: with splits made of seed ranges alone most evaluation questions are trained on."""
    pytest.importorskip("reasoning_gym")
    params = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train = load_tasks("gym:chain_sum", "train", 0, 100, params)
    evaluation = load_tasks("gym:chain_sum", "eval", 0, 10, params)
    check_disjoint(train, evaluation)
    with pytest.raises(ValueError, match="has only about"):
        load_tasks("gym:chain_sum", "eval", 0, 200, params)


def test_a_file_gives_a_seeded_subset_in_its_order(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 100)
    some = load_tasks(source, "train", 0, 10)
    numbers = [int(prompt.columns["answer"]) for prompt in some]
    assert len(numbers) == 10
    assert numbers == sorted(numbers)
    assert numbers != list(range(1, 11))
    assert [prompt.uid for prompt in load_tasks(source, "train", 0, 10)] == [prompt.uid for prompt in some]
    assert len(load_tasks(source, "eval", 0, None)) == len(load_tasks(source, "eval", 0, 1000)) == 100


def test_one_file_for_both_splits_is_noticed_and_holdout_mends_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 100)
    with pytest.raises(ValueError, match="100 of 100 evaluation prompts are also in the training data"):
        check_disjoint(load_tasks(source, "train", 0, None), load_tasks(source, "eval", 0, None))
    train, evaluation = (load_tasks(source, split, 0, None, {"holdout": 0.2}) for split in ("train", "eval"))
    check_disjoint(train, evaluation)
    assert len(train) + len(evaluation) == 100
    assert 8 <= len(evaluation) <= 32


def test_a_system_prompt_opens_every_chat(tmp_path: Path) -> None:
    (prompt,) = load_tasks("arithmetic", "train", 0, 1, system_prompt="Be brief.")
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    with pytest.raises(ValueError, match="plain text"):
        load_tasks(write_rows(tmp_path / "rows.jsonl", 1), "train", 0, None, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("source", "params", "sentence"),
    [
        ("arithmatic", {}, "did you mean arithmetic"),
        ("gymm:chain_sum", {}, "did you mean gym:<name>"),
        ("data/no.jsonl", {}, "no such file or folder"),
        ("arithmetic", {"digit": 3}, "task.params.digit is unknown for arithmetic; nearest is 'digits'"),
        ("gym:chain_sun", {}, "the nearest is gym:chain_sum"),
        ("gym:chain_sum", {"max_term": 3}, "nearest is 'max_terms'"),
        ("gym:chain_sum", {"min_terms": 9, "max_terms": 3}, "refused by gym:chain_sum"),
    ],
)
def test_what_is_written_wrongly_is_named(source: str, params: dict[str, Any], sentence: str) -> None:
    if source.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=sentence):
        load_tasks(source, "train", 0, 3, params)


def test_split_and_n_are_checked(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 3)
    for arguments, sentence in [
        ((source, "test", 0, 3), "task.split is 'test'"),
        ((source, "train", 0, 0), "n is 0"),
        (("arithmetic", "train", 0, None), "n is missing"),
        ((source, "train", 0, 3, {"promt_column": "q"}), "nearest is 'prompt_column'"),
        ((source, "train", 0, 3, {"holdout": 1.0}), "holdout is 1.0"),
        ((str(tmp_path), "train", 0, 3), "no dataset that can be read"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            load_tasks(*arguments)
