"""The net before a run: rewards are called on the rows' own answers. Its rules, and built-in functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostinato.env.rows import to_chat
from ostinato.reward.own_answers import (
    COMPARING,
    OTHERS,
    OwnVerdict,
    find_own_answer,
    make_warnings,
    spread_prompts,
)
from ostinato.reward.verify import BUILT_IN
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Prompt

MINE = """
def right(completions, answer, **columns):
    return [float(text == one) for text, one in zip(completions, answer)]

def tags(completions, **columns):
    return [float("<answer>" in text) for text in completions]

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

def of_numbers(completions, **columns):
    return [float(text.isdigit()) for text in completions]

def within(completions, answer, **columns):
    return [float(one in text) for text, one in zip(completions, answer)]

def not_seen(completions, prompts, **columns):
    raise RuntimeError("an answer that another could be")
"""
GSM8K = "She sold 48 / 2 = 24 in May.\nIn all 48 + 24 = <<48+24=72>>72.\n#### 72"
MATH = r"We have $x^2 = 9$, so $x = \pm 3$ and the sum is $\boxed{\frac{3}{2}}$."


def rows(*answers: Any, **columns: Any) -> list[Prompt]:
    return [
        Prompt(uid=str(n), text="What?", columns={"answer": one, **columns}, row=f"row {n} of f")
        for n, one in enumerate(answers, 1)
    ]


def tried(function: str, *answers: Any, **columns: Any) -> list[str]:
    """The warnings."""
    with WorkerGrader([function]) as grader:
        return make_warnings(
            grader.iterate_own_verdicts(spread_prompts(rows(*answers, **columns)), lambda text: [1])
        )


def given(*values: float | None) -> list[OwnVerdict]:
    return [OwnVerdict(row=f"row {n} of f", answer=str(n), value=one) for n, one in enumerate(values, 1)]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_every_built_in_function_compares_or_does_not() -> None:
    assert BUILT_IN.keys() == COMPARING | OTHERS and not COMPARING & OTHERS


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        *(("numeric", GSM8K), ("numeric", 72), ("numeric", "1,000"), ("exact", "Paris"), ("exact", "a\nb")),
        *(("answer_tags", "72"), ("env", "72"), ("none", "72")),
    ],
)
def test_own_answers_of_published_rows_pass(function: str, answer: Any) -> None:
    """GSM8K's solution is its own answer for ``numeric``. Functions that judge by something else than the
    row's answer are not asked: ``answer_tags`` gives 0 to any bare answer."""
    assert tried(function, answer, answer) == []


@pytest.mark.slow
@pytest.mark.parametrize("answer", [MATH, r"\frac{3}{2}", "2k+2", GSM8K])
def test_own_answers_of_math_pass(answer: str) -> None:
    pytest.importorskip("math_verify")
    assert tried("math_verify", answer) == []


@pytest.mark.slow
def test_a_gym_entry_is_its_own_answer() -> None:
    pytest.importorskip("reasoning_gym")
    from ostinato.env.gym import draw_prompts as questions

    prompts = questions("mini_sudoku", "train", 0, 2, {})
    with WorkerGrader(["gym_score"]) as grader:
        assert make_warnings(grader.iterate_own_verdicts(spread_prompts(prompts), lambda text: [])) == []


def test_whole_solutions_are_no_answers_for_exact() -> None:
    """No policy writes the solution of a row to the letter: ``exact`` on GSM8K was a reward of 0 for ever."""
    with pytest.raises(ValueError, match=r"exact gives 0 .* row 1 of f \(2 of 2 rows tried\)") as caught:
        tried("exact", GSM8K, GSM8K)
    assert "row 2 of f: 0 for '72'" in caught.value.__notes__[0]


def test_a_function_of_a_users_own_is_warned_of_and_never_refused(mine: str) -> None:
    assert tried(f"{mine}:right", "4", "5") == tried(f"{mine}:short", "4", "55") == []
    (all_of_them,) = tried(f"{mine}:tags", "4", "5")
    assert "row 1 of f (2 of 2 rows tried)" in all_of_them


def test_a_function_that_looks_for_text_in_messages_is_told_what_a_completion_is(mine: str) -> None:
    """``gold in completion`` of a list of messages is always False: a guide's own example learned nothing."""
    prompts = [to_chat(prompt) for prompt in rows("4", "5")]
    with WorkerGrader([f"{mine}:within"]) as grader:
        (warning,) = make_warnings(grader.iterate_own_verdicts(spread_prompts(prompts), lambda text: [1]))
    assert "A completion is a list of messages here" in warning.partition("\n")[0]
    assert tried(f"{mine}:within", "4", "5") == []


def test_of_a_users_function_the_rows_that_get_nothing_are_listed(mine: str) -> None:
    (one_of_them,) = tried(f"{mine}:of_numbers", "4", "five")
    first, line = one_of_them.splitlines()
    assert "gives 0 to the own answer of row 2 of f (1 of 2 rows tried)" in first and "'five'" in line
    assert tried(f"{mine}:not_seen", "4") == []  # which the dry run has warned of


@pytest.mark.parametrize(
    ("function", "values", "count"),
    [
        *(("numeric", [1, 1], 0), ("numeric", [1, 0.5], 1), ("numeric", [1, 0, None], 1), ("numeric", [], 0)),
        *(("m:f", [0, 0], 2), ("m:f", [-1, -1], 2), ("m:f", [-3, -8], 0), ("m:f", [0.2, 7], 0)),
        ("m:f", [2, -1], 1),
    ],
)
def test_what_is_less_than_it_should_be(function: str, values: list[float | None], count: int) -> None:
    """The full marks of a user's function are not known; a penalty of the length is no verdict."""
    found = make_warnings([(function, "f", given(*values))])
    assert sum(len(warning.splitlines()) - 1 for warning in found) == count


def test_an_answer_that_a_built_in_function_cannot_read_is_refused_by_its_row() -> None:
    odd = OwnVerdict(row="row 7 of f", answer="~", value=None, fault="raised", detail="ValueError: no")
    with pytest.raises(ValueError, match=r"row 7 of f: .*math_verify.*no"):
        make_warnings([("math_verify", "math_verify", [*given(1), odd])])


def test_rows_are_spread_and_those_without_an_answer_left_out() -> None:
    many = [*rows(*range(100)), Prompt(uid="x", text="Sing.")]
    assert [one.columns["answer"] for one in spread_prompts(many, 4)] == [0, 33, 66, 99]
    assert [one.uid for one in spread_prompts(many[:3])] == ["1", "2", "3"] and spread_prompts(
        many[-1:]
    ) == []
    assert find_own_answer(many[-1]) is None and find_own_answer(rows(["a"])[0]) is None


def test_rows_without_answers_fail_the_rewards_that_require_one_alone() -> None:
    """Such rows were refused whatever the rewards are."""
    row = Prompt(uid="x", text="Sing.")
    with WorkerGrader(["answer_tags"]) as grader:
        assert (
            grader.check(row)
            == []
            == list(grader.iterate_own_verdicts(spread_prompts([row]), lambda text: []))
        )
    with WorkerGrader(["exact"]) as grader, pytest.raises(ValueError, match=r"task\.params\.answer_column"):
        grader.check(row)
