"""Python objects get names that another process can load; rows become files that a resumed run finds."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.env.rows import make_prompt
from ostinato.objects import load_named, name_object, write_rows
from ostinato.reward.verify import exact, resolve_function


def test_a_function_of_a_module_keeps_its_name(tmp_path: Path) -> None:
    assert name_object(make_prompt, tmp_path, "reward") == "ostinato.env.rows:make_prompt"
    assert resolve_function(name_object(exact, tmp_path, "reward")) is exact
    assert name_object("file.py:f", tmp_path, "reward") == "file.py:f" and not list(tmp_path.iterdir())


def test_a_closure_is_loaded_by_another_process(tmp_path: Path) -> None:
    """As a reward of a notebook: what it refers to goes with it."""
    bonus = 0.25

    def score(completions: list[str], **columns: Any) -> list[float]:
        return [len(text) + bonus for text in completions]

    spec = name_object(score, tmp_path / "objects", "reward")
    assert spec == name_object(score, tmp_path / "objects", "reward"), "the same object has the same name"
    resolve = f"from ostinato.reward.verify import resolve_function; score = resolve_function({spec!r})"
    program = f"{resolve}; print(score(completions=['abc']))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[3.25]\n"
    assert load_named(spec, "tool", "")(completions=["a"]) == [1.25]


def test_a_lambda_is_named_by_its_argument(tmp_path: Path) -> None:
    assert name_object(lambda completions: [1.0], tmp_path, "reward").endswith(".pkl:reward")


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="reward is 3"):
        name_object(3, tmp_path, "reward")
    with pytest.raises(ValueError, match="cannot be handed to another process"):
        name_object(lambda completions: [lock], tmp_path, "reward")
    with pytest.raises(ValueError, match="no file"):
        resolve_function(f"{tmp_path}/gone.pkl:score")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=4))
def test_rows_are_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = write_rows(rows, tmp_path_factory.mktemp("rows"), "data")
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "data has no rows"),
        (["text"], "row 1 of data is a str"),
        ([{"a": 1}, {"a": 1, "b": {2}}], "row 2 of data has in column 'b'"),
        ([{"a": float("nan")}], "row 1 of data has in column 'a'"),
    ],
)
def test_rows_that_no_file_can_hold_are_named(tmp_path: Path, rows: list[Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        write_rows(rows, tmp_path, "data")
