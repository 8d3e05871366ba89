"""The options of ``ostinato plan``, and the request that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import typer

from ostinato.apps.plan.cluster import parse_cluster
from ostinato.apps.plan.fit import factors_file, read_factors
from ostinato.apps.plan.problem import Base, Placement, Problem, Sampler, Work, find_model
from ostinato.apps.plan.search import Allowed
from ostinato.apps.plan.time import Roofline
from ostinato.inputs import parse_json
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.options import add_options
from ostinato.parallel.gpus import GB
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import DType, Precision

SPREAD = 0.8  # of ln length, for reasoning answers before they are cut off; measured lengths are better
NUMBER = 256


def lognormal_lengths(
    mean: float, most: int, *, spread: float = SPREAD, number: int = NUMBER
) -> tuple[int, ...]:
    """Return ``number`` equally likely quantiles of a lognormal, none above ``most``, whose mean is ``mean``
    within a token. Raises ValueError for a mean above the limit."""
    if not 1 <= mean <= most:
        raise ValueError(f"answer-tokens is {mean:g}; use 1 to max-answer ({most})")
    normal = NormalDist()
    shape = [math.exp(spread * normal.inv_cdf((index + 0.5) / number)) for index in range(number)]

    def scale_lengths(scale: float) -> list[float]:
        return [min(most, max(1.0, scale * value)) for value in shape]

    low, high = 1e-6, most / shape[0]
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sum(scale_lengths(middle)) < mean * number else (low, middle)
    return tuple(max(1, round(length)) for length in scale_lengths(high))


def read_lengths(path: Path) -> tuple[int, ...]:
    """Read measured lengths: a JSON list of positive whole numbers. Raises ValueError, in a sentence."""
    try:
        lengths = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"answers is {path}, which cannot be read ({error}); give a JSON list") from error
    if not isinstance(lengths, list) or not lengths or not all(isinstance(n, int) and n > 0 for n in lengths):
        raise ValueError(f"answers is {path}; it must hold a JSON list of lengths in tokens")
    return tuple(lengths)


BASES = {"shared": Base.SHARED, "two": Base.TWO, "swapped": Base.SWAPPED}
UNMEASURED = "data sheets, nothing measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options beside the model and the cluster. Every default is printed with the answer."""

    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 32
    expert_rank: Annotated[int, typer.Option(min=0, help="Of those on experts; 0: the same.")] = 0
    expert_scheme: Annotated[
        ExpertScheme, typer.Option(help="Do all experts share the factors at the hidden dimension?")
    ] = ExpertScheme.SHARED_OUTER
    lora_targets: Annotated[str, typer.Option(help="Roles or single maps.")] = "attn,mlp,shared,experts"
    full: Annotated[bool, typer.Option("--full", help="Train all parameters instead of adapters.")] = False
    base: Annotated[DType, typer.Option(help="The trainer's weights.")] = DType.BF16
    sampler: Annotated[
        DType | None, typer.Option(help="The sampler's weights; by default as the base.", show_default=False)
    ] = None
    prompts: Annotated[int, typer.Option(min=1, help="Of one RL step.")] = 64
    group: Annotated[int, typer.Option(min=1, help="Answers to each.")] = 8
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024
    answer_tokens: Annotated[float, typer.Option(help=f"Mean; lognormal, {SPREAD} of ln length.")] = 4096
    max_answer: Annotated[int, typer.Option(min=1, help="Tokens.")] = 16384
    answers: Annotated[
        Path | None, typer.Option(help="Measured lengths instead: a JSON list.", show_default=False)
    ] = None
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps of one RL step.")] = 1
    steps: Annotated[int, typer.Option(min=1, help="RL steps of the run, for its price.")] = 1000
    engine: Annotated[
        str, typer.Option(help="vllm, or local: ours, with one base in a process; auto: local on one GPU.")
    ] = "auto"
    placement: Annotated[str, typer.Option(help="Of the phases: colocated, apart or both.")] = "colocated"
    lag: Annotated[int, typer.Option(min=0, help="Steps that a sampler apart may be behind.")] = 0
    share: Annotated[str, typer.Option(help="The base, any of shared, two, swapped.")] = ",".join(BASES)
    train_layout: Annotated[str, typer.Option(help="Only this one, e.g. d64e64.", show_default=False)] = ""
    rollout_layout: Annotated[str, typer.Option(help="Only this one.", show_default=False)] = ""
    gpu_memory: Annotated[float, typer.Option(min=0, help="GB of a GPU; 0: by its data sheet.")] = 0.0
    price: Annotated[float, typer.Option(min=0, help="Money per GPU and hour; 0: a built-in guess.")] = 0.0
    host_memory: Annotated[float, typer.Option(min=0, help="GB of a node; 0: a built-in guess.")] = 0.0


plan_options = add_options(Options, "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A problem, and the bounds and the clock of the search."""

    problem: Problem
    allowed: Allowed
    clock: Roofline
    measured: str  # the source of efficiency factors


def ask(model: str, gpus: str, options: Options) -> PlanRequest:
    """Make the request. Raises ValueError, which names an option with a wrong value."""
    cluster, engine = parse_cluster(gpus), options.engine
    gpu = cluster.gpu
    gpu = replace(gpu, price=options.price or gpu.price, memory=options.gpu_memory * GB or gpu.memory)
    cluster = replace(cluster, gpu=gpu)
    if options.host_memory:
        cluster = replace(cluster, host_memory=options.host_memory * GB)
    if engine not in ("auto", "vllm", "local"):
        raise ValueError(f"--engine is {engine!r}; use vllm, local or auto")
    if engine == "auto":
        engine = "local" if cluster.num_gpus == 1 else "vllm"
    if options.placement not in (*Placement, "both"):
        raise ValueError(f"--placement is {options.placement!r}; use {', '.join(Placement)} or both")
    bases = options.share.split(",")
    for base in bases:
        if base not in BASES:
            raise ValueError(f"--share has {base!r}; use some of {', '.join(BASES)}")
    adapter = AdapterSpec(
        rank=options.lora_rank,
        alpha=2.0 * options.lora_rank,
        targets=tuple(options.lora_targets.split(",")),
        expert_scheme=options.expert_scheme,
        expert_rank=options.expert_rank or None,
    )
    problem = Problem(
        model=find_model(model),
        adapter=None if options.full else adapter,
        precision=Precision(base=options.base, sampler=options.sampler or options.base),
        work=_make_work(options),
        cluster=cluster,
        sampler=Sampler(name=engine, latent_kv=engine == "vllm"),
    )
    allowed = Allowed(
        placements=tuple(Placement) if options.placement == "both" else (Placement(options.placement),),
        bases=tuple(BASES[base] for base in bases),
        lag=options.lag,
        train_layout=Layout.parse(options.train_layout) if options.train_layout else None,
        rollout_layout=Layout.parse(options.rollout_layout) if options.rollout_layout else None,
    )
    factors = read_factors(factors_file(cluster.gpu.name))
    if factors is None:
        return PlanRequest(problem=problem, allowed=allowed, clock=Roofline(), measured=UNMEASURED)
    source = f"data sheets, phases by factors of {factors.runs} runs"
    return PlanRequest(
        problem=problem, allowed=allowed, clock=Roofline(factors=factors.phases), measured=source
    )


def _make_work(options: Options) -> Work:
    if options.answers is not None:
        lengths = read_lengths(options.answers)
    else:
        lengths = lognormal_lengths(options.answer_tokens, options.max_answer)
    return Work(
        prompts=options.prompts,
        group=options.group,
        prompt_tokens=options.prompt_tokens,
        answers=lengths,
        max_answer=max(options.max_answer, *lengths),
        updates=options.updates,
        steps=options.steps,
    )
