"""Reward functions: what they read as an answer, and how names become functions."""

from __future__ import annotations

import json
import math
import signal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.reward.answers import extract_final_answer, extract_marked_answer, read_last_number
from ostinato.reward.verify import (
    _limit_time,
    _OutOfTime,
    answer_tags,
    exact,
    gym_score,
    json_schema,
    length,
    math_verify,
    numeric,
    regex,
    resolve_function,
)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("so <answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer>.", "2"),
        (r"thus \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        ("it costs 3*24=72\n#### 72\n", "72"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        (r"\boxed{never closed", ""),
        ("<answer>never closed", None),
        ("42", None),
    ],
)
def test_marked_answer(text: str, marked: str | None) -> None:
    assert extract_marked_answer(text) == marked


def test_final_answer_is_the_last_line_and_never_a_thought() -> None:
    assert extract_final_answer("First.\nThen 42\n\n") == "Then 42"
    assert extract_final_answer("<think>is it 7?</think>\n42") == "42"
    assert extract_final_answer("it is 7</think>42") == "42"  # the template had opened the thought
    assert extract_final_answer("<think>so it must be 42") == ""  # truncated while thinking


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("The answer is -3.", [Fraction(-3)]),
        ("1,234,567.5 euros", [Fraction("1234567.5")]),
        ("4, 5", [Fraction(5)]),
        ("10 - 3 = 7", [Fraction(7)]),
        ("3 1/2", [Fraction(7, 2)]),
        (r"2\frac{1}{2}", [Fraction(5, 2)]),
        (r"3\ 1/2", [Fraction(7, 2)]),  # the space was left out: 31/2
        (r"3\,\frac{1}{2}", [Fraction(7, 2)]),
        *((thousands, [Fraction(10080)]) for thousands in (r"10\,080", r"10,\!080", r"10{,}080", "10,080")),
        ("it runs 42km", [Fraction(42)]),
        (r"90^\circ", [Fraction(90)]),
        ("<<9*2=18>>18 eggs", [Fraction(18)]),
        *(
            (part, [])
            for part in (
                *("10^2", "10^{-3}", "7^n", "0x1", "x_2", "12:30", "2024-05-17", "1/2/3", "3-4", "2k + 2"),
                *(r"3\pi", r"\sqrt{2}", r"3\sqrt{13}", r"\frac{\pi}{6}", "(2, 3)", "x > 4", "5x", "10 - 4"),
            )
        ),
        ("x=-4", [Fraction(-4)]),
        ("-$20", [Fraction(-20)]),
        ("\N{MINUS SIGN}7", [Fraction(-7)]),
        (".5", [Fraction(1, 2)]),
        ("2e-3", [Fraction(1, 500)]),
        ("3/4", [Fraction(3, 4)]),
        (r"-\dfrac{3}{4}", [Fraction(-3, 4)]),
        ("50%", [Fraction(50), Fraction(1, 2)]),
        (r"50\%", [Fraction(50), Fraction(1, 2)]),
        ("1/0", []),
        ("5\N{SUPERSCRIPT TWO}", []),
        ("3/5\N{SUPERSCRIPT TWO}", []),
        ("1\N{VULGAR FRACTION ONE HALF}", []),
        ("10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE}", []),
        ("\N{ARABIC-INDIC DIGIT FIVE}", []),
        ("1\N{ARABIC-INDIC DIGIT FIVE}", []),
        ("\N{ARABIC-INDIC DIGIT FIVE}1", []),
        ("\N{FULLWIDTH DIGIT FIVE}", []),
        ("\N{CIRCLED DIGIT FIVE}", []),
        ("5\N{SUPERSCRIPT TWO} = 25", [Fraction(25)]),
        ("25 cm\N{SUPERSCRIPT TWO}", [Fraction(25)]),
        ("5\N{DEGREE SIGN}", [Fraction(5)]),
        ("x\N{SUBSCRIPT ONE} = 7", [Fraction(7)]),
        ("none at all", []),
        ("9" * 5000, []),
    ],
)
def test_last_number(text: str, readings: list[Fraction]) -> None:
    assert list(read_last_number(text)) == readings


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "so x = {}.", "#### {}", "${}$"]))
@settings(max_examples=50, deadline=None)
def test_an_integer_is_read_as_it_was_written(value: int, form: str) -> None:
    assert read_last_number(form.format(value))[0] == value


@given(st.text("abcdxyzAE .:", max_size=60), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_number_on_a_line_of_its_own_is_read(words: str, value: int) -> None:
    """The letter before the line break was taken for one before the number, which then was no answer."""
    assert list(read_last_number(f"{words}\n{value}")) == [value]


@given(st.text(alphabet="0123456789-+.,/%$eE\\{}frac <>answer#boxed()\n", max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_is_judged(text: str) -> None:
    for reward in (exact, numeric, answer_tags):
        assert reward([text], answer=["1"])[0] in (0.0, 1.0)


def test_a_long_text_is_judged_in_linear_time() -> None:
    """Lazy patterns such as <answer>(.*?)</answer> take quadratic time on openings that are never closed."""
    texts = ["<answer>" * 50_000, "\\boxed{" * 50_000, "1," * 100_000, "1" * 200_000, "- $" * 50_000]
    assert numeric(texts, answer=["1"] * len(texts)) == [0, 0, 1, 0, 0]  # or the test's limit ends it
    marked = [f"<answer>{part * 50_000}</answer>" for part in ("\\text{", "x ", "**a", "_", "a/", "(", "= ")]
    assert numeric(marked, answer=["1"] * len(marked)) == [0] * len(marked)


def test_exact() -> None:
    texts = ["42", "It is\n42", "<answer>42</answer> because", "42.0", "the answer is 42"]
    assert exact(texts, answer=[42] * 5) == [1, 1, 1, 0, 0]
    assert exact(["a\nb", "None"], answer=["a\nb", None]) == [1, None]


def test_numeric() -> None:
    texts = ["so 42", "42.0", "\\boxed{41} not 42", "<answer>42</answer> after 7 tries", "<think>42"]
    assert numeric(texts, answer=["#### 42"] * 5) == [1, 1, 0, 1, 0]
    assert numeric(["0.3333333", "0.333", "1/3"], answer=["1/3"] * 3) == [1, 0, 1]
    assert numeric(["0.5", "50", "50%"], answer=["50%"] * 3) == [1, 1, 1]


def test_what_ends_inside_a_thought_says_nothing() -> None:
    text, inside = "so <answer>4</answer>", [True, False]
    for reward in (
        (exact, numeric, math_verify, answer_tags) if find_spec("math_verify") else (exact, numeric)
    ):
        assert reward([text, text], answer=["4", "4"], in_thought=inside) == [0, 1]


def test_numeric_reads_no_other_numerals() -> None:
    """A square was its own root, one and a half was one, and digits of other scripts were numbers."""
    for text in ("5\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT FIVE}", "5\N{VULGAR FRACTION ONE HALF}"):
        assert numeric([text], answer=["5"]) == [0]
        with pytest.raises(ValueError, match="not one number"):
            numeric(["5"], answer=[text])


def test_numeric_tells_large_integers_apart() -> None:
    """Compared as floats, a product of 20 digits was right when only its first 16 were."""
    product = 12345678901234567890
    assert numeric([str(product), str(product + 1)], answer=[str(product)] * 2) == [1, 0]


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "blue",
            "10^6",
            "2^{10}",
            r"\sqrt{2}",
            r"3\pi",
            "(2, 3)",
            "[1, 5]",
            "x > 4",
            "1/2/3",
            "12:30",
            "0x1F",
        ),
        *(
            "2024-05-17",
            "5 apples and 3 pears",
            "42 apples",
            r"\frac{\pi}{6}",
            "2k+2",
            r"so \boxed{10^6}",
            "1,2",
        ),
    ],
)
def test_numeric_refuses_an_answer_that_is_not_one_number(answer: str) -> None:
    """The last number of it was compared: for 10^6 a completion of 6 was right, and 1000000 was wrong."""
    with pytest.raises(ValueError, match="not one number"):
        numeric(["1"], answer=[answer])


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("3 1/2", r"\boxed{3\frac{1}{2}}", "x = 1/2"),
        ("1,234", "#### $1234.", r"\boxed{1234x}"),
        (r"so \boxed{\$18.50}", "<answer>18.5</answer>", r"\boxed{x + 18.5}"),
        ("1e3", r"\(1{,}000\)", r"\boxed{10^3}"),
        ("1/2", "50%", r"\boxed{3 1/2}"),
        ("2", "= 2", r"\boxed{\sqrt{2}}"),
        ("-5", "\N{MINUS SIGN}5", "10^-5"),
        ("5", r"it is $5 \text{ cm}$", r"it is $5 \text{ million}$"),
    ],
)
def test_numeric_reads_a_marked_answer_as_a_whole(answer: str, right: str, wrong: str) -> None:
    assert numeric([right, wrong], answer=[answer] * 2) == [1, 0]


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"\boxed{42}",
            "x = 42",
            "x_1 = 42",
            "**42**",
            "The answer is 42.",
            "The answer is **42**.",
            "`42`",
        ),
        *("42 km", "42 km/h", "42 dollars", "$42 per day", "$42/h", "US$42", "42\N{DEGREE SIGN}C", "(42)"),
        *(r"42\text{ apples}", r"42\text{ m}^2", r"\text{42}", r"\mathbf{42}", r"42^\circ", r"42\ \text{cm}"),
        *(
            "Answer: 42",
            "**Answer:** 42",
            "= 42",
            r"$\theta = 42^{\circ}$",
            r"\(x = 42\)",
            r"\boxed{x = 42}.",
        ),
    ],
)
def test_a_marked_number_may_have_a_name_a_unit_and_emphasis(text: str) -> None:
    """A right answer was worth nothing inside its mark, and one without a mark, once there was more than
    digits in it. A row's own answer has to be the number alone."""
    texts = [f"so <answer>{text}</answer>", rf"so \boxed{{{text}}}", f"so\n#### {text}\n"]
    assert numeric(texts, answer=["42"] * 3) == [1, 1, 1]
    assert numeric(texts, answer=["7"] * 3) == [0, 0, 0]


@pytest.mark.parametrize(
    "text",
    [
        *("42x", "42i", "42 xy", "42*x*y", "42/x", "42 million", "42 thousand dollars", r"42\text{ million}"),
        *(
            "41 or 42",
            "x = 41 or x = 42",
            "5 + 42",
            r"5 + \boxed{42}",
            "42 + 1",
            "(41, 42)",
            "10**42",
            "not 42",
        ),
        *(r"42\pi", r"42\sqrt{2}", r"10^{42}", "42^2", r"\pm 42", "x > 42", "-42", "42 and a half"),
    ],
)
def test_a_marked_text_that_says_more_than_a_number_is_none(text: str) -> None:
    assert numeric([f"<answer>{text}</answer>"], answer=["42"]) == [0]


def test_a_box_that_is_never_closed_is_no_answer() -> None:
    """The text ended inside of it: what the whole answer would have been, nobody knows."""
    assert numeric([r"so \boxed{42", r"\boxed{42} or \boxed{42"], answer=["42"] * 2) == [0, 0]


@pytest.mark.parametrize(
    "text",
    [
        *("US$42", "R$42", "USD42", "It costs USD 42.", "__42__", "_42_", "**42**", "$42/h", "42/day", "42V"),
        *("Step 1 - 42", "Answer (a) - 42", "Total (USD) \N{EN DASH} 42", "42 i.e. all", "It is 42!"),
        *(
            "It is 42 - I think",
            "<b>42</b>",
            "x => 42",
            "42 millionaires",
            "42 pies",
            "1. 42",
            "*42* I think",
        ),
    ],
)
def test_a_number_in_a_sentence_is_read(text: str) -> None:
    """A currency's letters, emphasis, a list's dash and units were taken for parts of an expression."""
    assert list(read_last_number(text)) == [42]


@pytest.mark.parametrize(
    "text",
    [
        *("sqrt(42)", "\N{SQUARE ROOT}(42)", "10^(42)", "10 ^ 42", "10**42", "e^(42)", "log 42", r"\sqrt 42"),
        *("42 - x", "42pi", "42 * pi", "42 million", "42 thousand", "\N{PLUS-MINUS SIGN}42", "x<42", "pi/42"),
        *("1 : 42", "x_42", "42_8", "(x+1) - 42"),
    ],
)
def test_a_part_of_an_expression_is_no_number(text: str) -> None:
    """The last number of a formula in plain characters was paid as if it stood alone."""
    assert list(read_last_number(text)) == []


def test_chat_completions_count_by_their_last_message() -> None:
    chat = [{"role": "assistant", "content": "41"}, {"role": "assistant", "content": "42"}]
    assert exact([chat], answer=["42"]) == [1]


def test_answer_tags() -> None:
    texts = [
        "because.\n<answer>4</answer>\n",
        "<answer>4</answer> ok",
        "<answer>1</answer><answer>2</answer>",
    ]
    assert answer_tags(texts) == [1, 0, 0]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a second is soon over."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr("ostinato.reward.verify.MEMBER_LIMIT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_math_verify() -> None:
    texts = [r"$\frac{1}{2}$", r"\boxed{0.5}", "<answer>1/2</answer>", r"\boxed{\frac{2}{3}}", "no idea"]
    assert math_verify(texts, answer=[r"\frac{1}{2}"] * 5) == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("answer", "last"),
    [
        ("2k+2", "2"),
        (r"5\pi", "5"),
        (r"(-\infty, 4]", "4"),
        (r"4\sqrt{11}", "11"),
        ("1,-2", "2"),
        (r"\begin{pmatrix} 1 \\ 7 \end{pmatrix}", "7"),
        (r"\left( 3, \frac{\pi}{2} \right)", "2"),
        ("y = 2x + 3", "3"),
    ],
)
@pytest.mark.usefixtures("patient")
def test_math_verify_reads_a_bare_answer_as_latex(answer: str, last: str) -> None:
    """Without dollars, as MATH has its answers, the last plain number of it was what counted: for 2k+2 the
    answer itself was wrong and 2 was right. A bare answer in tags likewise."""
    texts = [
        rf"\boxed{{{answer}}}",
        f"<answer>{answer}</answer>",
        f"so ${answer}$",
        rf"\boxed{{{last}}}",
        last,
    ]
    for target in (answer, f"${answer}$", rf"Hence \boxed{{{answer}}}."):
        assert math_verify(texts, answer=[target] * len(texts)) == [1, 1, 1, 0, 0]


@pytest.mark.usefixtures("patient")
def test_math_verify_takes_a_million_for_no_unit() -> None:
    """The library drops the words of a unit: 5 million was 5, a dozen 1."""
    texts = [r"\boxed{5 \text{ million}}", r"it is $5 \text{ hundred}$", r"\boxed{5 \text{ cm}}"]
    assert math_verify(texts, answer=["5"] * 3) == [0, 0, 1]
    texts = [r"\boxed{2.5}", r"\boxed{2.5 \text{ million}}", r"\boxed{2.5 \text{ Million}}"]
    assert math_verify(texts, answer=[r"2.5 \text{ million}"] * 3) == [0, 1, 1]


@pytest.mark.parametrize("answer", ["0x1F", "1_000", "2024-05-17"])
def test_math_verify_refuses_what_it_would_read_as_another_number(answer: str) -> None:
    r"""``\boxed{0}``, 1 and 2002 were right."""
    with pytest.raises(ValueError, match="cannot be parsed"):
        math_verify(["1"], answer=[answer])


@pytest.mark.usefixtures("patient")
def test_math_verify_reads_a_number_of_another_base() -> None:
    r"""The library drops the base: ``\boxed{52}`` was right."""
    texts = [
        r"\boxed{52_8}",
        r"so $52_{8}$",
        r"\boxed{52}",
        r"\boxed{52_9}",
    ]
    assert math_verify(texts, answer=["52_8"] * 4) == [1, 1, 0, 0]


@pytest.mark.usefixtures("patient")
def test_math_verify_takes_a_bare_completion_for_no_part_of_itself() -> None:
    texts = [
        r"It is 2k+2",
        r"3\pi",
        "it is 2",
        r"$\boxed{2}$ and $\boxed{-1}$",
        r"\boxed{\text{none}}, as $x=2$",
    ]
    assert math_verify(texts, answer=["2"] * 5) == [0, 0, 1, 0, 0]
    assert math_verify(texts[3:4], answer=["2,-1"]) == [1]
    with pytest.raises(ValueError, match="cannot be parsed"):
        math_verify(["1"], answer=["\N{VULGAR FRACTION ONE HALF}"])


@pytest.mark.usefixtures("patient")
def test_math_verify_reads_through_emphasis_and_a_full_stop() -> None:
    texts = ["<answer>2k + 2.</answer>", "#### **2k+2**", r"\boxed{2k+2", "#### **2**"]
    assert math_verify(texts, answer=["2k+2"] * 4) == [1, 1, 0, 0]
    texts = ["#### **42**", "<answer>The answer is 42.</answer>", r"so \boxed{42"]
    assert math_verify(texts, answer=["42"] * 3) == [1, 1, 0]


# The alarm may ring in a weak reference's callback of sympy's caches, which swallows it, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_math_verify_gives_no_verdict_on_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library turns its own time-outs into "not equal", which scores a hang 0. Ours is NaN."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr("ostinato.reward.verify.MEMBER_LIMIT_S", 0.1)
    tower, right = math_verify([r"$\sum_{i=1}^{10^{9}} \sin(i)$", "$42$"], answer=["42"] * 2)
    assert math.isnan(tower)
    assert right == 1


def test_the_time_limit_rings_again_when_a_destructor_swallows_it() -> None:
    """Python ignores an exception raised in a destructor. A hang that began with the alarm ringing in one of
    sympy's caches had no limit any more but that of the whole group."""
    swallowed = 0
    with pytest.raises(_OutOfTime), _limit_time(0.05):
        try:
            while True:
                pass
        except _OutOfTime:
            swallowed += 1
        while True:
            pass
    assert swallowed == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_gym_score_uses_the_rules_of_the_task() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", seed=7, size=1)[0]
    answer = entry["answer"]
    texts = [answer, f"<answer>{answer}</answer>", f"The sum is {answer}.", "<answer>no</answer>", "no"]
    task = {"name": "chain_sum", "config": {}}
    assert gym_score(texts, gym=[task] * 5, entry=[entry] * 5) == [1, 1, 1, 0, 0]


def test_gym_score_takes_an_answer_of_several_lines() -> None:
    """Tasks such as sudoku want the whole grid and nothing else; its last line alone was scored, always 0."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("mini_sudoku", seed=7, size=1)[0]
    grid = entry["answer"]
    texts = [grid, f"\n{grid}\n", f"It is:\n```\n{grid}\n```", grid.replace("\n", "\r\n")]
    texts += [grid.rpartition("\n")[2]]
    task = {"name": "mini_sudoku", "config": {}}
    assert gym_score(texts, gym=[task] * 5, entry=[entry] * 5) == [1, 1, 1, 1, 0]


def test_gym_score_takes_an_answer_of_one_line_in_a_fence() -> None:
    """The fence that closes was the last line."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("letter_jumble", seed=7, size=1)[0]
    task = {"name": "letter_jumble", "config": {}}
    assert gym_score([f"Answer:\n```\n{entry['answer']}\n```"], gym=[task], entry=[entry]) == [1]


def test_gym_score_on_a_text_that_the_scorer_cannot_take() -> None:
    """prime_factorization raises ValueError on words: wrong. boxnet breaks on a bare number: no verdict."""
    reasoning_gym = pytest.importorskip("reasoning_gym")

    def score(name: str, text: str) -> float:
        entry = reasoning_gym.create_dataset(name, seed=7, size=1)[0]
        return gym_score([text], gym=[{"name": name, "config": {}}], entry=[entry])[0]

    assert score("prime_factorization", "no idea") == 0
    assert math.isnan(score("boxnet", "42"))


def test_resolve_by_name_module_and_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    assert resolve_function("exact") is exact
    assert resolve_function("ostinato.reward.verify:numeric") is numeric
    assert resolve_function(f"{tmp_path}/mine.py:reward")(["a"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("exakt", "nearest built-in is 'exact'"),
        ("nowhere.py:reward", "there is no file nowhere.py"),
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("ostinato.reward.nothing:reward", "there is no module 'ostinato.reward.nothing'"),
        ("ostinato.reward.verify:nothing", "has no function 'nothing'"),
    ],
)
def test_resolve_refuses_with_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resolve_function(spec)


def test_a_function_in_verls_form_is_adapted(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth and extra_info['index'] == 3)}\n"
    )
    reward = resolve_function(f"{tmp_path}/theirs.py:compute_score")
    chat = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    assert reward(
        completions=chat, answer=["4"] * 2, data_source=["x"] * 2, extra_info=[{"index": 3}] * 2
    ) == [1, 0]


def test_a_pattern_is_searched_in_what_is_said_after_thinking() -> None:
    texts = ["<think>7</think>\nIt is 7.", "<think>7</think> none", "<think>7", "7"]
    inside = [False, False, True, True]
    assert regex(texts, pattern=["7"] * 4, in_thought=inside) == [1, 0, 0, 0]
    assert regex(texts, pattern=[".*"] * 4, in_thought=inside) == [1, 1, 0, 0], (
        "an unfinished thought says nothing"
    )


@pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs jsonschema")
def test_json_has_the_schema_of_its_row() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    texts = ['{"n": 1}', 'so:\n```json\n{"n": 2}\n```', '{"n": "1"}', "{", "[" * 9999, '<think>{"n": 1}', ""]
    assert json_schema(texts, schema=[schema] * 7) == [1, 1, 0, 0, 0, 0, 0]
    assert json_schema(texts[:1], schema=[json.dumps(schema)]) == [1]
    sizes = [
        "1e308",
        "NaN",
        "Infinity",
        "1e400",
        "0.5",
    ]  # none may raise; only JSON is paid
    assert json_schema(sizes, schema=[{"type": "number", "multipleOf": 0.01}] * 5)[1:] == [0, 0, 0, 1]
    with pytest.raises(Exception, match="nresolvable"):  # a fault, never fetched and never a 0
        json_schema(['{"n": 1}'], schema=[{"$ref": "https://example.org/a.json"}])


@given(st.integers(1, 50), st.integers(0, 150))
def test_length_is_full_up_to_its_mark_and_nothing_at_twice(most: int, tokens: int) -> None:
    (value,) = length(["a"], length=[most], completion_ids=[[0] * tokens])
    expected = 1.0 if tokens <= most else 0.0 if tokens >= 2 * most else 1 - (tokens - most) / most
    assert value == pytest.approx(expected)
