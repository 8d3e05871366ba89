"""The options of ``ostinato plan``, and the question that they ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.options import options_of
from ostinato.parallel.layout import Layout
from ostinato.plan.cluster import parse_cluster
from ostinato.plan.fit import kept, kept_file
from ostinato.plan.lengths import SPREAD, lognormal_lengths, read_lengths
from ostinato.plan.named import find_model
from ostinato.plan.problem import (
    GB,
    Base,
    Cluster,
    DType,
    Placement,
    Precision,
    Problem,
    Sampler,
    Work,
)
from ostinato.plan.search import Allowed
from ostinato.plan.time import Roofline

BASES = {"shared": Base.SHARED, "two": Base.TWO, "swapped": Base.SWAPPED}
UNMEASURED = "data sheets, nothing measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked beside the model and the cluster; every default is printed with the answer."""

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
    engine: Annotated[str, typer.Option(help="vllm, or local: ours, which caches MLA expanded.")] = "vllm"
    placement: Annotated[str, typer.Option(help="Of the phases: colocated, apart or both.")] = "colocated"
    lag: Annotated[int, typer.Option(min=0, help="Steps that a sampler apart may be behind.")] = 0
    share: Annotated[str, typer.Option(help="The base, any of shared, two, swapped.")] = ",".join(BASES)
    train_layout: Annotated[str, typer.Option(help="Only this one, e.g. d64e64.", show_default=False)] = ""
    rollout_layout: Annotated[str, typer.Option(help="Only this one.", show_default=False)] = ""
    price: Annotated[float, typer.Option(min=0, help="Money per GPU and hour; 0: a built-in guess.")] = 0.0
    host_memory: Annotated[float, typer.Option(min=0, help="GB of a node; 0: a built-in guess.")] = 0.0


plan_options = options_of(Options, "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question and how it may be answered."""

    problem: Problem
    allowed: Allowed
    clock: Roofline
    measured: str  # where efficiency factors come from


def asked_json(model: str, gpus: str, options: Options) -> dict[str, Any]:
    """The question in words that ``asked_again`` reads: what differs from the defaults, files by their whole
    path."""
    given = {field.name: getattr(options, field.name) for field in fields(Options)}
    changed = {
        field.name: given[field.name] for field in fields(Options) if given[field.name] != field.default
    }
    words = {name: str(one.resolve()) if isinstance(one, Path) else one for name, one in changed.items()}
    folder = str(Path(model).resolve()) if Path(model).exists() else model
    return {"model": folder, "gpus": gpus, "options": words}


def asked_again(said: Mapping[str, Any]) -> Asked:
    """The question of ``asked_json``. Raises ValueError as ``ask`` does."""
    kinds = {"expert_scheme": ExpertScheme, "base": DType, "sampler": DType, "answers": Path}
    options = {name: kinds.get(name, lambda value: value)(value) for name, value in said["options"].items()}
    return ask(said["model"], said["gpus"], Options(**options))


def ask(model: str, gpus: str, options: Options) -> Asked:
    """Raises ValueError naming an option that cannot be."""
    problem = Problem(
        model=find_model(model),
        adapter=None if options.full else _adapter(options),
        precision=Precision(base=options.base, sampler=options.sampler or options.base),
        work=_work(options),
        cluster=_cluster(gpus, options),
        sampler=_engine(options.engine),
    )
    allowed = Allowed(
        placements=_placements(options.placement),
        bases=_bases(options.share),
        lag=options.lag,
        train_layout=Layout.parse(options.train_layout) if options.train_layout else None,
        rollout_layout=Layout.parse(options.rollout_layout) if options.rollout_layout else None,
    )
    found = kept(kept_file(problem.cluster.gpu.name))
    told = UNMEASURED if found is None else f"data sheets, phases by factors of {found.runs} runs"
    clock = Roofline() if found is None else Roofline(factors=found.phases)
    return Asked(problem=problem, allowed=allowed, clock=clock, measured=told)


def _adapter(options: Options) -> AdapterSpec:
    return AdapterSpec(
        rank=options.lora_rank,
        alpha=2.0 * options.lora_rank,
        targets=tuple(options.lora_targets.split(",")),
        expert_scheme=options.expert_scheme,
        expert_rank=options.expert_rank or None,
    )


def _work(options: Options) -> Work:
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


def _cluster(gpus: str, options: Options) -> Cluster:
    cluster = parse_cluster(gpus)
    if options.price:
        cluster = replace(cluster, gpu=replace(cluster.gpu, price=options.price))
    return replace(cluster, host_memory=options.host_memory * GB) if options.host_memory else cluster


def _engine(name: str) -> Sampler:
    if name not in ("vllm", "local"):
        raise ValueError(f"--engine is {name!r}; use vllm or local")
    return Sampler(name=name, latent_kv=name == "vllm")


def _placements(text: str) -> tuple[Placement, ...]:
    if text == "both":
        return tuple(Placement)
    if text not in tuple(Placement):
        raise ValueError(f"--placement is {text!r}; use {', '.join(Placement)} or both")
    return (Placement(text),)


def _bases(text: str) -> tuple[Base, ...]:
    chosen = text.split(",")
    for one in chosen:
        if one not in BASES:
            raise ValueError(f"--share has {one!r}; use some of {', '.join(BASES)}")
    return tuple(BASES[one] for one in chosen)


__all__ = ["Asked", "Options", "ask", "asked_again", "asked_json", "plan_options"]
