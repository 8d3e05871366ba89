"""Problems for the planner's tests."""

from __future__ import annotations

from typing import Any

from ostinato.apps.plan.cluster import parse_cluster
from ostinato.apps.plan.problem import Arrangement, Problem, Setup, Work, find_model
from ostinato.apps.plan.request import lognormal_lengths
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import DType, Precision

LORA = AdapterSpec(rank=16)
KIMI_LORA = AdapterSpec(rank=32, alpha=64.0)
KIMI_LAYOUTS = {  # and published GB of weights at the fullest stage
    **{"t8p8e8": 34.4, "d2t8p4e16": 34.7, "d2t4p8e8": 35.0, "d8t2p4e16": 37.3},
    **{"d8p8e8": 38.5, "d4t8p2e32": 34.2, "d8t8e64": 35.0, "d64e64": 54.6},
}


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
    return Arrangement(train=setup(train), rollout=setup(rollout), **more)


def kimi(
    adapter: AdapterSpec | None = KIMI_LORA, base: DType = DType.BF16, sampler: DType | None = None
) -> Problem:
    """The question of lab/studies/2026-11-22-kimi-k2/page.md."""
    return Problem(
        model=find_model("kimi-k2"),
        adapter=adapter,
        precision=Precision(base=base, sampler=sampler or base),
        work=Work(answers=lognormal_lengths(4096, 16384)),
        cluster=parse_cluster("64xH800-80"),
    )
