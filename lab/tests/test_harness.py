"""Command lines that are made of benches, contenders, and benches that are over at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lab.app import BENCHES, load, run
from lab.contender import Contender, ContenderFailed
from lab.harness import Bench, Result, Say, main, option, parser, seeds
from lab.settings import Clock
from lab.weights import WeightsBeside
from ostinato.model.native import Kernels
from ostinato.model.quantise import Weights


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
    requested = {"batches": [8, 4], "seeds": [3, 4], "clock": "cpu", "file": "a/b", "deep": True}
    assert result["settings"] == requested | {"no_option": 0.0}
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


# ---- a contender of a benchmark that goes wrong is named, and nothing of it stays behind


READY = "import sys, json; print(json.dumps({'ready': 'me'}), flush=True);"


def start(script: str, tmp_path: Path, limit_s: float = 20.0) -> Contender:
    return Contender("peer", [sys.executable, "-c", script], tmp_path / "log", limit_s=limit_s)


def test_it_answers(tmp_path: Path) -> None:
    with start(
        READY + "print(json.dumps({'n': json.loads(input())['n'] + 1}), flush=True)", tmp_path
    ) as peer:
        assert peer.label == "me" and peer.ask(n=3) == {"n": 4}


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("raise SystemExit('no such model')", "peer ended; .* no such model"),
        ("print('Loading weights')", "peer answered what is no JSON"),
    ],
)
def test_one_that_fails_is_named(script: str, output: str, tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match=output):
        start(script, tmp_path)


def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    """It runs in a session of its own: when its constructor failed it outlived the benchmark."""
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ContenderFailed, match="gave no answer"):
        start(script, tmp_path, limit_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# ---- the bench of quantised rollout weights


def test_the_benchmark_puts_them_side_by_side(kernels: Kernels) -> None:
    plan = WeightsBeside(
        model="asset:seed-moe",
        weights=(Weights.BF16, Weights.INT8),
        clock=Clock.CPU,
        batches=(1,),
        new_tokens=8,
        prompt=8,
        rounds=1,
    )
    result = plan.measure(lambda line: None)
    found = result["batches"][0]["weights"]
    assert found["bf16"]["speedup"] == 1 and found["int8"]["ms"] > 0
    assert result["bytes"]["int8"] < 0.6 * result["bytes"]["bf16"]
    assert plan.table(result).row_count == 1
