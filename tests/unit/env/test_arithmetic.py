"""The arithmetic family: right answers, one split per problem, the same stream for the same address."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.env.arithmetic import PHRASINGS, Family, rows, split_of
from ostinato.types import Prompt

SEEDS = st.integers(0, 10**6)
SPLITS = st.sampled_from(["train", "eval"])


def obvious(expression: str) -> int:
    """Python's own arithmetic on the expression: the slow twin of every drawer."""
    assert re.fullmatch(r"\d+( ([-+*]|mod) \d+)+", expression)
    return eval(expression.replace("mod", "%"))


def columns(prompt: Prompt, name: str) -> str:
    return prompt.columns[name]


def fields(prompt: Prompt) -> tuple:
    return prompt.uid, prompt.messages, prompt.columns


@settings(max_examples=20, deadline=None)
@given(SPLITS, SEEDS, st.integers(2, 6), st.integers(3, 8))
def test_answers_are_right_and_natural(split: str, seed: int, digits: int, terms: int) -> None:
    for prompt in rows(split, seed, 40, digits=digits, terms=terms):
        answer = int(columns(prompt, "answer"))
        assert answer == obvious(columns(prompt, "expression")) >= 0


@settings(max_examples=20, deadline=None)
@given(SEEDS, SEEDS)
def test_no_evaluation_problem_is_trained_on(train_seed: int, eval_seed: int) -> None:
    trained = {" ".join(sorted(columns(p, "expression").split())) for p in rows("train", train_seed, 300)}
    held_out = {" ".join(sorted(columns(p, "expression").split())) for p in rows("eval", eval_seed, 300)}
    assert not trained & held_out


@settings(max_examples=20, deadline=None)
@given(SPLITS, SEEDS, st.integers(1, 60))
def test_same_address_same_stream_and_more_rows_only_continue_it(split: str, seed: int, n: int) -> None:
    short, long = rows(split, seed, n), rows(split, seed, 60)
    assert [fields(p) for p in short] == [fields(p) for p in long[:n]]


def test_families_are_drawn_evenly_and_sentences_hold_the_expression() -> None:
    prompts = rows("train", 0, 1000)
    for family in Family:
        assert 150 < sum(p.columns["family"] == family for p in prompts) < 250
    for prompt in prompts:
        assert prompt.messages is not None
        (message,) = prompt.messages
        assert message["role"] == "user"
        assert message["content"] in [phrasing.format(prompt.columns["expression"]) for phrasing in PHRASINGS]


@pytest.mark.parametrize("family", list(Family))
def test_parameters_bound_the_problems(family: Family) -> None:
    for prompt in rows("train", 0, 100, families=[family], digits=4, terms=4):
        assert prompt.columns["family"] == family
        numbers = re.findall(r"\d+", columns(prompt, "expression"))
        assert max(map(len, numbers)) <= 4
        assert len(numbers) == 2 if family is not Family.CHAIN else 3 <= len(numbers) <= 4


def test_a_commuted_sum_falls_on_the_same_side() -> None:
    """Hashing the expression as it is written put 347 + 586 into training and 586 + 347 into evaluation."""
    rng = random.Random(0)
    for _ in range(100):
        a, b = rng.randrange(1000), rng.randrange(1000)
        assert split_of(f"{a} + {b}") == split_of(f"{b} + {a}")


def test_an_eighth_of_the_problems_is_held_out() -> None:
    held_out = sum(split_of(f"{a} + {b}") == "eval" for a in range(100) for b in range(a, 100))
    assert 0.10 < held_out / 5050 < 0.15


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"n": 0}, "n is 0"),
        ({"families": ["sums"]}, "families has 'sums'"),
        ({"families": "sum"}, "families is 'sum'"),
        ({"families": []}, "families is []"),
        ({"digits": 1}, "digits is 1"),
        ({"terms": 2}, "terms is 2"),
        ({"families": ["product"], "digits": 2, "n": 5000}, "lower n or raise digits"),
    ],
)
def test_bad_parameters_are_named(arguments: dict, names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        rows(**{"split": "train", "seed": 0, "n": 4, **arguments})
