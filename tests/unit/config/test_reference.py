"""docs/recipe.md is what ``config.reference`` writes; the keys of ``[algo]`` are those of ``Algorithm``."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

from ostinato.algo.algorithms import Algorithm
from ostinato.config.reference import algorithm_keys, comments_of, reference

PAGE = Path(__file__).parents[3] / "docs" / "recipe.md"


def test_the_page_is_generated() -> None:
    mend = "run: python -m ostinato.config.reference > docs/recipe.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), mend


def test_keys_and_defaults_of_algo_are_those_of_the_class() -> None:
    read = {name: tomllib.loads(f"x = {default}")["x"] for name, _, default, _ in algorithm_keys()}
    real = {field.name: field.default for field in dataclasses.fields(Algorithm)}
    assert read == {name: value for name, value in real.items() if name not in ("name", "overridden")}


def test_a_comment_belongs_to_the_field_of_its_line() -> None:
    source = "class A:\n  x: int = 1  # first # part\n  y: str = (\n    'z'\n  )  # last line\n  z: int = 0\n"
    assert comments_of(source) == {"A": {"x": "first # part", "y": "last line", "z": ""}}
