"""The benches of drafts and history, small: every part of them runs, and drafts change no token."""

from __future__ import annotations

import pytest

from lab import draft, never_slower
from lab.harness import measured

pytestmark = pytest.mark.lab

ASSET = "asset:seed-moe"


def quiet(line: str) -> None:
    pass


SMALL = (
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=12"),
    *("trainer.warmup_steps=0", "engine.kv_memory_mb=32", "model.dtype=float32"),
)


def test_every_arm_draws_the_tokens_of_plain_decoding() -> None:
    plan = draft.Draft(prompts=4, overrides=SMALL, batches=(8, 2), epochs=2, rounds=1)
    result = measured(plan, quiet)
    assert result["mismatches"] == 0 and result["compared"] == 8 * 4 * 2 * len(draft.Arm)
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2]
    by_name = {entry["name"]: entry for entry in result["baselines"]}
    assert by_name["oracle"]["total"]["acceptance"] == 1.0
    assert by_name["off"]["total"]["tokens_per_pass"] == 1.0
    draft.Draft.table(result)


def test_never_slower_measures_what_is_there_and_names_what_is_not() -> None:
    plan = never_slower.NeverSlower(
        models=(ASSET, "no-such-model"), batches=(1, 4), temperatures=(0.6,), new_tokens=6, cell_s=0.1
    )
    result = measured(plan, quiet)
    assert len(result["cells"]) == 4 and result["mismatches"] == 0
    assert result["worst"]["ratio"] == min(cell["ratio"] for cell in result["cells"])
    assert len(result["skipped"]) == 1 and "no-such-model was skipped" in result["skipped"][0]
    never_slower.NeverSlower.table(result)
