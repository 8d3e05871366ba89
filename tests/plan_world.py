"""Problems for the planner's tests."""

from __future__ import annotations

from typing import Any

from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.plan.cluster import parse_cluster
from ostinato.plan.named import find_model
from ostinato.plan.problem import Arrangement, Precision, Problem, Setup, Work

LORA = AdapterSpec(rank=16)


def problem(
    model: str = "qwen3-30b-a3b",
    gpus: str = "16xH100-80",
    adapter: AdapterSpec | None = LORA,
    work: Work | None = None,
    precision: Precision | None = None,
) -> Problem:
    return Problem(
        model=find_model(model),
        adapter=adapter,
        precision=precision or Precision(),
        work=work or Work(prompts=32, group=8, prompt_tokens=512, answers=(500, 1000, 2000, 4000)),
        cluster=parse_cluster(gpus),
    )


def setup(layout: str, microbatch: int = 16384, sequences: int = 32) -> Setup:
    return Setup(layout=Layout.parse(layout), microbatch=microbatch, sequences=sequences)


def arrangement(train: str, rollout: str, **more: Any) -> Arrangement:
    return Arrangement(train=setup(train), logprobs=setup(train), rollout=setup(rollout), **more)
