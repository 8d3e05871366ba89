"""``bench turns`` on our small model: nothing is run again, and routes are whole."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from lab import turns
from lab.harness import measured

pytestmark = pytest.mark.lab


def test_turns_of_a_tiny_plan() -> None:
    plan = turns.Turns(
        prompts=2,
        siblings=2,
        turns=3,
        answer_tokens=8,
        single_prompts=1,
        single_siblings=2,
        rounds=1,
        least_s=0.0,
    )
    result = measured(plan, lambda line: None)
    assert result["prefill"]["run_again"] == 0 and result["prefill"]["preempted"] == 0
    assert result["prefill"]["run"] <= result["prefill"]["new"]
    assert result["routes"]["complete"] == 1.0 and result["routes"]["overlap"] > 0.99
    assert set(result["latency"]) == {"turns", "single"} and result["latency"]["turns"]["rounds"] == 1
    json.dumps(result, allow_nan=False)
    console = Console(file=StringIO(), width=140)
    console.print(turns.Turns.table(result))
    assert isinstance(console.file, StringIO) and "run again" in console.file.getvalue()
