"""One card of 80 GB with one copy of the base: what fits, and that the check before work says the same."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ostinato.apps.plan.commands import app
from ostinato.apps.plan.problem import find_model
from ostinato.config import Recipe
from ostinato.launch.device_memory import estimate_terms

H100 = 85.5e9  # bytes that its driver shows
# model, rank, prompts, group, mean and longest answer
WORK = {
    "qwen3-8b": (32, 8, 16, 2048, 4096),
    "qwen3-30b-a3b": (16, 8, 16, 2048, 4096),  # attention and experts
    "qwen3-32b": (32, 1, 8, 4096, 7168),  # a context of 8,192; Unsloth has 6,144 with its vLLM
}


@pytest.mark.parametrize("model", WORK)
def test_it_fits_one_card_with_one_base(model: str) -> None:
    rank, prompts, group, mean, longest = WORK[model]
    sizes = {
        "lora-rank": rank,
        "prompts": prompts,
        "group": group,
        "answer-tokens": mean,
        "max-answer": longest,
    }
    options = [f"--{name}={value}" for name, value in sizes.items()]
    asked = [model, "--gpus", "1xH100-80", "--top", "1", *options, "--json", "-"]
    tree = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).stdout)
    plan = tree["plans"][0]
    assert (plan["base"], plan["lacks"]) == ("shared", []) and tree["gpu_bytes"] == H100
    assert max(sum(phase["terms"].values()) for phase in plan["memory"].values()) <= H100
    assert plan["microbatch"] >= 1024 + longest

    recipe = Recipe.parse(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "adapter": {"rank": rank},
            "rollout": {"prompts_per_step": prompts, "group_size": group, "max_tokens": longest},
            "trainer": {"tokens_per_microbatch": plan["microbatch"], "recompute": plan["recompute"]},
        }
    )
    before_work = estimate_terms(recipe, find_model(model).config)
    planned = plan["memory"]["train"]["terms"]
    assert before_work["base weights"] == planned["base weights"]
    for name, size in before_work.items():
        assert size == pytest.approx(planned[name], rel=0.02), name
