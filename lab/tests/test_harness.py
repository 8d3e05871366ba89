"""Command lines that are made of benches."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lab.app import BENCHES, load, run
from lab.harness import Bench, Result, Say, main, option, parser, seeds
from lab.settings import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Small(Bench):
    """What is measured."""

    batches: tuple[int, ...] = option((1, 2), "Sizes, with commas.", "batch")
    seeds: tuple[int, ...] = option((0,), "How many, or FIRST:END.", parse=seeds)
    clock: Clock = option(Clock.WALL, "Which.")
    file: Path | None = option(None, "Some file.")
    deep: bool = option(False, "Whether.")
    no_option: float = 0.5

    def quick(self) -> Small:
        return replace(self, no_option=0.0)

    def measure(self, say: Say) -> dict[str, Any]:
        return {"nothing": float("nan"), "deep": self.deep}

    @staticmethod
    def table(result: Result) -> str:
        return f"deep: {result['deep']}"

    @staticmethod
    def passed(result: Result) -> bool:
        return result["deep"]


def test_fields_are_options_and_the_result_says_what_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.json"
    words = ["--batch", "8, 4", "--seeds", "3:5", "--clock", "cpu", "--file", "a/b", "--deep", "--quick"]
    assert main("small", Small, [*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    asked = {"batches": [8, 4], "seeds": [3, 4], "clock": "cpu", "file": "a/b", "deep": True}
    assert result["settings"] == asked | {"no_option": 0.0}
    assert result["nothing"] is None and "processor" in result["machine"]
    assert main("small", Small, []) == 1


@pytest.mark.parametrize("words", ["--batch x", "--clock sun", "--no-option 1", "--seeds a"])
def test_what_an_option_cannot_be_is_refused(words: str) -> None:
    with pytest.raises(SystemExit):
        main("small", Small, words.split())


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_a_command_line(name: str) -> None:
    assert "--quick" in parser(name, load(name)).format_help()


def test_an_unknown_bench_is_named() -> None:
    with pytest.raises(ValueError, match="there is no bench 'speed'; use one of rollouts"):
        run(["speed"])
