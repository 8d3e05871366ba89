"""The reward code_tests: rows in the forms of MBPP and HumanEval, and answers that try to get around them."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from commands import gone, wait_until
from nouns import completion

from ostinato.reward.code_tests import code_tests, extract_code, make_job, run_job
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Group, Prompt, Stop, Trajectory, Turn

DOUBLED = {"test_list": ["assert double(2) == 4", "assert double(-1) == -2"]}
HALVED = {
    "prompt": "import math\n\ndef whole(x):\n    return math.floor(x)\n\n"
    'def half(x):\n    """x / 2, down."""\n',
    "test": "def check(candidate):\n    assert candidate(9) == whole(4.5)\n    assert candidate(0) == 0\n",
    "entry_point": "half",
}


def verdicts(texts: Sequence[str], row: dict[str, Any]) -> list[float]:
    return code_tests(texts, timeout_s=100.0, **{name: [value] * len(texts) for name, value in row.items()})


def block(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


def test_an_answer_passes_all_tests_or_none() -> None:
    right, wrong, half_right = (f"def double(x):\n    return {how}" for how in ("2 * x", "x", "4"))
    texts = [
        right,
        f"Like this:\n{block(right)}\nIt doubles.",
        block(wrong),
        block(half_right),
        "no code",
        "",
    ]
    assert verdicts(texts, DOUBLED) == [1, 1, 0, 0, 0, 0]


def test_a_prompt_of_code_is_continued_or_given_again() -> None:
    body, whole = "    return whole(x / 2)\n", "def half(x):\n    return x // 2"
    texts = [
        body,
        block(whole),
        block("def half(x):\n    return whole(x / 2)"),
        block("half = abs"),
        block(body),
    ]
    assert verdicts(texts, HALVED) == [1, 1, 1, 0, 1]
    as_chat = HALVED | {"prompts": [{"role": "user", "content": "Halve it."}], "prompt": None}
    assert verdicts([block(whole)], as_chat | {"test": "def check(f):\n    assert f(9) == 4"}) == [1]


@pytest.mark.parametrize(
    ("text", "prompt", "code"),
    [
        ("    return 1\n", "", "    return 1\n"),
        (block("a") + "\nthen\n" + block("b"), "", "b\n"),
        (block("a") + "\nprints\n" + block("7", ""), "", "a\n"),
        (block("a", "") + "\nor\n" + block("b", "text"), "", "b\n"),
        ("```py\na\n", "", "a\n"),  # cut off, or a stop string
        ("a\n```\nDone.", "Fill in:\n```python\n", "a\n"),
        ("x = '```'\n", "", "x = '```'\n"),
    ],
)
def test_the_code_of_an_answer(text: str, prompt: str, code: str) -> None:
    assert extract_code(text, prompt) == code


RIGHT = "def double(x):\n    return 2 * x"
USAGE = block("while True:\n    print(double(int(input())))")
IN_DOCSTRING = 'def double(x):\n  """Of a number:\n  ```\n  double(1)\n  ```\n  """\n  return 2 * x'


@pytest.mark.parametrize(
    "text",
    [
        f"{block(RIGHT)}\nExample usage:\n{USAGE}",
        block("def double(x):\n    return x") + f"\nWrong. Better:\n{block(RIGHT)}\n{USAGE}",
        block("import math\ndef twice(x):\n    return 2 * x")
        + f"\nand\n{USAGE}\n"
        + block("def double(x):\n    return math.floor(twice(x))")
        + USAGE.replace("while", "import math\nwhile"),
        block("def double(x):\n    return twice(x)") + "\n" + block("def twice(x):\n    return 2 * x"),
        "1. Write:\n\n   ```python\n   def double(x):\n       return 2 * x\n   ```\n2. Done.",
        "- ```python\n  def double(x):\n      return 2 * x\n  ```",
        "```python\n    def double(x):\n        return 2 * x\n```",
        IN_DOCSTRING,
        f"Here:\n{block(IN_DOCSTRING)}\nThen:\n{USAGE}",
        f"````python\n{IN_DOCSTRING}\n````",
        f"~~~python\n{RIGHT}\n~~~\n{USAGE}",
        f"[PYTHON]\n{RIGHT}\n[/PYTHON]\n[PYTHON]input()[/PYTHON]",
        f"[BEGIN]\n{RIGHT}\n[DONE]\nIt doubles.",
        f"{RIGHT}\n[DONE]",
        f"{block(RIGHT)}\nprints\n{block('>>> double(2)')}\n{block('4 is it')}",
        f"{block(RIGHT, '')}\n{USAGE}",
    ],
)
def test_right_code_passes_in_the_forms_of_chats(text: str) -> None:
    """The last block alone was run: an example of usage behind the solution, helpers in a block of their own,
    a list, a fence in a docstring or other fences gave 0 to right code."""
    assert run_job(make_job(text, DOUBLED), 60.0) == 1
    assert run_job(make_job(text.replace("2 * x", "3 * x"), DOUBLED), 60.0) == 0


@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 20_000,
        "`" * 50_000,
        "a" + ".b" * 100_000,
        "(" * 50_000,
        "-" * 50_000 + "1",
        "\0",
        "\ud800",
        " " * 50_000,
    ],
)
def test_text_that_is_no_code_is_returned_as_it_is(text: str) -> None:
    """An answer is parsed in the reward worker: nothing that a model repeats may stop or delay that."""
    assert isinstance(extract_code(text, "", frozenset({"b"})), str)


@pytest.mark.parametrize(
    ("call", "tests"),
    [
        ("def swap(x):\n    x.reverse()", "x = [1, 2]\nswap(x)\nassert x == [2, 1]"),
        ("def each(f, x):\n    return f(x)", "assert each(lambda x: x, 1) == 1"),
        (
            "class P:\n    def __eq__(self, other):\n        return True\ndef p():\n    return P()",
            "assert p() == p()",
        ),
    ],
)
def test_tests_of_other_than_plain_data_give_0(call: str, tests: str) -> None:
    """The guide says so: arguments are copies, functions of the tests do not reach the answer's process, and
    an object of its classes equals itself alone."""
    assert run_job(make_job(call, {"test_list": [tests]}), 60.0) == 0


@pytest.mark.parametrize(
    ("code", "tests", "before"),
    [
        (
            "import collections as c\ndef pair(x):\n    return c.namedtuple('P', 'a b')(x, x)",
            ["pair(1) == (1, 1)"],
            {},
        ),
        (
            "from collections import Counter\ndef count(x):\n    return Counter(x)",
            ["count('aab') == {'a': 2, 'b': 1}"],
            {},
        ),
        ("def each(x):\n    yield from x", ["list(each([1, 2])) == [1, 2]"], {}),
        ("def is_a(x, kind):\n    return isinstance(x, kind)", ["is_a(1, int)", "not is_a('', int)"], {}),
        (
            "def root(x):\n    return x ** 0.5",
            ["math.isclose(root(2), 1.4142, rel_tol=1e-3)"],
            {"test_imports": ["import math"]},
        ),
        ("import sys\ndef size(x):\n    return sys.getsizeof(x)", ["size(5) == sys.getsizeof(5)"], {}),
        (
            "class Node:\n    def __init__(self, data):\n        self.data, self.left = data, None\n"
            "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)",
            ["depth(top) == 2", "top.left.data == 2"],
            {"test_setup_code": "top = Node(1)\ntop.left = Node(2)"},
        ),
        ("def sum(a, b):\n    return a + b + 1", ["sum(1, 2) == 4"], {}),
        ("def add(n):\n    return lambda x: x + n", ["add(2)(3) == 5"], {}),
    ],
)  # fmt: skip
def test_what_tests_may_do_with_an_answers_values(
    code: str, tests: list[str], before: dict[str, Any]
) -> None:
    row = {"test_list": [f"assert {one}" for one in tests], **before}
    assert run_job(make_job(code, row), 60.0) == 1


ALWAYS = "class E(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "def double(x):\n    import os\n    os._exit(0)",
        "def double(x):\n    raise SystemExit(0)",
        "print('\"started\"\\n\"passed\"', flush=True)\nraise SystemExit",
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'\"passed\"\\n')\n    except OSError: pass",
        ALWAYS + "def double(x):\n    return E()",
        ALWAYS.replace("(int)", "") + "def double(x):\n    return E()",
        ALWAYS.replace("(int)", "(list)") + "def double(x):\n    return [E()]",
        "import builtins\nbuiltins.AssertionError = Warning\ndef double(x):\n    return 0",
        "def double(x):\n    import sys, os\n    os.kill(os.getppid(), 9)",
        "def double(x):\n    return [0] * 10**10",
        "import sys\nsys.setrecursionlimit(10**9)\ndef double(x):\n    return double(x)",
    ],
)  # fmt: skip
def test_an_answer_that_is_wrong_has_no_way_to_pass(code: str) -> None:
    """An exit status of 0, the words that say "passed", objects equal to everything, other built-ins: none of
    them is in the process that runs the tests."""
    assert run_job(make_job(block(code), DOUBLED), 60.0) == 0


def test_what_the_tests_call_is_theirs() -> None:
    code = "class math:\n    isclose = lambda *some: True\nset = sorted = lambda some: 0\n"
    code += "def double(x):\n    return [x]"
    for test in ("math.isclose(double(1)[0], 2)", "set(double(1)) == set([2])", "sorted(double(1)) == [2]"):
        assert (
            run_job(make_job(code, {"test_list": [f"assert {test}"], "test_imports": "import math"}), 60.0)
            == 0
        )


def test_an_answer_has_a_limit_of_time_and_leaves_nothing_behind(tmp_path: Any) -> None:
    """What it starts ends with it, whatever session that is in."""
    sleeps = "def double(x):\n    import time\n    time.sleep(1000)"
    assert run_job(make_job(sleeps, DOUBLED), 1.0) == 0
    left = tmp_path / "left"
    code = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"open({str(left)!r}, 'w').write(str(child.pid))\n"
        "def double(x):\n    return 2 * x\n"
    )
    assert run_job(make_job(code, DOUBLED), 60.0) == 1
    assert wait_until(lambda: gone(int(left.read_text())), 60)


def test_rows_that_cannot_test_are_refused_and_what_cannot_start_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for row in ({}, {"test_list": []}, {"test": "def check(f): ..."}, {"test_list": ["assert ("]}):
        with pytest.raises(ValueError, match="test"):
            verdicts(["def double(x): ..."], row)
    monkeypatch.setattr("sys.executable", os.devnull)
    assert math.isnan(run_job(make_job("", DOUBLED), 60.0))


def test_in_a_worker_an_answer_reaches_neither_the_tests_nor_the_network() -> None:
    """What the tests and the worker hold in memory (this row, other answers, expected values) is not the
    answer's to read, nor is anything outside."""
    right = "def double(x):\n    return 2 * x"
    tries = [
        "    open(f'/proc/{os.getppid()}/mem', 'rb')",
        "    open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "    socket.create_connection(('127.0.0.1', 9), 1)",
    ]
    whole = "import os, socket\ntry:\n{}\nexcept Exception:\n    pass\nelse:\n    double = lambda x: 2 * x"
    texts = [right, *(whole.format(one) for one in tries)]
    turns = [Turn(context=np.zeros(1, np.int32), completion=completion(1, text=text)) for text in texts]
    played = [Trajectory(turns=(one,), stop=Stop.EOS, seed=(k,)) for k, one in enumerate(turns)]
    prompt = Prompt(uid="p", text="Double it.", columns=DOUBLED)
    with WorkerGrader(["code_tests"], timeout_s=100.0) as grader:
        assert not grader.check(prompt)
        rewards = asyncio.run(grader.grade(Group(prompt=prompt, trajectories=tuple(played), step=0)))
    assert [reward.value for reward in rewards] == [1, 0, 0, 0]
