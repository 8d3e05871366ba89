"""JSON, TOML and text from outside: refused in words, and what is written never fails on a text."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cli.app import main
from ostinato.inputs import (
    MAX_DEPTH,
    escape_surrogates,
    has_surrogate,
    parse_json,
    parse_toml,
    replace_surrogates,
)

HALF = "\ud83d"
TEXTS = st.text(st.characters(codec=None, exclude_categories=()))  # halves of surrogate pairs too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 500, 100_000])
def test_nesting_is_refused_and_no_recursion_error(opening: str, closing: str, levels: int) -> None:
    """A row of 100000 brackets was a RecursionError, and one of 500 ended the run where it was written."""
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        parse_json(opening * levels + "1" + closing * levels)


def test_depth_is_not_size() -> None:
    wide = [[{"a": []}]] * 1000
    assert parse_json(json.dumps(wide)) == wide
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep) == json.loads(deep)


@given(JSON)
def test_json_is_read_as_json_does_or_refused_for_a_surrogate(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text, surrogates=True) == parse_json(text.encode(), surrogates=True) == json.loads(text)
    if has_surrogate(json.loads(text)):
        with pytest.raises(ValueError, match="surrogate"):
            parse_json(text)
    else:
        assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'"\xed\xa0\xbd"', b"[1] 2"])
def test_what_is_no_json_or_no_utf8_is_a_value_error(data: bytes) -> None:
    """Python's reader takes bytes of surrogates for UTF-8."""
    with pytest.raises(ValueError):
        parse_json(data)


def test_toml_that_is_nested_too_deeply_is_a_value_error() -> None:
    assert parse_toml("a = [[1]]") == {"a": [[1]]}
    with pytest.raises(ValueError, match="nested deeper"):
        parse_toml("a = " + "[" * 100_000)


@given(TEXTS)
def test_what_is_escaped_or_replaced_can_be_written(text: str) -> None:
    assert escape_surrogates(text).encode().decode() == escape_surrogates(text)
    assert len(replace_surrogates(text)) == len(text) and replace_surrogates(
        text
    ).encode().decode() == replace_surrogates(text)
    if not has_surrogate(text):
        assert escape_surrogates(text) == replace_surrogates(text) == text


@given(st.dictionaries(TEXTS, st.lists(TEXTS)))
def test_escapes_in_json_read_back_as_the_same_text(value: dict[str, list[str]]) -> None:
    written = escape_surrogates(json.dumps(value, ensure_ascii=False))
    assert json.loads(written.encode()) == json.loads(json.dumps(value))


def test_a_surrogate_is_found_wherever_it_is() -> None:
    for value in (HALF, [HALF], {"a": {HALF: 1}}, {"a": ({"b": [f"x{HALF}"]},)}):
        assert has_surrogate(value)
    assert not has_surrogate({"a": ["\U0001f600", 3, None], "b": b"\xff"})


def test_the_command_line_prints_what_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's arrow, or half of a surrogate pair, ended a run on a terminal in ASCII."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["--version"])
    print("\u2192 \ud83d", flush=True)
    assert shown.getvalue().endswith(b"\\u2192 \\ud83d\n")
