"""The table of own answers, on made-up rows in the forms of the public sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lab.own_answers import main

pytestmark = pytest.mark.lab

SOLUTION = r"It is $\boxed{3\pi}.$The answer is: 3\pi"


def test_own_answers_and_last_numbers_are_counted_and_failures_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    code = {"text": "Double it.", "test_list": ["assert double(2) == 4"]}
    rows = {
        "gsm8k-test.jsonl": [{"question": "?", "answer": "2 + 2 = 4\n#### 4"}],
        "math500-test.jsonl": [{"question": "?", "answer": SOLUTION}],
        "mbpp.jsonl": [code | {"code": f"def double(x):\n    return {how}"} for how in ("2 * x", "x")],
    }
    for name, some in rows.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, some)) + "\n")
    test = "def check(f):\n    assert f(1) == 2"
    row = {"prompt": "def double(x):\n", "test": test, "entry_point": "double"}
    text = json.dumps(row | {"canonical_solution": "    return 2 * x\n"})
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert main(str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert output.count("1 of 1 (100.00%)") == 4 and "1 of 2 (50.00%)" in output and "0 of 1" in output
    assert "row 2: 0.0 for its own answer" in output
